-- name: register
-- Streams appear by being named, by a consumer or by a sender.
INSERT INTO events.stream (name, origin)
SELECT %(stream_name)s, id FROM events.origin
ON CONFLICT DO NOTHING

-- name: read
-- Head minus checkpoint is the lag: a subtraction, never a scan.
SELECT name, origin::text, head, published
  FROM events.stream WHERE name = %(stream_name)s

-- name: names
-- Every stream of this database.
SELECT name FROM events.stream ORDER BY name

-- name: confirm
-- Never moves back: a late publisher can do no harm.
UPDATE events.stream
   SET published = greatest(published, %(position)s)
 WHERE name = %(stream_name)s

-- name: refill_base
-- Where a lost hot log starts again: at the slowest consumer, within the window it keeps.
SELECT greatest(
           0,
           s.head - %(length_max)s,
           least(s.head, coalesce(
               (SELECT min(checkpoint) FROM events.stream_lease l
                 WHERE l.stream_name = s.name AND l.role LIKE 'consumer:%%'), s.head)))
  FROM events.stream s WHERE s.name = %(stream_name)s
