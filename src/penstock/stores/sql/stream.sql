-- name: register
-- Streams appear by being named, by a consumer or by a sender. Looks first: ON CONFLICT alone waits
-- for whoever is updating the row, and a publisher that hangs there would hold up everybody. What
-- another service numbers is not numbered here.
INSERT INTO events.stream (name, origin)
SELECT %(stream_name)s, id FROM events.origin
 WHERE NOT EXISTS (SELECT 1 FROM events.stream WHERE name = %(stream_name)s)
   AND NOT EXISTS (SELECT 1 FROM events.source WHERE stream_name = %(stream_name)s)
ON CONFLICT DO NOTHING

-- name: read
-- Head minus checkpoint is the lag: a subtraction, never a scan.
SELECT name, origin::text, head, published
  FROM events.stream WHERE name = %(stream_name)s

-- name: names
-- Every stream of this database.
SELECT name FROM events.stream ORDER BY name

-- name: unleased
-- One question for all streams: those that no publisher holds just now, or that this process does
-- according to the books; it may have forgotten one whose acquisition broke off.
SELECT s.name
  FROM events.stream s
  LEFT JOIN events.stream_lease l ON l.stream_name = s.name AND l.role = 'publisher'
 WHERE l.lease_until IS NULL OR l.lease_until < clock_timestamp() OR l.worker_id = %(worker_id)s
 ORDER BY s.name

-- name: confirm
-- Never moves back: a late publisher can do no harm. RETURNING makes this one commit asynchronous:
-- if it is lost, the next publisher asks the hot log itself.
UPDATE events.stream
   SET published = greatest(published, %(position)s)
 WHERE name = %(stream_name)s
RETURNING set_config('synchronous_commit', 'off', true)

-- name: incarnation
-- See events.incarnation.
SELECT events.incarnation()

-- name: is_in_hole
-- Whether a position was passed over, other than the last of a hole, which stands for all of it.
SELECT EXISTS (SELECT 1 FROM events.hole h
                WHERE h.stream_name = %(stream_name)s
                  AND h.first <= %(position)s AND h.last > %(position)s)

-- name: step_over
-- See events.step_over: it is the publisher's alone.
SELECT hole_first, hole_last
  FROM events.step_over(%(stream_name)s, %(owner_id)s, %(term)s, %(reached)s, %(margin)s,
                        %(reason)s)

-- name: refill_base
-- Where an empty hot log starts: at the slowest consumer, at the latest behind what was confirmed,
-- within the window that the log keeps and that the outbox still holds.
SELECT greatest(
           0,
           s.head - %(length_max)s,
           coalesce((SELECT min(o.position) - 1 FROM events.outbox_event o
                      WHERE o.stream_name = s.name AND o.position IS NOT NULL), s.head),
           least(s.published,
                 (SELECT min(l.checkpoint) FROM events.stream_lease l
                   WHERE l.stream_name = s.name AND l.role LIKE 'consumer:%%'),
                 (SELECT min(r.checkpoint) FROM events.remote_consumer r
                   WHERE r.stream_name = s.name)))
  FROM events.stream s WHERE s.name = %(stream_name)s
