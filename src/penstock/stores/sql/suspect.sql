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
