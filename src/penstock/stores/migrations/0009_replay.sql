-- Replays: temporary consumers with an end, which have the handler of another one.

ALTER TABLE events.consumer
    ADD COLUMN replay_of    text,
    ADD COLUMN end_position bigint,
    ADD COLUMN operation_id bigint,
    ADD CONSTRAINT consumer_replay CHECK (
        (replay_of IS NULL) = (end_position IS NULL)
        AND (replay_of IS NULL) = (operation_id IS NULL)
        AND (end_position IS NULL OR end_position >= start_position));
COMMENT ON COLUMN events.consumer.replay_of IS
    'The consumer whose handler a replay calls. NULL: no replay.';
COMMENT ON COLUMN events.consumer.end_position IS
    'The last position that a replay has to settle. NULL: it goes on for ever.';
COMMENT ON COLUMN events.consumer.operation_id IS
    'The record of a replay, which stays when its rows are gone.';
CREATE INDEX consumer_replay_of ON events.consumer (replay_of) WHERE replay_of IS NOT NULL;

ALTER TABLE events.operation
    DROP CONSTRAINT operation_kind_check,
    DROP CONSTRAINT operation_ended_as_check,
    ADD CONSTRAINT operation_kind_check
        CHECK (kind IN ('redrive', 'discard', 'release', 'replay')),
    ADD CONSTRAINT operation_ended_as_check
        CHECK (ended_as IN ('done', 'stopped', 'interrupted', 'cancelled'));
COMMENT ON TABLE events.operation IS
    'What operators did to dead letters and parked events, and what they delivered again: who, '
    'when, why, to how many.';

-- As before; a replay whose lanes are all at its end needs nothing more, although its dead letters
-- may keep it in the books for long.
CREATE OR REPLACE VIEW events.reader AS
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
     WHERE c.end_position IS NULL OR lane.count < c.lanes OR lane.checkpoint < c.end_position
    UNION ALL
    SELECT r.stream_name, 'remote consumer', r.name, r.checkpoint
      FROM events.remote_consumer r
    UNION ALL
    SELECT a.stream_name, 'archiver', 'archiver', a.checkpoint
      FROM events.stream_lease a WHERE a.role = 'archiver';
