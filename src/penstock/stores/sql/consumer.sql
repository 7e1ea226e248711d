-- name: register
-- The name is the identity for ever; the first registration decides where it starts.
INSERT INTO events.consumer (name, stream_name, start_position, guarantee)
VALUES (%(consumer)s, %(stream_name)s, %(start_position)s, %(guarantee)s)
ON CONFLICT DO NOTHING

-- name: read
-- What the books know of a consumer; they win over the code.
SELECT stream_name, start_position, lanes, epoch, guarantee
  FROM events.consumer WHERE name = %(consumer)s

-- name: claim_batch
-- First the lane's lock, by which a successor finds this backend; then the seal, which forbids
-- any COMMIT but the worker's; then the deduplication rows. What comes back is new.
WITH lane AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(
               hashtext('penstock lane'), hashtext(%(stream_name)s || ' ' || %(role)s))
), seal AS (
    INSERT INTO events.seal (backend) SELECT pg_backend_pid() FROM lane RETURNING id
), fresh AS (
    INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
    SELECT %(consumer)s, e.event_uuid, e.position, e.outcome
      FROM unnest(%(event_uuids)s::uuid[], %(positions)s::bigint[], %(outcomes)s::text[])
           AS e(event_uuid, position, outcome)
        ON CONFLICT DO NOTHING
    RETURNING position
)
SELECT (SELECT id FROM seal), pg_current_xact_id()::text, ARRAY(SELECT position FROM fresh)

-- name: unclaim
-- A batch that ends early gives back what it did not handle.
DELETE FROM events.processed_event
 WHERE consumer = %(consumer)s AND event_uuid = ANY(%(event_uuids)s::uuid[])

-- name: fence
-- Raises unless seal, transaction and lease are all what they were at the start.
SELECT events.fence(%(seal_id)s, %(xid)s, %(stream_name)s, %(role)s, %(owner_id)s, %(term)s,
                    %(old_checkpoint)s, %(new_checkpoint)s)
