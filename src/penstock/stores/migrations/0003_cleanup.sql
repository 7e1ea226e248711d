-- Cleanup: how the janitor finds old rows, and who still needs what.

-- Oldest first. Parked and dead rows stay for as long as they are, so they are not in its way.
CREATE INDEX processed_event_expiry ON events.processed_event (processed_at)
    WHERE outcome NOT IN ('parked', 'dead');

CREATE VIEW events.reader AS
    SELECT s.name AS stream_name, 'publisher' AS kind, 'publisher' AS name,
           s.published AS position
      FROM events.stream s
    UNION ALL
    -- The slowest lane of the current epoch speaks for the consumer. A lane without a row has
    -- settled nothing yet.
    SELECT c.stream_name, 'consumer', c.name,
           CASE WHEN lane.count < c.lanes THEN least(lane.checkpoint, c.start_position - 1)
                ELSE lane.checkpoint END
      FROM events.consumer c
     CROSS JOIN LATERAL (
           SELECT count(*) AS count, min(l.checkpoint) AS checkpoint
             FROM events.stream_lease l
            WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
              AND split_part(l.role, '/', 1) = 'consumer:' || c.name
           ) AS lane
    UNION ALL
    SELECT r.stream_name, 'remote consumer', r.name, r.checkpoint
      FROM events.remote_consumer r
    UNION ALL
    SELECT a.stream_name, 'archiver', 'archiver', a.checkpoint
      FROM events.stream_lease a WHERE a.role = 'archiver';
COMMENT ON VIEW events.reader IS
    'Who reads which stream, and the last position that each of them needs no more. '
    'The lowest one holds the outbox; nothing above it is ever pruned.';
