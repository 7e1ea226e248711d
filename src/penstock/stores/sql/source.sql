-- name: register
-- See events.register_source: a stream is numbered here or elsewhere, never both.
SELECT events.register_source(%(stream_name)s)

-- name: read
-- As it was last seen.
SELECT first, head FROM events.source WHERE stream_name = %(stream_name)s

-- name: see
-- Only when something changed: workers of all hosts look every second.
UPDATE events.source
   SET first = %(first)s, head = %(head)s, seen_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s
   AND ((first, head) <> (%(first)s, %(head)s) OR seen_at IS NULL
        OR seen_at < clock_timestamp() - interval '30 seconds')

-- name: pinned
-- The database that a consumer's stream came from when it read first.
SELECT origin::text FROM events.consumer WHERE name = %(consumer)s

-- name: pin
-- Once: whoever comes second gets the first one's answer.
UPDATE events.consumer SET origin = coalesce(origin, %(origin)s)
 WHERE name = %(consumer)s
RETURNING origin::text

-- name: generation
-- Before a consumer is in the books; everything that it reports later is newer.
SELECT floor(extract(epoch FROM clock_timestamp()))::bigint << 20

-- name: progress
-- The last position that a consumer needs no more, and since when it is counted: a move by hand
-- begins an epoch, and a name that was forgotten begins anew.
SELECT r.position, (floor(extract(epoch FROM c.registered_at))::bigint << 20) + c.epoch
  FROM events.consumer c
  JOIN events.reader r ON r.kind = 'consumer' AND r.name = c.name
 WHERE c.name = %(consumer)s

-- name: lock_misplaced
-- Where it starts was chosen when the stream was taken for one of ours, which has no event.
-- Whoever was moved by hand since then stands where it was put.
SELECT c.name
  FROM events.consumer c JOIN events.source f ON f.stream_name = c.stream_name
 WHERE c.name = %(consumer)s AND c.registered_at < f.created_at
   AND c.origin IS NULL AND c.replay_of IS NULL
   AND NOT EXISTS (SELECT 1 FROM events.seek s WHERE s.consumer = c.name)
   FOR UPDATE OF c

-- name: place
-- In the epoch that there is: a worker that still takes the stream for ours has nothing to settle,
-- and need not end for it.
WITH placed AS (
    UPDATE events.consumer
       SET start_position = %(start_position)s, registered_at = clock_timestamp()
     WHERE name = %(consumer)s
    RETURNING name, stream_name
)
UPDATE events.stream_lease l
   SET checkpoint = %(start_position)s - 1, updated_at = clock_timestamp()
  FROM placed
 WHERE l.stream_name = placed.stream_name
   AND split_part(l.role, '/', 1) = 'consumer:' || placed.name
