-- name: look
-- Whether anything of a lane is parked, which keys, unless they are too many, and in how many
-- seconds the next one is due. One row for each key is looked at, however many wait behind it.
SELECT count(*) > 0, CASE WHEN count(*) <= %(keys_max)s THEN array_agg(key_hash) END,
       extract(epoch FROM min(next_attempt_at) - clock_timestamp())::float8
  FROM events.parked_event
 WHERE consumer = %(consumer)s AND (next_attempt_at IS NOT NULL OR held)
   AND ((key_hash %% %(lanes)s) + %(lanes)s) %% %(lanes)s = %(lane)s

-- name: due
-- The first event of each key whose time has come; with those that wait behind it, unless it has
-- failed before: then it is tried alone. What a redriven one went through was before its redrive.
WITH head AS MATERIALIZED (
    SELECT p.key_hash, p.position,
           CASE WHEN %(in_order)s AND p.attempts = 0
                     AND (p.history = '[]' OR p.operation_id IS NOT NULL)
                THEN %(count)s ELSE 1 END AS count
      FROM events.parked_event p
     WHERE p.consumer = %(consumer)s AND p.next_attempt_at <= clock_timestamp()
       AND ((p.key_hash %% %(lanes)s) + %(lanes)s) %% %(lanes)s = %(lane)s
       AND NOT (%(in_order)s AND EXISTS (
                SELECT 1 FROM events.parked_event q
                 WHERE q.consumer = p.consumer AND q.key_hash = p.key_hash
                   AND q.position < p.position))
     ORDER BY p.next_attempt_at, p.position
     LIMIT %(count)s
), chosen AS MATERIALIZED (
    SELECT next.position
      FROM head
     CROSS JOIN LATERAL (
           SELECT p.position FROM events.parked_event p
            WHERE p.consumer = %(consumer)s AND p.key_hash = head.key_hash
              AND p.position >= head.position AND NOT p.held
            ORDER BY p.position LIMIT head.count) AS next
     ORDER BY next.position
     LIMIT %(count)s
)
SELECT p.position, p.entry, p.attempts, jsonb_array_length(p.history),
       p.operation_id IS NOT NULL
  FROM chosen JOIN events.parked_event p
    ON p.consumer = %(consumer)s AND p.position = chosen.position
 ORDER BY p.position

-- name: put_off
-- Those that are due; what waits behind another has no time of its own.
UPDATE events.parked_event
   SET next_attempt_at = clock_timestamp() + make_interval(secs => %(seconds)s)
 WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])
   AND next_attempt_at IS NOT NULL

-- name: let_overtake
-- A consumer that keeps no order any more: whatever waits behind another is due by itself.
UPDATE events.parked_event SET next_attempt_at = clock_timestamp()
 WHERE consumer = %(consumer)s AND next_attempt_at IS NULL AND NOT held

-- name: claim
-- The parked rows stay locked for as long as their attempt lasts; one that an operator has taken
-- away or held meanwhile does not come back, nor what waits behind it: behind the first of its key
-- that is left. Lane, epoch and seal as in claim_batch.
WITH lane AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(
               hashtext('penstock lane'), hashtext(%(stream_name)s || ' ' || %(role)s)),
           pg_advisory_xact_lock_shared(
               hashtext('penstock epoch'), hashtext(%(stream_name)s || ' ' || %(epoch_group)s))
), locked AS MATERIALIZED (
    SELECT p.position, p.key_hash FROM lane, events.parked_event p
     WHERE p.consumer = %(consumer)s AND p.position = ANY(%(positions)s::bigint[]) AND NOT p.held
       FOR UPDATE OF p
), claimed AS MATERIALIZED (
    SELECT locked.position
      FROM locked
      JOIN (SELECT key.key_hash, (
                   SELECT p.position FROM events.parked_event p
                    WHERE p.consumer = %(consumer)s AND p.key_hash = key.key_hash
                      AND p.position NOT IN (SELECT position FROM locked)
                    ORDER BY p.position LIMIT 1) AS position
              FROM (SELECT DISTINCT key_hash FROM locked) AS key) AS left_out USING (key_hash)
     WHERE NOT %(in_order)s OR locked.position < left_out.position OR left_out.position IS NULL
), seal AS (
    INSERT INTO events.seal (id, fresh) SELECT %(seal_id)s::bigint, count(*) FROM claimed
)
SELECT ARRAY(SELECT position FROM claimed), '{}'::bigint[]

