-- name: unpublished
-- Streams whose hot log is behind, and the age of the first event that it lacks: one step in the
-- index of positions for each of them, over any hole.
SELECT s.name,
       coalesce(floor(extract(epoch FROM clock_timestamp() - next.created_at) * 1000), 0)::bigint
  FROM events.stream s
  LEFT JOIN LATERAL (
       SELECT o.created_at FROM events.outbox_event o
        WHERE o.stream_name = s.name AND o.position > s.published
        ORDER BY o.position LIMIT 1
       ) AS next ON true
 WHERE s.head > s.published

-- name: archives
-- Streams that are archived: how many positions are not yet, and the age of the first of those.
SELECT l.stream_name, greatest(s.head - l.checkpoint, 0),
       coalesce(floor(extract(epoch FROM clock_timestamp() - next.created_at) * 1000), 0)::bigint
  FROM events.stream_lease l
  JOIN events.stream s ON s.name = l.stream_name
  LEFT JOIN LATERAL (
       SELECT o.created_at FROM events.outbox_event o
        WHERE o.stream_name = s.name AND o.position > l.checkpoint
        ORDER BY o.position LIMIT 1
       ) AS next ON true
 WHERE l.role = 'archiver'
