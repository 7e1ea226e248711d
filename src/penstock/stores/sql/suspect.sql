-- name: unfinished
-- Whoever comes to one of these runs it alone, also where lanes were changed meanwhile and nobody
-- knows any more that their holder died. Of an event that somebody settled since, a start says
-- nothing.
WITH unfinished AS MATERIALIZED (
    SELECT s.position, s.event_uuid, EXISTS (
               SELECT 1 FROM events.processed_event p
                WHERE p.consumer = s.consumer AND p.event_uuid = s.event_uuid
                  AND p.outcome <> 'parked') AS settled
      FROM events.suspect s WHERE s.consumer = %(consumer)s
), forgotten AS (
    DELETE FROM events.suspect s USING unfinished u
     WHERE s.consumer = %(consumer)s AND s.position = u.position AND u.settled
)
SELECT position FROM unfinished WHERE NOT settled

-- name: start
-- Committed before the attempt begins. Earlier starts that are still here never finished. RETURNING
-- makes the commit asynchronous: it has to outlive a worker, not the server.
INSERT INTO events.suspect (consumer, position, event_uuid, worker_id, starts)
VALUES (%(consumer)s, %(position)s, %(event_uuid)s, %(worker_id)s,
        jsonb_build_array(jsonb_build_object(
            'worker_id', %(worker_id)s::text, 'host', %(host)s::text, 'at', clock_timestamp())))
ON CONFLICT (consumer, position) DO UPDATE
   SET starts = suspect.starts || excluded.starts, worker_id = excluded.worker_id,
       started_at = excluded.started_at
RETURNING starts, set_config('synchronous_commit', 'off', true)

-- name: finish
-- The attempt ended, well or not, and the process is still there.
DELETE FROM events.suspect WHERE consumer = %(consumer)s AND position = %(position)s