-- name: still_there
-- For a handler that is called before its events are claimed: what claim would take.
WITH there AS MATERIALIZED (
    SELECT p.position, p.key_hash FROM events.parked_event p
     WHERE p.consumer = %(consumer)s AND p.position = ANY(%(positions)s::bigint[]) AND NOT p.held
)
SELECT there.position
  FROM there
  JOIN (SELECT key.key_hash, (
               SELECT p.position FROM events.parked_event p
                WHERE p.consumer = %(consumer)s AND p.key_hash = key.key_hash
                  AND p.position NOT IN (SELECT position FROM there)
                ORDER BY p.position LIMIT 1) AS position
          FROM (SELECT DISTINCT key_hash FROM there) AS key) AS left_out USING (key_hash)
 WHERE NOT %(in_order)s OR there.position < left_out.position OR left_out.position IS NULL

-- name: settle
-- They are handled or passed by: no longer parked, no longer dead; the next of each key is due.
WITH settled AS (
    DELETE FROM events.parked_event
     WHERE consumer = %(consumer)s AND position = ANY(%(positions)s::bigint[])
    RETURNING event_uuid, key_hash
), outcome AS (
    UPDATE events.processed_event e
       SET outcome = %(outcome)s, processed_at = clock_timestamp()
      FROM settled
     WHERE e.consumer = %(consumer)s AND e.event_uuid = settled.event_uuid
), letter AS (
    DELETE FROM events.dead_letter d USING settled
     WHERE d.consumer = %(consumer)s AND d.event_uuid = settled.event_uuid
)
SELECT events.promote_parked(%(consumer)s, ARRAY(SELECT key_hash FROM settled),
                             %(positions)s::bigint[])

-- name: park
-- A failed event with the time of its next attempt, or events that wait behind one. Those have no
-- time of their own, as long as there is somebody before them who will pass it on: a row that
-- nobody can remove before this commits. The first of the key or none: whoever removes the first
-- passes its turn to the second, which must not be locked here meanwhile. It comes back with how
-- many wait, and behind whom.
WITH parked AS MATERIALIZED (
    SELECT e.*, row_number() OVER (PARTITION BY e.key_hash ORDER BY e.position) AS n
      FROM unnest(%(positions)s::bigint[], %(event_uuids)s::uuid[], %(key_hashes)s::bigint[],
                  %(entries)s::text[]) AS e(position, event_uuid, key_hash, entry)
), key AS MATERIALIZED (
    SELECT k.key_hash, k.count, ahead.position, ahead.depth AS first_depth, last.depth
      FROM (SELECT key_hash, count(*) AS count, min(position) AS first
              FROM parked GROUP BY key_hash) AS k
      LEFT JOIN LATERAL (
           SELECT p.position, p.depth FROM events.parked_event p
            WHERE p.consumer = %(consumer)s AND p.position = (
                  SELECT min(q.position) FROM events.parked_event q
                   WHERE q.consumer = %(consumer)s AND q.key_hash = k.key_hash
                     AND q.position < k.first)
              FOR SHARE SKIP LOCKED) AS ahead ON true
      LEFT JOIN LATERAL (
           SELECT p.depth FROM events.parked_event p
            WHERE p.consumer = %(consumer)s AND p.key_hash = k.key_hash
            ORDER BY p.position DESC LIMIT 1) AS last ON true
), inserted AS (
    INSERT INTO events.parked_event
           (consumer, stream_name, position, event_uuid, key_hash, entry, attempts,
            next_attempt_at, held, last_error, history, depth)
    SELECT %(consumer)s, %(stream_name)s, parked.position, parked.event_uuid, parked.key_hash,
           parked.entry, %(attempts)s,
           CASE WHEN %(held)s THEN NULL
                WHEN %(delay_seconds)s::float8 IS NOT NULL
                THEN clock_timestamp() + make_interval(secs => %(delay_seconds)s::float8)
                WHEN key.position IS NULL AND parked.n = 1 THEN clock_timestamp() END,
           %(held)s, %(error)s,
           CASE WHEN %(error)s::text IS NULL THEN '[]' ELSE jsonb_build_array(jsonb_build_object(
               'at', clock_timestamp(), 'host', %(host)s::text, 'error', %(error)s::text)) END,
           coalesce(key.depth, 0) + parked.n
      FROM parked JOIN key USING (key_hash)
        ON CONFLICT (consumer, position) DO NOTHING
)
SELECT coalesce(position, 0), coalesce(depth - first_depth, 0), count FROM key

