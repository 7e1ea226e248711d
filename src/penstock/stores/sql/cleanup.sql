-- name: prepare
-- Cleanup waits for nobody and nobody waits for it. A batch that a crash takes back is pruned
-- again, so its commit need not be durable. Statistics of these tables are always stale, and the
-- right plan is always the index. By the lock a successor finds this backend if its client hangs.
SELECT set_config('lock_timeout', %(lock_timeout)s, true),
       set_config('synchronous_commit', 'off', true),
       set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true),
       set_config('jit', 'off', true),
       pg_advisory_xact_lock_shared(hashtext('penstock lane'), hashtext('* janitor'))

-- name: prune_settled
-- Looks at the next rows in the order of their age and deletes those below their consumer's floor,
-- where `position <= checkpoint` is the deduplication, and those of consumers that are gone. now()
-- and not clock_timestamp(): only what stays the same during a statement can end the walk through
-- the index. Rows are addressed by their place, so no statistics can lead to a join over the whole
-- table; the outcome is asked for again because a row may have been parked since it was looked at,
-- and not every release of PostgreSQL then notices that it has moved. A row that somebody has
-- locked ends the batch: SKIP LOCKED would cost every batch more, for what hardly happens below
-- the floor.
WITH looked AS MATERIALIZED (
    SELECT p.ctid AS place, p.consumer, p.position, p.processed_at
      FROM events.processed_event p
     WHERE p.processed_at > %(since)s
       AND p.processed_at < now() - make_interval(secs => %(retention_seconds)s)
       AND p.outcome NOT IN ('parked', 'dead')
     ORDER BY p.processed_at
     LIMIT %(batch_size)s
), floor AS MATERIALIZED (
    SELECT name, position FROM events.reader WHERE kind = 'consumer'
), pruned AS (
    DELETE FROM events.processed_event p
     WHERE p.ctid = ANY(ARRAY(
               SELECT looked.place FROM looked
                 LEFT JOIN floor ON floor.name = looked.consumer
                WHERE floor.name IS NULL OR looked.position <= floor.position))
       AND p.outcome NOT IN ('parked', 'dead')
    RETURNING 1
)
SELECT (SELECT count(*) FROM pruned), (SELECT count(*) FROM looked),
       (SELECT max(processed_at) FROM looked)

-- name: try_hold_readers
-- Whoever decides where a consumer starts holds this lock, shared, until the books say so: nothing
-- is pruned between his look at the outbox and his entry. A statement of its own, so that the
-- pruning sees what was committed before.
SELECT pg_try_advisory_xact_lock(hashtext('penstock prune'), hashtext(%(stream_name)s))

-- name: hold_pruning
-- The other half of try_hold_readers, to the end of the transaction.
SELECT pg_advisory_xact_lock_shared(hashtext('penstock prune'), hashtext(%(stream_name)s))

-- name: prune_outbox
-- From the front and without a gap, so that what is kept can be read from its first position on:
-- up to the slowest reader, and up to the first row that is not old enough. For the same reason
-- nothing that is locked is stepped over.
WITH looked AS MATERIALIZED (
    SELECT o.ctid AS place, o.position,
           coalesce(o.published_at < now() - make_interval(secs => %(retention_seconds)s), false)
               AS is_old
      FROM events.outbox_event o
     WHERE o.stream_name = %(stream_name)s AND o.position > %(after)s
       AND o.position <= (SELECT min(r.position) FROM events.reader r
                           WHERE r.stream_name = %(stream_name)s)
     ORDER BY o.position
     LIMIT %(batch_size)s
), old AS (
    SELECT place, bool_and(is_old) OVER (ORDER BY position) AS is_old FROM looked
), pruned AS (
    DELETE FROM events.outbox_event o
     WHERE o.ctid = ANY(ARRAY(SELECT place FROM old WHERE is_old))
    RETURNING o.position
)
SELECT count(*), max(position) FROM pruned

-- name: streams
-- Every stream that may have something to prune.
SELECT name FROM events.stream WHERE published > 0 ORDER BY name

-- name: held
-- Streams whose oldest row should have gone a whole retention ago, and the reader it waits for.
SELECT s.name, slowest.kind, slowest.name, slowest.position,
       extract(epoch FROM now() - oldest.published_at)::float8
  FROM events.stream s
 CROSS JOIN LATERAL (
       SELECT r.kind, r.name, r.position FROM events.reader r
        WHERE r.stream_name = s.name
        ORDER BY r.position, r.kind, r.name LIMIT 1
       ) AS slowest
 CROSS JOIN LATERAL (
       SELECT o.position, o.published_at FROM events.outbox_event o
        WHERE o.stream_name = s.name AND o.position IS NOT NULL
        ORDER BY o.position LIMIT 1
       ) AS oldest
 WHERE oldest.position > slowest.position
   AND oldest.published_at < now() - 2 * make_interval(secs => %(retention_seconds)s)
 ORDER BY s.name
