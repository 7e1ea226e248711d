-- name: unfinished
-- What workers could do now, in words; nothing, where only time brings more. One statement, one
-- moment: whatever an event gives rise to is visible with its being settled.
SELECT 'events without a position: ' || count(*)
  FROM events.outbox_event WHERE position IS NULL
HAVING count(*) > 0
 UNION ALL
SELECT wanted.name || CASE
           WHEN c.name IS NULL THEN ' has not begun'
           WHEN c.paused_at IS NOT NULL THEN ' is paused'
           ELSE ' has ' || coalesce(s.head, 0) - place.checkpoint || ' events before it'
       END
  FROM unnest(%(consumers)s::text[]) AS wanted(name)
  LEFT JOIN events.consumer c ON c.name = wanted.name
  LEFT JOIN events.stream s ON s.name = c.stream_name
 CROSS JOIN LATERAL (
       -- A lane that nobody has had yet stands before the consumer's start.
       SELECT CASE WHEN count(*) < c.lanes THEN c.start_position - 1
                   ELSE min(l.checkpoint) END AS checkpoint
         FROM events.stream_lease l
        WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
          AND split_part(l.role, '/', 1) = 'consumer:' || c.name
       ) AS place
 WHERE c.name IS NULL
    OR (place.checkpoint < coalesce(s.head, 0)
        -- Where the whole stream waits behind a retry, only time brings more.
        AND NOT (c.ordering = 'stream' AND EXISTS (
                 SELECT 1 FROM events.parked_event p WHERE p.consumer = c.name)))
 UNION ALL
SELECT consumer || ' has parked events to try: ' || count(*)
  FROM events.parked_event
 WHERE consumer = ANY (%(consumers)s) AND next_attempt_at <= clock_timestamp()
 GROUP BY consumer
 UNION ALL
SELECT 'timers that are due: ' || count(*)
  FROM events.timer WHERE due_at <= clock_timestamp() AND held_at IS NULL
HAVING count(*) > 0