-- name: postpone
-- Failed again: the next attempt, or none until somebody says so. Where that was no attempt, a
-- redriven one is on its way as before.
UPDATE events.parked_event
   SET attempts = %(attempts)s, held = %(held)s, last_error = %(error)s,
       operation_id = CASE WHEN attempts = %(attempts)s THEN operation_id END,
       next_attempt_at = CASE WHEN NOT %(held)s
            THEN clock_timestamp() + make_interval(secs => %(delay_seconds)s::float8) END,
       history = jsonb_path_query_array(history || jsonb_build_array(jsonb_build_object(
            'at', clock_timestamp(), 'host', %(host)s::text, 'error', %(error)s::text)),
            '$[last - 19 to last]')
 WHERE consumer = %(consumer)s AND position = %(position)s

-- name: bury
-- Everything that is known. A letter that was redriven and comes back keeps its number; what was
-- recorded of its attempts is at hand in parked_event until it is removed from there.
INSERT INTO events.dead_letter (consumer, stream_name, position, event_uuid, event_type, version,
                                key_hash, entry, reason, error_type, error_message, traceback,
                                fingerprint, handler, attempts, host, operation_id)
SELECT %(consumer)s, %(stream_name)s, %(position)s, %(event_uuid)s, %(event_type)s, %(version)s,
       %(key_hash)s, %(entry)s, %(reason)s, %(error_type)s, %(error_message)s, %(traceback)s,
       %(fingerprint)s, %(handler)s,
       coalesce(parked.history, '[]')
           || coalesce(%(starts)s::jsonb, jsonb_build_array(jsonb_build_object(
               'at', clock_timestamp(), 'host', %(host)s::text, 'error', %(error)s::text))),
       %(host)s, parked.operation_id
  FROM (SELECT 1) AS one
  LEFT JOIN events.parked_event parked
    ON parked.consumer = %(consumer)s AND parked.position = %(position)s
ON CONFLICT (consumer, event_uuid) DO UPDATE
   SET reason = excluded.reason, error_type = excluded.error_type,
       error_message = excluded.error_message, traceback = excluded.traceback,
       fingerprint = excluded.fingerprint, handler = excluded.handler,
       attempts = excluded.attempts, host = excluded.host, buried_at = excluded.buried_at,
       operation_id = coalesce(excluded.operation_id, dead_letter.operation_id),
       redrives = dead_letter.redrives + (excluded.operation_id IS NOT NULL)::integer

-- name: remove
-- It is a dead letter now; its key goes on.
WITH removed AS (
    DELETE FROM events.parked_event
     WHERE consumer = %(consumer)s AND position = %(position)s
    RETURNING event_uuid, key_hash
), outcome AS (
    UPDATE events.processed_event e SET outcome = 'dead', processed_at = clock_timestamp()
      FROM removed
     WHERE e.consumer = %(consumer)s AND e.event_uuid = removed.event_uuid
)
SELECT events.promote_parked(%(consumer)s, ARRAY(SELECT key_hash FROM removed),
                             ARRAY[%(position)s::bigint])

-- name: begin_letter
-- Always one row: what is written next is right only while the event counts as handled.
SELECT (SELECT outcome FROM events.processed_event
         WHERE consumer = %(consumer)s AND event_uuid = %(event_uuid)s
           FOR UPDATE)

-- name: declare_dead
-- Its checkpoint has passed before its attempt, and that attempt failed. It has one in the stream
-- and one for each redrive, of which nothing but the operation is left by now.
WITH redrive AS (
    SELECT max(o.id) AS id, count(*) AS count
      FROM events.operation_event e JOIN events.operation o ON o.id = e.operation_id
     WHERE e.event_uuid = %(event_uuid)s AND e.consumer = %(consumer)s AND o.kind = 'redrive'
), letter AS (
    UPDATE events.dead_letter d SET operation_id = redrive.id, redrives = redrive.count
      FROM redrive
     WHERE d.consumer = %(consumer)s AND d.event_uuid = %(event_uuid)s AND redrive.count > 0
)
UPDATE events.processed_event SET outcome = 'dead', processed_at = clock_timestamp()
 WHERE consumer = %(consumer)s AND event_uuid = %(event_uuid)s
