-- name: first_retained
-- The first event that is still there or, where none is, the next one. One statement, one moment:
-- what is numbered between two questions would belong to neither answer.
SELECT coalesce((SELECT min(o.position) FROM events.outbox_event o
                  WHERE o.stream_name = s.name AND o.position IS NOT NULL), s.head + 1),
       s.head
  FROM events.stream s WHERE s.name = %(stream_name)s
