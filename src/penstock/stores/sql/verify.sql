-- What `penstock verify` reads. Nothing here waits for anybody, and each statement reads a bounded
-- stretch along an index.

-- name: begin
-- One moment for all questions about a stretch, and no lock on anybody's work.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: prepare
-- Statistics of these tables are always stale, and the right plan is always the index, row by row.
-- Whoever looks must not become the load.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
       set_config('jit', 'off', true), set_config('statement_timeout', %(timeout)s, true)

-- name: streams
-- Also those that nobody has published yet, and somebody wants to read.
SELECT name FROM events.stream UNION SELECT stream_name FROM events.consumer ORDER BY 1

-- name: stream
-- Where a stream ends, how far the hot log is confirmed, what the outbox still holds of it, and the
-- range that is archived.
SELECT s.head, s.published,
       coalesce((SELECT o.position FROM events.outbox_event o
                  WHERE o.stream_name = s.name AND o.position IS NOT NULL
                  ORDER BY o.position LIMIT 1), s.head + 1),
       (SELECT a.first FROM events.archive_object a
         WHERE a.stream_name = s.name AND a.archived_at IS NOT NULL ORDER BY a.first LIMIT 1),
       (SELECT a.last FROM events.archive_object a
         WHERE a.stream_name = s.name AND a.archived_at IS NOT NULL ORDER BY a.last DESC LIMIT 1)
  FROM events.stream s WHERE s.name = %(stream_name)s

-- name: source
-- Another database numbers it: how far it is known to go, by whoever looked last or came furthest.
SELECT greatest(f.head,
                (SELECT max(l.checkpoint) FROM events.stream_lease l
                  WHERE l.stream_name = f.stream_name),
                (SELECT max(c.settled_to) FROM events.consumer c
                  WHERE c.stream_name = f.stream_name))
  FROM events.source f WHERE f.stream_name = %(stream_name)s

-- name: holes
-- All of them: there is one for each failover that lost something.
SELECT h.first, h.last FROM events.hole h WHERE h.stream_name = %(stream_name)s ORDER BY h.first

-- name: beyond
-- Rows that stand where no position was given out.
SELECT o.position FROM events.outbox_event o
 WHERE o.stream_name = %(stream_name)s AND o.position > %(head)s
 ORDER BY o.position LIMIT %(count)s

-- name: consumers
-- How they are split, how far their lanes are, and where operators moved them. A lane without a row
-- has settled nothing yet.
SELECT c.name, c.start_position, c.end_position, c.settled_to, c.given_up_to,
       ARRAY(SELECT coalesce(l.checkpoint, c.start_position - 1)
               FROM generate_series(0, c.lanes - 1) AS n
               LEFT JOIN events.stream_lease l
                 ON l.stream_name = c.stream_name
                AND l.role = events.lane_role(c.name, c.epoch, n, c.lanes)
              ORDER BY n),
       ARRAY(SELECT k.old_checkpoint FROM events.seek k WHERE k.consumer = c.name ORDER BY k.id),
       ARRAY(SELECT k.new_checkpoint FROM events.seek k WHERE k.consumer = c.name ORDER BY k.id)
  FROM events.consumer c
 WHERE c.stream_name = %(stream_name)s AND (%(consumer)s::text IS NULL OR c.name = %(consumer)s)
 ORDER BY c.name

-- name: sent
-- The next events. What settled them was written after they were published, so no row of a younger
-- one can have been pruned; clock_timestamp(), because the janitor may have looked at its clock
-- after this transaction began.
SELECT o.event_uuid::text, o.key, o.id, o.position,
       coalesce(o.published_at < clock_timestamp() - make_interval(secs => %(retention_seconds)s),
                false)
  FROM events.outbox_event o
 WHERE o.stream_name = %(stream_name)s AND o.position BETWEEN %(first)s AND %(last)s
 ORDER BY o.position LIMIT %(count)s

-- name: set_aside
-- Where the outbox is pruned, parked events and dead letters still have the entry.
SELECT DISTINCT ON (aside.position, aside.event_uuid)
       aside.event_uuid::text, aside.position, split_part(aside.entry, E'\n', 10)
  FROM unnest(%(consumers)s::text[]) AS c(name)
 CROSS JOIN LATERAL (
       (SELECT p.event_uuid, p.position, p.entry FROM events.parked_event p
         WHERE p.consumer = c.name AND p.position BETWEEN %(first)s AND %(last)s
         ORDER BY p.position LIMIT %(count)s)
       UNION ALL
       (SELECT d.event_uuid, d.position, d.entry FROM events.dead_letter d
         WHERE d.consumer = c.name AND d.position BETWEEN %(first)s AND %(last)s
         ORDER BY d.position LIMIT %(count)s)) AS aside
 ORDER BY aside.position, aside.event_uuid
 LIMIT %(count)s

-- name: settled
-- By event: there is no index of positions, since nobody else needs one.
SELECT e.event_uuid::text, e.position, e.outcome FROM events.processed_event e
 WHERE e.consumer = %(consumer)s AND e.event_uuid = ANY(%(event_uuids)s::uuid[])

-- name: parked
-- One that waits behind another of its key will have its turn, so it counts as having a time.
SELECT p.event_uuid::text, p.position, p.key_hash,
       p.next_attempt_at IS NOT NULL OR EXISTS (
           SELECT 1 FROM events.parked_event q
            WHERE q.consumer = p.consumer AND q.key_hash = p.key_hash AND q.position < p.position),
       p.held, p.operation_id IS NOT NULL
  FROM events.parked_event p
 WHERE p.consumer = %(consumer)s AND p.position BETWEEN %(first)s AND %(last)s
 ORDER BY p.position

-- name: letters
-- The dead letters of a stretch.
SELECT d.event_uuid::text FROM events.dead_letter d
 WHERE d.consumer = %(consumer)s AND d.position BETWEEN %(first)s AND %(last)s

-- name: last_settled
-- Whatever is settled later is not part of what is looked at.
SELECT e.event_uuid::text FROM events.processed_event e
 WHERE e.consumer = %(consumer)s
 ORDER BY e.event_uuid DESC LIMIT 1

-- name: page_end
-- Settled rows are gone through by event. No row: this is the last page.
SELECT e.event_uuid::text FROM events.processed_event e
 WHERE e.consumer = %(consumer)s
   AND e.event_uuid > %(after)s::uuid AND e.event_uuid <= %(until)s::uuid
 ORDER BY e.event_uuid OFFSET %(count)s - 1 LIMIT 1

-- name: loose
-- Settled rows without an event of that name at that position.
SELECT e.event_uuid::text, e.position, e.outcome, sent.event_uuid IS NOT NULL,
       EXISTS (SELECT 1 FROM events.parked_event p
                WHERE p.consumer = e.consumer AND p.position = e.position
                  AND p.event_uuid = e.event_uuid),
       EXISTS (SELECT 1 FROM events.dead_letter d
                WHERE d.consumer = e.consumer AND d.event_uuid = e.event_uuid)
  FROM events.processed_event e
  LEFT JOIN LATERAL (
       SELECT o.event_uuid, o.position FROM events.outbox_event o
        WHERE o.event_uuid = e.event_uuid AND o.stream_name = %(stream_name)s
          AND o.position IS NOT NULL
       OFFSET 0) AS sent ON true
 WHERE e.consumer = %(consumer)s
   AND e.event_uuid > %(after)s::uuid AND e.event_uuid <= %(until)s::uuid
   AND sent.position IS DISTINCT FROM e.position
