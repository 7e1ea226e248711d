-- name: begin
-- One moment for all questions, and no lock on anybody's work.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: use_indexes
-- Statistics of an outbox are always stale, and a wrong guess would read the whole log.
SET LOCAL enable_seqscan = off

-- name: limit_time
-- Whoever looks must not become the load.
SET LOCAL statement_timeout = '10s'

-- name: streams
-- Streams are known from their row or, before a publisher has met them, from what waits. Those of
-- other services are as far as a worker last saw them.
-- Nothing here may walk over the entries that published events leave in the index of unnumbered
-- ones: streams nobody has met are looked for between the known names only, and counting begins at
-- the id floor and stops at a limit. No name sorts behind 201 times z.
WITH RECURSIVE met(name) AS (
    SELECT name FROM events.stream
    UNION
    SELECT stream_name FROM events.source
), gap(after, before) AS (
    SELECT name, coalesce(lead(name) OVER (ORDER BY name), repeat('z', 201))
      FROM (SELECT '' AS name UNION ALL SELECT name FROM met) AS bound
), waiting(stream_name, before) AS (
    SELECT (SELECT o.stream_name FROM events.outbox_event o
             WHERE o.position IS NULL AND o.stream_name > gap.after AND o.stream_name < gap.before
             ORDER BY o.stream_name LIMIT 1), gap.before
      FROM gap
    UNION ALL
    SELECT (SELECT o.stream_name FROM events.outbox_event o
             WHERE o.position IS NULL
               AND o.stream_name > w.stream_name AND o.stream_name < w.before
             ORDER BY o.stream_name LIMIT 1), w.before
      FROM waiting w WHERE w.stream_name IS NOT NULL
), known(name) AS (
    SELECT name FROM met
    UNION
    SELECT stream_name FROM waiting WHERE stream_name IS NOT NULL
)
SELECT known.name, f.stream_name IS NOT NULL,
       coalesce(s.origin::text, (SELECT min(c.origin::text) FROM events.consumer c
                                  WHERE c.stream_name = f.stream_name)),
       coalesce(s.head, f.head, 0), coalesce(s.published, f.head, 0), unnumbered.count,
       coalesce(floor(extract(epoch FROM clock_timestamp() - unnumbered.oldest) * 1000), 0)::bigint
  FROM known
  LEFT JOIN events.stream s ON s.name = known.name
  LEFT JOIN events.source f ON f.stream_name = known.name
 CROSS JOIN LATERAL (
       SELECT count(*) AS count, min(capped.created_at) AS oldest
         FROM (SELECT o.created_at FROM events.outbox_event o
                WHERE (o.stream_name, o.id) > (known.name, coalesce(s.id_floor, 0))
                  AND o.stream_name <= known.name AND o.position IS NULL
                LIMIT %(count_max)s + 1) AS capped
       ) AS unnumbered
 ORDER BY known.name

-- name: consumers
-- The slowest lane of the current epoch speaks for the consumer; before its first lease it stands
-- just before its start. The next event is one step in the index of positions, over any hole.
SELECT c.name, c.stream_name, c.start_position, place.checkpoint,
       floor(extract(epoch FROM clock_timestamp() - next.created_at) * 1000)::bigint,
       c.lanes, place.lanes_held, workers.alive,
       c.paused_at, c.paused_by, c.pause_reason, q.quarantined_at, q.reason,
       parked.keys, parked.held, (SELECT count(*) FROM events.parked_event p
                                   WHERE p.consumer = c.name),
       (SELECT count(*) FROM events.dead_letter d WHERE d.consumer = c.name),
       c.replay_of, c.end_position
  FROM events.consumer c
 CROSS JOIN LATERAL (
       SELECT coalesce(min(l.checkpoint), c.start_position - 1) AS checkpoint,
              count(*) FILTER (WHERE l.owner_id IS NOT NULL AND l.lease_until > clock_timestamp())
              AS lanes_held
         FROM events.stream_lease l
        WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
          AND split_part(l.role, '/', 1) = 'consumer:' || c.name
       ) AS place
 CROSS JOIN LATERAL (
       SELECT count(*) AS alive FROM events.worker w
        WHERE w.consumer = c.name AND w.alive_until > clock_timestamp()
       ) AS workers
-- The rows that are due or held: one for each key, or hardly more.
 CROSS JOIN LATERAL (
       SELECT count(DISTINCT p.key_hash) AS keys,
              count(DISTINCT p.key_hash) FILTER (WHERE p.held) AS held
         FROM events.parked_event p
        WHERE p.consumer = c.name AND (p.next_attempt_at IS NOT NULL OR p.held)
       ) AS parked
  LEFT JOIN events.quarantine q ON q.name = c.name
  LEFT JOIN LATERAL (
       SELECT o.created_at FROM events.outbox_event o
        WHERE o.stream_name = c.stream_name AND o.position > place.checkpoint
        ORDER BY o.position LIMIT 1
       ) AS next ON true
 ORDER BY c.name

-- name: leases
-- A lease that was given back has no end; one that has run out ended before now.
SELECT stream_name, role, owner_id, term,
       CASE WHEN isfinite(lease_until)
            THEN extract(epoch FROM lease_until - clock_timestamp())::float8 END,
       checkpoint
  FROM events.stream_lease
 ORDER BY stream_name, role
