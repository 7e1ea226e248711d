-- What stays known of a consumer or a replay while its rows are being deleted.

ALTER TABLE events.consumer ADD COLUMN given_up_to bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN events.consumer.given_up_to IS
    'Somebody has begun to forget it: settled rows up to here may be gone, however young.';

ALTER TABLE events.operation ADD COLUMN outcomes jsonb;
COMMENT ON COLUMN events.operation.outcomes IS 'What became of the events of a replay: how many of each.';
