-- name: hold_registration
-- One at a time for each name, to the end of the transaction: whoever comes second finds the entry
-- of the first, and tells no producer after it that the consumer begins anew.
SELECT pg_advisory_xact_lock(hashtext('penstock registration'), hashtext(%(consumer)s))

-- name: register
-- The name is the identity for ever; the first registration decides where it starts.
INSERT INTO events.consumer (name, stream_name, start_position, guarantee, lanes)
VALUES (%(consumer)s, %(stream_name)s, %(start_position)s, %(guarantee)s, %(lanes)s)
ON CONFLICT DO NOTHING

-- name: describe
-- What the code says now, for those who have only the books.
UPDATE events.consumer SET guarantee = %(guarantee)s, ordering = %(ordering)s
 WHERE name = %(consumer)s AND (guarantee, ordering) <> (%(guarantee)s, %(ordering)s)

-- name: read
-- Whether a consumer is in the books, and for which stream.
SELECT stream_name FROM events.consumer WHERE name = %(consumer)s

-- name: claim_batch
-- See events.claim_batch: locks, deduplication rows, seal.
SELECT fresh, waiting
  FROM events.claim_batch(%(seal_id)s, %(consumer)s, %(stream_name)s, %(role)s, %(epoch_group)s,
                          %(event_uuids)s, %(positions)s, %(outcomes)s)

-- name: claim_among_parked
-- The same where keys are parked: their events are entered as parked, and are not new.
WITH lane AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(
               hashtext('penstock lane'), hashtext(%(stream_name)s || ' ' || %(role)s)),
           pg_advisory_xact_lock_shared(
               hashtext('penstock epoch'), hashtext(%(stream_name)s || ' ' || %(epoch_group)s))
), entered AS (
    INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
    SELECT %(consumer)s, e.event_uuid, e.position,
           CASE WHEN e.outcome = 'handled' AND EXISTS (
                     SELECT 1 FROM events.parked_event p
                      WHERE p.consumer = %(consumer)s AND p.key_hash = e.key_hash
                        AND p.position < e.position)
                THEN 'parked' ELSE e.outcome END
      FROM lane, unnest(%(event_uuids)s::uuid[], %(positions)s::bigint[], %(outcomes)s::text[],
                        %(key_hashes)s::bigint[]) AS e(event_uuid, position, outcome, key_hash)
        ON CONFLICT DO NOTHING
    RETURNING position, outcome
), seal AS (
    INSERT INTO events.seal (id, fresh)
    SELECT %(seal_id)s::bigint, count(*) FROM entered WHERE outcome <> 'parked'
)
SELECT ARRAY(SELECT position FROM entered WHERE outcome <> 'parked'),
       ARRAY(SELECT position FROM entered WHERE outcome = 'parked')

-- name: survey
-- For a handler that is called before its events are claimed: which of them are its to handle.
SELECT ARRAY(
    SELECT e.position
      FROM unnest(%(event_uuids)s::uuid[], %(positions)s::bigint[], %(key_hashes)s::bigint[])
           AS e(event_uuid, position, key_hash)
     WHERE NOT EXISTS (SELECT 1 FROM events.processed_event d
                        WHERE d.consumer = %(consumer)s AND d.event_uuid = e.event_uuid)
       AND NOT (%(in_order)s AND EXISTS (
                SELECT 1 FROM events.parked_event p
                 WHERE p.consumer = %(consumer)s AND p.key_hash = e.key_hash
                   AND p.position < e.position)))

-- name: rehearse
-- A seal that nobody breaks: whatever a handler does, this transaction is rolled back.
INSERT INTO events.seal (id, fresh) VALUES (%(seal_id)s, 0) RETURNING '{}'::bigint[]

-- name: unclaim
-- A batch that ends early gives back what it did not handle.
DELETE FROM events.processed_event
 WHERE consumer = %(consumer)s AND event_uuid = ANY(%(event_uuids)s::uuid[])

-- name: fence
-- Raises unless seal, transaction and lease are all what they were at the start, and as many
-- events were new as the worker took for new.
SELECT events.fence(%(seal_id)s, %(fresh)s, %(stream_name)s, %(role)s, %(owner_id)s, %(term)s,
                    %(old_checkpoint)s, %(new_checkpoint)s)
