-- name: ensure
-- See events.ensure_archiver: from then on nothing is pruned ahead of the archiver.
SELECT events.ensure_archiver(%(stream_name)s)

-- name: ensure_all
-- Before a round of pruning: streams that the archiver has not met yet are held for it.
SELECT count(*) FILTER (WHERE events.ensure_archiver(s.name)) FROM events.stream s
 WHERE NOT EXISTS (SELECT 1 FROM events.stream_lease l
                    WHERE l.stream_name = s.name AND l.role = 'archiver')

-- name: unleased
-- Streams with something to archive, or with a last archiver that died and may not have listed what
-- it archived, that no archiver holds just now, or that this process does according to the books;
-- it may have forgotten one whose acquisition broke off.
SELECT s.name
  FROM events.stream s
  LEFT JOIN events.stream_lease l ON l.stream_name = s.name AND l.role = 'archiver'
 WHERE (l.lease_until IS NULL OR l.lease_until < clock_timestamp() OR l.worker_id = %(worker_id)s)
   AND (s.head > coalesce(l.checkpoint, 0) OR NOT l.clean)
 ORDER BY s.name

-- name: waiting
-- What is not archived yet: how far it reaches, how old its first event is, and how large what came
-- since the last look is, as it is stored. A hole at the front counts as old: nothing comes before.
-- OFFSET 0 and the order keep the planner on the index of positions.
SELECT s.head,
       coalesce((SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8
                   FROM events.outbox_event o
                  WHERE o.stream_name = s.name AND o.position > %(checkpoint)s
                  ORDER BY o.position LIMIT 1), 'infinity'),
       (SELECT coalesce(sum(size), 0)
          FROM (SELECT pg_column_size(o.payload) + pg_column_size(o.metadata) AS size
                  FROM events.outbox_event o
                 WHERE o.stream_name = s.name AND o.position > %(measured)s
                   AND o.position <= s.head
                 ORDER BY o.position LIMIT %(count)s) AS latest)::bigint
  FROM events.stream s WHERE s.name = %(stream_name)s

-- name: planned
-- What a predecessor may have written without being able to say so.
SELECT first, last, events, raw_bytes, content_sha256, newest_us
  FROM events.archive_object WHERE stream_name = %(stream_name)s AND archived_at IS NULL

-- name: plan
-- See events.plan_object.
SELECT events.plan_object(%(stream_name)s, %(owner_id)s, %(term)s, %(checkpoint)s, %(last)s,
                          %(events)s, %(raw_bytes)s, %(content_sha256)s, %(newest_us)s)

-- name: archive
-- See events.archive_object.
SELECT events.archive_object(%(stream_name)s, %(owner_id)s, %(term)s, %(checkpoint)s,
                             %(stored_bytes)s, %(sha256)s)

-- name: archived_streams
-- Those of which the store holds at least one object.
SELECT s.name FROM events.stream s
 WHERE EXISTS (SELECT 1 FROM events.archive_object a
                WHERE a.stream_name = s.name AND a.archived_at IS NOT NULL)
 ORDER BY s.name

-- name: objects
-- All that is archived of a stream, in order.
SELECT first, last, events, raw_bytes, content_sha256, newest_us, stored_bytes, sha256
  FROM events.archive_object
 WHERE stream_name = %(stream_name)s AND archived_at IS NOT NULL
 ORDER BY first

-- name: bounds
-- The first and the last archived position.
SELECT min(first), max(last) FROM events.archive_object
 WHERE stream_name = %(stream_name)s AND archived_at IS NOT NULL

-- name: behind
-- The object that a reader behind a position needs next.
SELECT first, last, events, raw_bytes, content_sha256, newest_us, stored_bytes, sha256
  FROM events.archive_object
 WHERE stream_name = %(stream_name)s AND archived_at IS NOT NULL AND last > %(after)s
 ORDER BY last LIMIT 1

-- name: since
-- The first object that holds an event sent at or after a moment.
SELECT first, last, events, raw_bytes, content_sha256, newest_us, stored_bytes, sha256
  FROM events.archive_object
 WHERE stream_name = %(stream_name)s AND archived_at IS NOT NULL AND newest_us >= %(moment_us)s
 ORDER BY first LIMIT 1

-- name: streams
-- Every stream of which anything is, or is about to be, archived, and how far the archiver is, or
-- was when it was forgotten.
SELECT s.name, coalesce(l.checkpoint, archived.last), s.head
  FROM events.stream s
  LEFT JOIN events.stream_lease l ON l.stream_name = s.name AND l.role = 'archiver'
 CROSS JOIN LATERAL (
       SELECT max(a.last) AS last FROM events.archive_object a
        WHERE a.stream_name = s.name AND a.archived_at IS NOT NULL) AS archived
 WHERE l.checkpoint IS NOT NULL OR archived.last IS NOT NULL
 ORDER BY s.name

-- name: forget
-- Only while nobody archives: pruning waits for this reader no longer. A plan goes along; should its
-- object be stored, whoever archives again finds it there and moves it aside.
WITH forgotten AS (
    DELETE FROM events.stream_lease
     WHERE stream_name = %(stream_name)s AND role = 'archiver' AND lease_until < clock_timestamp()
    RETURNING stream_name, checkpoint
), plan AS (
    DELETE FROM events.archive_object a USING forgotten
     WHERE a.stream_name = forgotten.stream_name AND a.archived_at IS NULL
)
SELECT checkpoint FROM forgotten
