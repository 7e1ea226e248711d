-- What operators do to letters, a chunk at a time. Each statement is about one table and names its
-- rows by their keys: statistics of queues are always stale, and the planner's way from one table
-- to the other led over all letters for each chunk.

-- name: begin_operation
-- Before the first event is touched, so that every touched one has somebody who did it.
INSERT INTO events.operation (kind, consumer, criteria, requested_by, reason)
VALUES (%(kind)s, %(consumer)s, %(criteria)s::jsonb, %(by)s, %(reason)s)
RETURNING id

-- name: end_operation
-- One without an end was killed; its letters are finished by workers all the same.
UPDATE events.operation
   SET ended_at = clock_timestamp(), ended_as = %(ended_as)s, failed = %(failed)s
 WHERE id = %(operation_id)s

-- name: note_outcomes
-- How it stands, and when that was: by its time whoever has to wait for it sees that it is alive.
UPDATE events.operation
   SET failed = %(failed)s,
       outcomes = %(outcomes)s::jsonb || jsonb_build_object('at', clock_timestamp())
 WHERE id = %(operation_id)s

-- name: prepare
-- An operator does not wait for a hung worker.
SELECT set_config('lock_timeout', %(lock_timeout)s, true),
       set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)

-- name: touch
-- What was touched is on record.
WITH touched AS (
    INSERT INTO events.operation_event (operation_id, consumer, event_uuid, position)
    SELECT %(operation_id)s, %(consumer)s, e.event_uuid, e.position
      FROM unnest(%(event_uuids)s::uuid[], %(positions)s::bigint[]) AS e(event_uuid, position)
    RETURNING 1
)
UPDATE events.operation SET events = events + (SELECT count(*) FROM touched)
 WHERE id = %(operation_id)s

-- name: lock_letters
-- Locked ones are in other hands: a worker that just settles them, or another operator.
SELECT id, consumer, position, event_uuid::text, key_hash
  FROM events.dead_letter
 WHERE id = ANY(%(ids)s::bigint[])
 ORDER BY id
   FOR UPDATE SKIP LOCKED

-- name: release_held
-- Its row is in its key already, and keeps its place there.
UPDATE events.parked_event
   SET held = false, attempts = 0, next_attempt_at = clock_timestamp(),
       operation_id = %(operation_id)s
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[]) AND held
RETURNING event_uuid::text

-- name: mark_parked
-- Only what the books call dead: a letter that is on its way is not, so nothing is handled twice.
UPDATE events.processed_event
   SET outcome = 'parked'
 WHERE consumer = %(consumer)s AND event_uuid = ANY(%(event_uuids)s::uuid[]) AND outcome = 'dead'
RETURNING event_uuid::text

-- name: park
-- The first of a key is due, unless the first that is there already cannot be removed before this
-- commits, and therefore passes the turn on. A due time that is early is harmless, since only
-- the first of a key is tried; a missing one would not be. Where no order is kept all are due.
-- Depths go on from the event before, or lead up to the one behind.
WITH ranked AS MATERIALIZED (
    SELECT id, key_hash, position,
           row_number() OVER (PARTITION BY key_hash ORDER BY position)::integer AS n,
           count(*) OVER (PARTITION BY key_hash)::integer AS count,
           max(position) OVER (PARTITION BY key_hash) AS last
      FROM events.dead_letter
     WHERE id = ANY(%(ids)s::bigint[])
), placed AS MATERIALIZED (
    SELECT r.id, r.n, r.key_hash, before.position AS waits_for,
           coalesce(previous.depth, next.depth - r.count - 1, 0) AS depth
      FROM ranked r
      LEFT JOIN LATERAL (
           SELECT p.position FROM events.parked_event p
            WHERE p.consumer = %(consumer)s AND p.position = (
                  SELECT min(q.position) FROM events.parked_event q
                   WHERE r.n = 1 AND q.consumer = %(consumer)s AND q.key_hash = r.key_hash
                     AND q.position < r.position)
              FOR SHARE SKIP LOCKED) AS before ON true
      LEFT JOIN LATERAL (
           SELECT p.depth FROM events.parked_event p
            WHERE r.n = 1 AND p.consumer = %(consumer)s AND p.key_hash = r.key_hash
              AND p.position < r.position
            ORDER BY p.position DESC LIMIT 1) AS previous ON true
      LEFT JOIN LATERAL (
           SELECT p.depth FROM events.parked_event p
            WHERE r.n = 1 AND p.consumer = %(consumer)s AND p.key_hash = r.key_hash
              AND p.position > r.last
            ORDER BY p.position LIMIT 1) AS next ON true
), chained AS (
    SELECT id, n = 1 AND waits_for IS NULL AS is_first,
           n + first_value(depth) OVER (PARTITION BY key_hash ORDER BY n) AS depth
      FROM placed
)
INSERT INTO events.parked_event
       (consumer, stream_name, position, event_uuid, key_hash, entry, history, last_error, depth,
        operation_id, next_attempt_at)
SELECT d.consumer, d.stream_name, d.position, d.event_uuid, d.key_hash, d.entry, d.attempts,
       concat_ws(': ', d.error_type, d.error_message), chained.depth, %(operation_id)s,
       CASE WHEN chained.is_first OR EXISTS (
                 SELECT 1 FROM events.consumer c
                  WHERE c.name = %(consumer)s AND c.ordering = 'none')
            THEN clock_timestamp() END
  FROM chained JOIN events.dead_letter d ON d.id = chained.id
 WHERE d.id = ANY(%(ids)s::bigint[])

-- name: tally
-- How many are on their way, and how many failed again: a worker that buries one writes down
-- whose redrive it was.
SELECT (SELECT count(*) FROM events.parked_event p
         WHERE p.operation_id = %(operation_id)s AND NOT p.held),
       (SELECT count(*) FROM events.dead_letter d WHERE d.operation_id = %(operation_id)s)

