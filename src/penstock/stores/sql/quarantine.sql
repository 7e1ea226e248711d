-- name: quarantine
-- The first to notice keeps the history; a second supervisor of the same consumer adds nothing.
INSERT INTO events.quarantine (name, stream_name, reason, crashes, host)
SELECT %(name)s, (SELECT stream_name FROM events.consumer WHERE name = %(name)s),
       %(reason)s, %(crashes)s::jsonb, %(host)s
ON CONFLICT (name) DO NOTHING

-- name: read_names
-- What supervisors ask every two seconds.
SELECT name FROM events.quarantine

-- name: read_all
-- For people: the longest set aside first.
SELECT name, stream_name, reason, crashes, host, quarantined_at
  FROM events.quarantine
 ORDER BY quarantined_at, name

-- name: release
-- Without the row no supervisor holds the consumer back; NULL releases all.
DELETE FROM events.quarantine
 WHERE name = %(name)s OR %(name)s IS NULL
RETURNING name
