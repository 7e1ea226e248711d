-- Dead letters as people look at them. The same criteria stand in `list`, `groups` and `page`; one
-- that is NULL is not asked for.

-- name: list
-- The newest ones that match, and how many match. The wide columns are read last, for those alone.
WITH matching AS MATERIALIZED (
    SELECT d.id, d.buried_at,
           CASE WHEN p.position IS NULL THEN 'dead' WHEN p.held THEN 'held' ELSE 'redriving' END
           AS state
      FROM events.dead_letter d
      LEFT JOIN events.parked_event p ON p.consumer = d.consumer AND p.position = d.position
     WHERE (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s::bigint[]))
       AND (%(consumer)s::text IS NULL OR d.consumer = %(consumer)s)
       AND (%(stream_name)s::text IS NULL OR d.stream_name = %(stream_name)s)
       AND (%(event_type)s::text IS NULL OR d.event_type = %(event_type)s)
       AND (%(error)s::text IS NULL OR strpos(lower(d.error_type), lower(%(error)s)) > 0)
       AND (%(fingerprint)s::text IS NULL OR d.fingerprint = %(fingerprint)s)
       AND (%(reason)s::text IS NULL OR d.reason = %(reason)s)
       AND (%(key_hash)s::bigint IS NULL OR d.key_hash = %(key_hash)s)
       AND (%(since)s::timestamptz IS NULL OR d.buried_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR d.buried_at < %(until)s)
       AND (%(first)s::bigint IS NULL OR d.position >= %(first)s)
       AND (%(last)s::bigint IS NULL OR d.position <= %(last)s)
), newest AS (
    SELECT id, state, count(*) OVER () AS total
      FROM matching
     WHERE %(states)s::text[] IS NULL OR state = ANY(%(states)s::text[])
     ORDER BY buried_at DESC, id DESC
     LIMIT %(limit)s
)
SELECT newest.total, d.id, d.consumer, d.stream_name, d.position, d.event_uuid, d.event_type,
       d.version, split_part(d.entry, E'\n', 10), d.reason, d.error_type, d.error_message,
       d.fingerprint, jsonb_array_length(d.attempts), d.buried_at, d.redrives, newest.state
  FROM newest JOIN events.dead_letter d USING (id)
 ORDER BY d.buried_at, d.id

-- name: groups
-- Letters that died of the same: how many, since when, and one as an example.
WITH matching AS MATERIALIZED (
    SELECT d.id, d.consumer, d.error_type, d.fingerprint, d.buried_at,
           CASE WHEN p.position IS NULL THEN 'dead' WHEN p.held THEN 'held' ELSE 'redriving' END
           AS state
      FROM events.dead_letter d
      LEFT JOIN events.parked_event p ON p.consumer = d.consumer AND p.position = d.position
     WHERE (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s::bigint[]))
       AND (%(consumer)s::text IS NULL OR d.consumer = %(consumer)s)
       AND (%(stream_name)s::text IS NULL OR d.stream_name = %(stream_name)s)
       AND (%(event_type)s::text IS NULL OR d.event_type = %(event_type)s)
       AND (%(error)s::text IS NULL OR strpos(lower(d.error_type), lower(%(error)s)) > 0)
       AND (%(fingerprint)s::text IS NULL OR d.fingerprint = %(fingerprint)s)
       AND (%(reason)s::text IS NULL OR d.reason = %(reason)s)
       AND (%(key_hash)s::bigint IS NULL OR d.key_hash = %(key_hash)s)
       AND (%(since)s::timestamptz IS NULL OR d.buried_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR d.buried_at < %(until)s)
       AND (%(first)s::bigint IS NULL OR d.position >= %(first)s)
       AND (%(last)s::bigint IS NULL OR d.position <= %(last)s)
), grouped AS (
    SELECT consumer, error_type, fingerprint, count(*) AS count,
           count(*) FILTER (WHERE state = 'held') AS held,
           count(*) FILTER (WHERE state = 'redriving') AS redriving,
           min(buried_at) AS first_buried_at, max(buried_at) AS last_buried_at,
           max(id) AS example, array_agg(id) AS ids
      FROM matching
     WHERE %(states)s::text[] IS NULL OR state = ANY(%(states)s::text[])
     GROUP BY consumer, error_type, fingerprint
), newest AS (
    SELECT *, count(*) OVER () AS total
      FROM grouped ORDER BY last_buried_at DESC, example DESC LIMIT %(limit)s
)
SELECT g.total, g.consumer, g.error_type, g.fingerprint, g.count, g.held, g.redriving,
       g.first_buried_at, g.last_buried_at, d.error_message,
       ARRAY(SELECT n FROM unnest(g.ids) AS n ORDER BY n DESC LIMIT %(ids_shown)s)
  FROM newest g JOIN events.dead_letter d ON d.id = g.example
 ORDER BY g.last_buried_at, g.example

