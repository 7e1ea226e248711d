-- name: send_many
-- For psycopg connections.
SELECT events.send_many(%(batch)s::jsonb)

-- name: send_many_sqlalchemy
-- The same in SQLAlchemy's notation, which every driver understands.
SELECT events.send_many(CAST(:batch AS jsonb))

-- name: unnumbered_streams
-- A loose index scan: one step per stream that has something to number, known or not.
WITH RECURSIVE waiting(stream_name) AS (
    (SELECT stream_name FROM events.outbox_event WHERE position IS NULL
      ORDER BY stream_name LIMIT 1)
    UNION ALL
    SELECT (SELECT o.stream_name FROM events.outbox_event o
             WHERE o.position IS NULL AND o.stream_name > w.stream_name
             ORDER BY o.stream_name LIMIT 1)
      FROM waiting w WHERE w.stream_name IS NOT NULL
)
SELECT stream_name FROM waiting WHERE stream_name IS NOT NULL

-- name: has_unnumbered
-- Looks for work without a lock: a FOR UPDATE on every empty poll would be a commit each. LIMIT in
-- a LATERAL keeps the planner from joining the streams with the whole outbox, and the comparison
-- of pairs keeps it on the index of unnumbered rows, whatever the statistics say.
SELECT s.name
  FROM events.stream s
 CROSS JOIN LATERAL (
       SELECT 1 FROM events.outbox_event o
        WHERE (o.stream_name, o.id) > (s.name, s.id_floor) AND o.stream_name <= s.name
          AND o.position IS NULL
        ORDER BY o.stream_name, o.id
        LIMIT 1) AS waiting
 WHERE s.name = ANY(%(stream_names)s)

-- name: number
-- See events.number_events: the lock and the numbering are statements of their own there.
SELECT event_position, body
  FROM events.number_events(%(stream_name)s, %(owner_id)s, %(term)s, %(batch_size)s, %(sweep)s)

-- name: announce
-- Where there is no hot log, consumers sleep on this channel. Once per batch, payload empty.
SELECT pg_notify('events_numbered', '')

-- name: read
-- The warm tier. See events.read_entries: the plan must not depend on statistics.
SELECT entry_position, body
  FROM events.read_entries(%(stream_name)s, %(after)s, %(count)s::integer)

-- name: first_position
-- Where the warm tier begins.
SELECT min(position) FROM events.outbox_event
 WHERE stream_name = %(stream_name)s AND position IS NOT NULL

-- name: position_at_time
-- The first event sent at or after a moment; NULL where there is none yet.
SELECT min(position) FROM events.outbox_event
 WHERE stream_name = %(stream_name)s AND position IS NOT NULL AND created_at >= %(moment)s
