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
-- the floor. What context.once recorded for an event goes with the row that settles it, no sooner:
-- until then the event may be handled again, and the record is what prevents a second call.
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
    RETURNING p.consumer, p.event_uuid
), effects AS (
    DELETE FROM events.effect e
     WHERE e.ctid = ANY(ARRAY(
               SELECT record.place FROM pruned
                CROSS JOIN LATERAL (
                      SELECT r.ctid AS place FROM events.effect r
                       WHERE r.consumer = pruned.consumer AND r.event_uuid = pruned.event_uuid
                      OFFSET 0) AS record))
    RETURNING 1
)
SELECT (SELECT count(*) FROM pruned), (SELECT count(*) FROM effects),
       (SELECT count(*) FROM looked), (SELECT max(processed_at) FROM looked)

-- name: prune_effects
-- Records of events that were never settled, by consumers that are gone. Those of a consumer that
-- is there stay, however old: it may be stopped, and handle the event when it comes back. OFFSET 0
-- keeps the planner from joining with whole tables.
WITH looked AS MATERIALIZED (
    SELECT e.ctid AS place, e.consumer, e.event_uuid, e.started_at
      FROM events.effect e
     WHERE e.started_at > %(since)s
       AND e.started_at < now() - make_interval(secs => %(retention_seconds)s)
     ORDER BY e.started_at
     LIMIT %(batch_size)s
), pruned AS (
    DELETE FROM events.effect e
     WHERE e.ctid = ANY(ARRAY(
               SELECT looked.place FROM looked
                WHERE NOT EXISTS (SELECT 1 FROM events.consumer c WHERE c.name = looked.consumer)
                  AND NOT EXISTS (SELECT 1 FROM events.processed_event p
                                   WHERE p.consumer = looked.consumer
                                     AND p.event_uuid = looked.event_uuid OFFSET 0)
                  AND NOT EXISTS (SELECT 1 FROM events.parked_event p
                                   WHERE p.consumer = looked.consumer
                                     AND p.event_uuid = looked.event_uuid OFFSET 0)
                  AND NOT EXISTS (SELECT 1 FROM events.dead_letter d
                                   WHERE d.consumer = looked.consumer
                                     AND d.event_uuid = looked.event_uuid OFFSET 0)))
    RETURNING 1
)
SELECT (SELECT count(*) FROM pruned), (SELECT count(*) FROM looked),
       (SELECT max(started_at) FROM looked)

-- name: prune_inbox_event
-- The oldest claims: nobody delivers these events again.
WITH looked AS MATERIALIZED (
    SELECT i.ctid AS place
      FROM events.inbox_event i
     WHERE i.handled_at < now() - make_interval(secs => %(retention_seconds)s)
     ORDER BY i.handled_at
     LIMIT %(batch_size)s
), pruned AS (
    DELETE FROM events.inbox_event i WHERE i.ctid = ANY(ARRAY(SELECT place FROM looked))
    RETURNING 1
)
SELECT count(*) FROM pruned

-- name: prune_trail
-- The oldest lines. Parked events and dead letters keep their own record of what went wrong.
WITH looked AS MATERIALIZED (
    SELECT t.ctid AS place
      FROM events.trail t
     WHERE t.noted_at < now() - make_interval(secs => %(retention_seconds)s)
     ORDER BY t.noted_at
     LIMIT %(batch_size)s
), pruned AS (
    DELETE FROM events.trail t WHERE t.ctid = ANY(ARRAY(SELECT place FROM looked))
    RETURNING 1
)
SELECT count(*) FROM pruned

-- name: prune_operation_events
-- Operations are few, but one may have touched every event there is, so these go first, in batches.
-- An operation whose events are still on their way is kept, however old, and a replay's as long as
-- the replay. One that has no end was killed, or lost its connection, and counts from its start.
WITH old AS MATERIALIZED (
    SELECT o.id FROM events.operation o
     WHERE coalesce(o.ended_at, o.started_at)
           < now() - make_interval(secs => %(retention_seconds)s)
       AND NOT EXISTS (SELECT 1 FROM events.parked_event p WHERE p.operation_id = o.id)
       AND NOT EXISTS (SELECT 1 FROM events.consumer c WHERE c.operation_id = o.id)
     ORDER BY o.id
     LIMIT %(batch_size)s
), pruned AS (
    DELETE FROM events.operation_event e
     WHERE e.ctid = ANY(ARRAY(
               SELECT touched.place FROM old
                CROSS JOIN LATERAL (
                      SELECT t.ctid AS place FROM events.operation_event t
                       WHERE t.operation_id = old.id
                      OFFSET 0) AS touched
                LIMIT %(batch_size)s))
    RETURNING 1
)
SELECT count(*) FROM pruned

-- name: prune_operations
-- In the same transaction, once none of its events is left.
WITH old AS MATERIALIZED (
    SELECT o.id FROM events.operation o
     WHERE coalesce(o.ended_at, o.started_at)
           < now() - make_interval(secs => %(retention_seconds)s)
       AND NOT EXISTS (SELECT 1 FROM events.parked_event p WHERE p.operation_id = o.id)
       AND NOT EXISTS (SELECT 1 FROM events.consumer c WHERE c.operation_id = o.id)
       AND NOT EXISTS (SELECT 1 FROM events.operation_event e
                        WHERE e.operation_id = o.id OFFSET 0)
     ORDER BY o.id
     LIMIT %(batch_size)s
), pruned AS (
    DELETE FROM events.operation o USING old WHERE o.id = old.id
    RETURNING 1
)
SELECT count(*) FROM pruned

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
