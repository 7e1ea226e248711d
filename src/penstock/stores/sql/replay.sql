-- name: today
-- The database's clock is the clock, also for names.
SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD')

-- name: names
-- Every name that a replay of a consumer has or had, for as long as there is a record of it.
SELECT name FROM events.consumer WHERE replay_of = %(original)s
UNION
SELECT criteria ->> 'replay' FROM events.operation
 WHERE kind = 'replay' AND consumer = %(original)s

-- name: begin
-- The record and the temporary consumer, together: whatever happens next, it can be resumed.
WITH record AS (
    INSERT INTO events.operation (kind, consumer, criteria, requested_by, reason)
    VALUES ('replay', %(original)s, %(criteria)s::jsonb, %(by)s, %(reason)s)
    RETURNING id
)
INSERT INTO events.consumer (name, stream_name, origin, guarantee, ordering, lanes, start_position,
                             replay_of, end_position, operation_id)
SELECT %(name)s, c.stream_name, c.origin, c.guarantee, c.ordering, c.lanes, %(first)s,
       c.name, %(last)s, record.id
  FROM events.consumer c, record
 WHERE c.name = %(original)s
RETURNING operation_id

-- name: end
-- A record that says what became of everything stays as it is: the rows that it was counted from
-- are being deleted. One with dead letters is written again when those were redriven or given up.
UPDATE events.operation
   SET ended_at = clock_timestamp(), ended_as = %(ended_as)s, events = %(events)s,
       failed = %(failed)s, outcomes = %(outcomes)s::jsonb
 WHERE id = %(operation_id)s AND (ended_at IS NULL OR ended_as = 'done' AND failed > 0)

-- name: outcomes
-- As they were when it ended.
SELECT outcomes FROM events.operation WHERE id = %(operation_id)s

-- name: progress
-- All replays, or one. A lane without a row has passed nothing yet. A redrive that was killed has
-- no end, and one that is at work says how it stands every second; which letters it will come to
-- is known to itself alone, unless it is about one consumer.
SELECT c.name, c.replay_of, c.stream_name, c.start_position, c.end_position, c.operation_id,
       o.requested_by, o.started_at, c.paused_at IS NOT NULL, workers.alive,
       CASE WHEN lane.count < c.lanes THEN c.start_position - 1 ELSE lane.checkpoint END,
       lane.passed / c.lanes, parked.count, parked.due,
       (SELECT count(*) FROM events.dead_letter d WHERE d.consumer = c.name),
       c.pause_reason, coalesce(o.ended_as = 'cancelled', false), redrive.is_alive
  FROM events.consumer c
  JOIN events.operation o ON o.id = c.operation_id
 CROSS JOIN LATERAL (
       SELECT count(*) AS count, min(l.checkpoint) AS checkpoint,
              coalesce(sum(l.checkpoint - c.start_position + 1), 0)::bigint AS passed
         FROM events.stream_lease l
        WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
          AND split_part(l.role, '/', 1) = 'consumer:' || c.name
       ) AS lane
 CROSS JOIN LATERAL (
       SELECT count(*) AS alive FROM events.worker w
        WHERE w.consumer = c.name AND w.alive_until > clock_timestamp()
       ) AS workers
 CROSS JOIN LATERAL (
       SELECT count(*) AS count, count(p.next_attempt_at) AS due
         FROM events.parked_event p WHERE p.consumer = c.name
       ) AS parked
 CROSS JOIN LATERAL (
       SELECT count(*) > 0 AS is_alive FROM events.operation r
        WHERE r.kind = 'redrive' AND r.ended_at IS NULL
          AND (r.consumer = c.name OR r.consumer IS NULL)
          AND coalesce((r.outcomes ->> 'at')::timestamptz, r.started_at)
              > clock_timestamp() - make_interval(secs => %(redrive_seconds)s)
       ) AS redrive
 WHERE c.replay_of IS NOT NULL AND (%(name)s::text IS NULL OR c.name = %(name)s)
 ORDER BY o.started_at, c.name

-- name: tally
-- What became of its events.
SELECT outcome, count(*) FROM events.processed_event WHERE consumer = %(name)s GROUP BY outcome

-- name: count_in_holes
-- Positions of a range that never had an event.
SELECT coalesce(sum(least(h.last, %(last)s) - greatest(h.first, %(first)s) + 1), 0)::bigint
  FROM events.hole h
 WHERE h.stream_name = %(stream_name)s AND h.first <= %(last)s AND h.last >= %(first)s
