-- name: begin
-- One moment for all questions, and no lock on anybody's work.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: limit_time
-- Whoever looks must not become the load.
SET LOCAL statement_timeout = '10s'

-- name: by_uuid
-- As it lies in the outbox; of its metadata only what is told, because anybody may have written
-- there what only PostgreSQL can read.
SELECT stream_name, position, event_uuid::text, event_type, version, key, key_id IS NOT NULL,
       metadata ->> '__timer_id__', metadata ->> 'causation_id', created_at, published_at
  FROM events.outbox_event
 WHERE event_uuid = %(event_uuid)s

-- name: by_place
-- The same by its place.
SELECT stream_name, position, event_uuid::text, event_type, version, key, key_id IS NOT NULL,
       metadata ->> '__timer_id__', metadata ->> 'causation_id', created_at, published_at
  FROM events.outbox_event
 WHERE stream_name = %(stream_name)s AND position = %(position)s

-- name: place_of
-- Where an event was that the outbox has no more: from the books of its consumers, each of which
-- is asked by its key, and from its trail.
SELECT c.stream_name, p.position
  FROM events.consumer c
 CROSS JOIN LATERAL (
       SELECT e.position FROM events.processed_event e
        WHERE e.consumer = c.name AND e.event_uuid = %(event_uuid)s) AS p
 UNION
SELECT t.stream_name, t.position FROM events.trail t WHERE t.event_uuid = %(event_uuid)s
 LIMIT 1

-- name: uuid_of
-- Which event stood at a place that the outbox has no more; only of events with a trail.
SELECT t.event_uuid::text FROM events.trail t
 WHERE t.event_uuid IN (
       SELECT d.event_uuid FROM events.dead_letter d
        WHERE d.stream_name = %(stream_name)s AND d.position = %(position)s
        UNION
       SELECT q.event_uuid FROM events.parked_event q
        WHERE q.stream_name = %(stream_name)s AND q.position = %(position)s)
 LIMIT 1

-- name: stream
-- How far its stream is, and the hole that its place is in, if it is in one.
SELECT s.head, s.published, h.first, h.last, h.reason
  FROM events.stream s
  LEFT JOIN events.hole h
    ON h.stream_name = s.name AND %(position)s::bigint BETWEEN h.first AND h.last
 WHERE s.name = %(stream_name)s

-- name: consumers
-- Every consumer of its stream: how far, and what its books say of the event. A consumer of
-- several lanes may have settled it ahead of its checkpoint.
SELECT c.name, c.start_position, c.end_position, c.paused_at IS NOT NULL,
       coalesce((SELECT min(l.checkpoint) FROM events.stream_lease l
                  WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
                    AND split_part(l.role, '/', 1) = 'consumer:' || c.name),
                c.start_position - 1),
       e.outcome, e.processed_at, q.next_attempt_at, q.held, q.attempts, d.id
  FROM events.consumer c
  LEFT JOIN events.processed_event e
    ON e.consumer = c.name AND e.event_uuid = %(event_uuid)s::uuid
  LEFT JOIN events.parked_event q
    ON q.consumer = c.name AND q.position = %(position)s::bigint
  LEFT JOIN events.dead_letter d
    ON d.consumer = c.name AND d.event_uuid = %(event_uuid)s::uuid
 WHERE c.stream_name = %(stream_name)s
 ORDER BY c.name

-- name: trail
-- In the order in which it happened.
SELECT consumer, step, attempt, error, due_at, operation_id, noted_at
  FROM events.trail
 WHERE event_uuid = %(event_uuid)s
 ORDER BY id

-- name: operations
-- What operators did to it.
SELECT e.consumer, o.id, o.kind, o.requested_by, o.reason, o.started_at
  FROM events.operation_event e
  JOIN events.operation o ON o.id = e.operation_id
 WHERE e.event_uuid = %(event_uuid)s
 ORDER BY o.id

-- name: effects
-- What its handlers called outside.
SELECT c.name, f.effect, f.is_done, f.calls, f.started_at, f.done_at
  FROM events.consumer c
  JOIN events.effect f ON f.consumer = c.name AND f.event_uuid = %(event_uuid)s
 WHERE c.stream_name = %(stream_name)s
 ORDER BY f.started_at

-- name: archived
-- The object that holds its place.
SELECT a.first, a.last, a.archived_at FROM events.archive_object a
 WHERE a.stream_name = %(stream_name)s AND a.first <= %(position)s AND a.last >= %(position)s

-- name: remote
-- Consumers of other services: how far they said they were.
SELECT name, checkpoint, seen_at FROM events.remote_consumer
 WHERE stream_name = %(stream_name)s
 ORDER BY name

-- name: of_key
-- The latest events of a key, among those that are not numbered yet and the last ones of each
-- stream: there is no index of keys.
SELECT k.event_uuid::text, k.stream_name, k.position, k.event_type, k.created_at
  FROM (SELECT s.name, s.head FROM events.stream s
         WHERE %(stream_name)s::text IS NULL OR s.name = %(stream_name)s) AS s
 CROSS JOIN LATERAL (
       SELECT o.event_uuid, o.stream_name, o.position, o.event_type, o.created_at
         FROM events.outbox_event o
        WHERE o.stream_name = s.name AND o.key = %(key)s
          AND (o.position IS NULL OR o.position > s.head - %(window)s)) AS k
 ORDER BY k.created_at DESC
 LIMIT %(limit)s