-- name: on_the_way
-- Which those are.
SELECT consumer, event_uuid::text FROM events.parked_event
 WHERE operation_id = %(operation_id)s AND NOT held

-- name: outcomes
-- What became of events that are on their way no more. One that failed is a letter again, or was
-- until somebody else took it: the trail tells. One without a row went with its consumer; if that
-- was a replay which came to its end, nothing of it was left to do. OFFSET 0 keeps the planner
-- from reading the whole trail.
SELECT CASE WHEN e.outcome = 'handled' THEN e.outcome
            WHEN e.outcome IN ('dead', 'parked') OR EXISTS (
                 SELECT 1 FROM events.trail t
                  WHERE t.event_uuid = e.event_uuid AND t.consumer = %(consumer)s
                    AND t.step = 'buried' AND t.operation_id = %(operation_id)s
                 OFFSET 0) THEN 'failed'
            WHEN e.outcome IS NOT NULL THEN e.outcome
            WHEN (SELECT r.ended_as FROM events.operation r
                   WHERE r.kind = 'replay' AND r.criteria ->> 'replay' = %(consumer)s
                   ORDER BY r.id DESC LIMIT 1) = 'done' THEN 'handled'
            ELSE 'discarded' END,
       count(*)
  FROM (SELECT u.event_uuid,
               (SELECT p.outcome FROM events.processed_event p
                 WHERE p.consumer = %(consumer)s AND p.event_uuid = u.event_uuid) AS outcome
          FROM unnest(%(event_uuids)s::uuid[]) AS u(event_uuid)
        OFFSET 0) AS e
 GROUP BY 1

-- name: lock_waiting
-- Whatever no worker has in hand. A row that is older than the redrive was held before it. The
-- last ones first: what goes on meanwhile is before them.
SELECT p.consumer, p.position, p.event_uuid::text, p.key_hash,
       p.parked_at < (SELECT o.started_at FROM events.operation o WHERE o.id = %(operation_id)s)
  FROM events.parked_event p
 WHERE p.operation_id = %(operation_id)s AND NOT p.held
 ORDER BY p.position DESC
 LIMIT %(count)s
   FOR UPDATE OF p SKIP LOCKED

-- name: remove_parked
-- The next of each key has to be told.
DELETE FROM events.parked_event
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])

-- name: hold_again
-- As it was before its redrive.
UPDATE events.parked_event
   SET held = true, next_attempt_at = NULL, operation_id = NULL,
       attempts = jsonb_array_length(history)
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])

-- name: mark_dead
-- Only its letter is left.
UPDATE events.processed_event
   SET outcome = 'dead'
 WHERE consumer = %(consumer)s AND event_uuid = ANY(%(event_uuids)s::uuid[])

-- name: untouch
-- What was taken back in time was not touched.
WITH untouched AS (
    DELETE FROM events.operation_event
     WHERE operation_id = %(operation_id)s AND event_uuid = ANY(%(event_uuids)s::uuid[])
       AND consumer = %(consumer)s
    RETURNING 1
)
UPDATE events.operation SET events = events - (SELECT count(*) FROM untouched)
 WHERE id = %(operation_id)s

-- name: promote_after
-- In the transaction that removes rows: the next one behind them is due. A worker that settles an
-- earlier event of the key at the same moment may have chosen a removed row to be next, and would
-- pass the turn on to nobody.
UPDATE events.parked_event p SET next_attempt_at = clock_timestamp()
 WHERE p.consumer = %(consumer)s AND p.next_attempt_at IS NULL AND NOT p.held
   AND p.position = ANY(ARRAY(
       SELECT next.position
         FROM unnest(%(key_hashes)s::bigint[], %(positions)s::bigint[]) AS k(key_hash, position)
        CROSS JOIN LATERAL (
              SELECT q.position FROM events.parked_event q
               WHERE q.consumer = %(consumer)s AND q.key_hash = k.key_hash
                 AND q.position > k.position
               ORDER BY q.position LIMIT 1 FOR UPDATE SKIP LOCKED) AS next))

-- name: lock_parked
-- The parked rows of letters, unless a worker has them in hand.
SELECT position FROM events.parked_event
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])
 ORDER BY position
   FOR UPDATE SKIP LOCKED

-- name: parked
-- All of them, in whatever hands.
SELECT position FROM events.parked_event
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])

-- name: read_places
-- Letters that are still there, locked or not.
SELECT id, consumer, position, event_uuid::text, key_hash
  FROM events.dead_letter
 WHERE id = ANY(%(ids)s::bigint[])
 ORDER BY position, id

-- name: delete_letters
-- Nobody will handle these.
DELETE FROM events.dead_letter WHERE id = ANY(%(ids)s::bigint[])

-- name: mark_discarded
-- The books say so.
UPDATE events.processed_event
   SET outcome = 'discarded', processed_at = clock_timestamp()
 WHERE consumer = %(consumer)s AND event_uuid = ANY(%(event_uuids)s::uuid[])

-- name: release_waiting
-- Due now. One that a worker has in hand is being tried already.
WITH waiting AS MATERIALIZED (
    SELECT p.position FROM events.parked_event p
     WHERE p.consumer = %(consumer)s AND p.position = ANY(%(positions)s::bigint[]) AND NOT p.held
     ORDER BY p.position
       FOR UPDATE SKIP LOCKED
)
UPDATE events.parked_event p SET next_attempt_at = clock_timestamp()
 WHERE p.consumer = %(consumer)s AND p.position = ANY(ARRAY(SELECT position FROM waiting))
RETURNING p.event_uuid::text, p.position
