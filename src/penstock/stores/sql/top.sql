-- name: limit_time
-- Whoever looks must not become the load.
SET LOCAL statement_timeout = '10s'

-- name: parked
-- The first events of some parked keys, held ones first. However many keys are parked, only so
-- many are looked at: a screen shows a few.
WITH head AS MATERIALIZED (
    SELECT consumer, position FROM events.parked_event
     WHERE (next_attempt_at IS NOT NULL OR held)
       AND (%(stream_name)s::text IS NULL OR stream_name = %(stream_name)s)
     LIMIT %(looked_at)s
), shown AS (
    SELECT p.* FROM head JOIN events.parked_event p USING (consumer, position)
     ORDER BY p.held DESC, p.next_attempt_at, p.position
     LIMIT %(limit)s
)
SELECT p.consumer, p.stream_name, p.position, split_part(p.entry, E'\n', 10),
       last.depth - p.depth, p.attempts,
       extract(epoch FROM p.next_attempt_at - clock_timestamp())::float8, p.held, p.last_error
  FROM shown p
 CROSS JOIN LATERAL (
       SELECT q.depth FROM events.parked_event q
        WHERE q.consumer = p.consumer AND q.key_hash = p.key_hash
        ORDER BY q.position DESC LIMIT 1) AS last
 ORDER BY p.held DESC, p.next_attempt_at, p.position

-- name: letters
-- The newest dead letters, of the last so many: those of a stream that has had none for long are
-- not worth a walk over all of them.
SELECT id, consumer, stream_name, position, reason, error_type, error_message,
       floor(extract(epoch FROM clock_timestamp() - buried_at) * 1000)::bigint
  FROM (SELECT * FROM events.dead_letter ORDER BY id DESC LIMIT %(looked_at)s) AS newest
 WHERE %(stream_name)s::text IS NULL OR stream_name = %(stream_name)s
 ORDER BY id DESC
 LIMIT %(limit)s

-- name: latest_letter
-- The newest one of a consumer.
SELECT max(id) FROM events.dead_letter WHERE consumer = %(consumer)s