-- name: page
-- The next ones in the order of positions, from those that were there at the beginning.
WITH matching AS MATERIALIZED (
    SELECT d.id, d.position,
           CASE WHEN p.position IS NULL THEN 'dead' WHEN p.held THEN 'held' ELSE 'redriving' END
           AS state
      FROM events.dead_letter d
      LEFT JOIN events.parked_event p ON p.consumer = d.consumer AND p.position = d.position
     WHERE (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s::bigint[]))
       AND (%(consumer)s::text IS NULL OR d.consumer = %(consumer)s)
       AND (%(stream_name)s::text IS NULL OR d.stream_name = %(stream_name)s)
       AND (%(event_type)s::text IS NULL OR d.event_type = %(event_type)s)
       AND (%(error)s::text IS NULL OR strpos(lower(d.error_type), lower(%(error)s)) > 0)
       AND (%(fingerprint)s::text IS NULL OR d.fingerprint = %(fingerprint)s)
       AND (%(reason)s::text IS NULL OR d.reason = %(reason)s)
       AND (%(key_hash)s::bigint IS NULL OR d.key_hash = %(key_hash)s)
       AND (%(since)s::timestamptz IS NULL OR d.buried_at >= %(since)s)
       AND (%(until)s::timestamptz IS NULL OR d.buried_at < %(until)s)
       AND (%(first)s::bigint IS NULL OR d.position >= %(first)s)
       AND (%(last)s::bigint IS NULL OR d.position <= %(last)s)
       AND d.id <= %(last_id)s
       AND (d.position, d.id) > (%(after_position)s, %(after_id)s)
)
SELECT id, position
  FROM matching
 WHERE %(states)s::text[] IS NULL OR state = ANY(%(states)s::text[])
 ORDER BY position, id
 LIMIT %(limit)s

-- name: last_id
-- Letters that are buried later are not part of what was asked for.
SELECT coalesce(max(id), 0) FROM events.dead_letter

-- name: find
-- Which letters are meant: by number, by event, by place. An event may have died in several
-- consumers.
SELECT d.id, d.consumer, d.stream_name, d.position, d.event_uuid
  FROM events.dead_letter d
 WHERE d.id = ANY(%(ids)s::bigint[])
    OR d.event_uuid = ANY(%(event_uuids)s::uuid[])
    OR (d.stream_name, d.position) IN (
       SELECT * FROM unnest(%(stream_names)s::text[], %(positions)s::bigint[]))
 ORDER BY d.consumer, d.id

-- name: read
-- Everything that is known of these, for people and for rehearsals.
SELECT d.id, d.consumer, d.stream_name, d.position, d.event_uuid, d.event_type, d.version,
       split_part(d.entry, E'\n', 10), d.reason, d.error_type, d.error_message, d.fingerprint,
       jsonb_array_length(d.attempts), d.buried_at, d.redrives,
       CASE WHEN p.position IS NULL THEN 'dead' WHEN p.held THEN 'held' ELSE 'redriving' END,
       d.traceback, d.handler, d.host, d.attempts, d.entry
  FROM events.dead_letter d
  LEFT JOIN events.parked_event p ON p.consumer = d.consumer AND p.position = d.position
 WHERE d.id = ANY(%(ids)s::bigint[])
 ORDER BY d.position, d.id

-- name: operations
-- Who did what to an event of a consumer, in this order.
SELECT o.id, o.kind, o.requested_by, o.reason, o.started_at, o.ended_at, o.ended_as
  FROM events.operation_event e
  JOIN events.operation o ON o.id = e.operation_id
 WHERE e.event_uuid = %(event_uuid)s AND e.consumer = %(consumer)s
 ORDER BY o.id

-- name: guarantees
-- What these consumers promise; one that is not in the books is served by nobody.
SELECT name, guarantee FROM events.consumer WHERE name = ANY(%(consumers)s)

-- name: read_clock
-- What "two hours ago" is counted from: one clock for all hosts.
SELECT clock_timestamp()
