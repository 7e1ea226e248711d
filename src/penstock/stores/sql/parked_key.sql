-- Parked keys as people look at them: the first event of each, and how many wait behind it.

-- name: list
-- Keys are found by the rows that are due or held, which are few; how many wait is a subtraction.
WITH key AS MATERIALIZED (
    SELECT DISTINCT consumer, key_hash FROM events.parked_event
     WHERE (next_attempt_at IS NOT NULL OR held)
       AND (%(consumer)s::text IS NULL OR consumer = %(consumer)s)
)
SELECT count(*) OVER (), first.consumer, first.stream_name, first.position, first.event_uuid,
       split_part(first.entry, E'\n', 10), last.depth - first.depth, first.attempts,
       extract(epoch FROM first.next_attempt_at - clock_timestamp())::float8, first.held,
       first.last_error, first.parked_at, first.operation_id
  FROM key
 CROSS JOIN LATERAL (
       SELECT p.* FROM events.parked_event p
        WHERE p.consumer = key.consumer AND p.key_hash = key.key_hash
        ORDER BY p.position LIMIT 1) AS first
 CROSS JOIN LATERAL (
       SELECT p.depth FROM events.parked_event p
        WHERE p.consumer = key.consumer AND p.key_hash = key.key_hash
        ORDER BY p.position DESC LIMIT 1) AS last
 ORDER BY first.consumer, first.position
 LIMIT %(limit)s

-- name: read
-- One parked event, what it waits for, and what waits for it.
SELECT p.consumer, p.stream_name, p.position, p.event_uuid, split_part(p.entry, E'\n', 10),
       last.depth - p.depth, p.attempts,
       extract(epoch FROM p.next_attempt_at - clock_timestamp())::float8, p.held, p.last_error,
       p.parked_at, p.operation_id,
       CASE WHEN c.ordering IS DISTINCT FROM 'none' THEN nullif(first.position, p.position) END,
       d.id, p.history, p.entry
  FROM events.parked_event p
  LEFT JOIN events.consumer c ON c.name = p.consumer
 CROSS JOIN LATERAL (
       SELECT q.position FROM events.parked_event q
        WHERE q.consumer = p.consumer AND q.key_hash = p.key_hash
        ORDER BY q.position LIMIT 1) AS first
 CROSS JOIN LATERAL (
       SELECT q.depth FROM events.parked_event q
        WHERE q.consumer = p.consumer AND q.key_hash = p.key_hash
        ORDER BY q.position DESC LIMIT 1) AS last
  LEFT JOIN events.dead_letter d ON d.consumer = p.consumer AND d.position = p.position
 WHERE p.position = %(position)s AND (%(consumer)s::text IS NULL OR p.consumer = %(consumer)s)
 ORDER BY p.consumer

-- name: heads
-- The first event of each key, from a position on: what a release is about. Where no order is
-- kept, every event is one.
WITH key AS MATERIALIZED (
    SELECT DISTINCT key_hash FROM events.parked_event
     WHERE consumer = %(consumer)s AND (next_attempt_at IS NOT NULL OR held)
       AND (%(key_hash)s::bigint IS NULL OR key_hash = %(key_hash)s)
)
SELECT first.position, first.held, d.id
  FROM key
  JOIN events.consumer c ON c.name = %(consumer)s
 CROSS JOIN LATERAL (
       SELECT p.position, p.held FROM events.parked_event p
        WHERE p.consumer = %(consumer)s AND p.key_hash = key.key_hash
        ORDER BY p.position LIMIT CASE WHEN c.ordering = 'none' THEN NULL ELSE 1 END) AS first
  LEFT JOIN events.dead_letter d ON d.consumer = %(consumer)s AND d.position = first.position
 WHERE first.position > %(after)s
 ORDER BY first.position
 LIMIT %(limit)s
