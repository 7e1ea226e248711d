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
