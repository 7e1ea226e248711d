-- name: look
-- What is known of a call, without changing anything: for rehearsals.
SELECT is_done, result::text, calls, host, started_at, call_id
  FROM events.effect
 WHERE consumer = %(consumer)s AND event_uuid = %(event_uuid)s AND effect = %(effect)s

-- name: begin
-- Committed before the call. It always gives the row, also one that a rival inserts at this very
-- moment: DO NOTHING would give none, and a SELECT beside it has too old a snapshot to see it.
-- With the same call_id it can be said twice, where the first answer was lost.
INSERT INTO events.effect AS e (consumer, event_uuid, effect, call_id, host)
VALUES (%(consumer)s, %(event_uuid)s, %(effect)s, %(call_id)s, %(host)s)
ON CONFLICT (consumer, event_uuid, effect) DO UPDATE SET calls = e.calls
RETURNING is_done, result::text, calls, host, started_at, call_id

-- name: begin_again
-- The outcome of an earlier call is unknown, and it is called once more; unless a rival has
-- recorded a result meanwhile, or has taken its own call back.
INSERT INTO events.effect AS e (consumer, event_uuid, effect, call_id, host)
VALUES (%(consumer)s, %(event_uuid)s, %(effect)s, %(call_id)s, %(host)s)
ON CONFLICT (consumer, event_uuid, effect) DO UPDATE
   SET call_id    = CASE WHEN e.is_done THEN e.call_id ELSE excluded.call_id END,
       calls      = CASE WHEN e.is_done THEN e.calls ELSE e.calls + 1 END,
       host       = CASE WHEN e.is_done THEN e.host ELSE excluded.host END,
       started_at = CASE WHEN e.is_done THEN e.started_at ELSE excluded.started_at END
RETURNING is_done, result::text, calls, host, started_at, call_id

-- name: record
-- The first result wins, and whoever comes later gets that one back. NULL: it has happened, and
-- its result cannot be kept; a result of None is the JSON null.
INSERT INTO events.effect AS e
       (consumer, event_uuid, effect, call_id, is_done, result, host, done_at)
VALUES (%(consumer)s, %(event_uuid)s, %(effect)s, %(call_id)s, true, %(result)s::jsonb, %(host)s,
        clock_timestamp())
ON CONFLICT (consumer, event_uuid, effect) DO UPDATE
   SET is_done = true,
       result  = CASE WHEN e.is_done THEN e.result ELSE excluded.result END,
       call_id = CASE WHEN e.is_done THEN e.call_id ELSE excluded.call_id END,
       done_at = CASE WHEN e.is_done THEN e.done_at ELSE excluded.done_at END
RETURNING is_done, result::text, calls, host, started_at, call_id

-- name: forget
-- The call failed by its own account, so nothing happened. Only one's own: a rival may be in
-- another call since.
DELETE FROM events.effect
 WHERE consumer = %(consumer)s AND event_uuid = %(event_uuid)s AND effect = %(effect)s
   AND NOT is_done AND call_id = %(call_id)s
