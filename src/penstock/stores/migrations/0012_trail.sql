-- The trail: what went wrong on an event's way, kept after it is put right.

CREATE TABLE events.trail (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid   uuid        NOT NULL,
    consumer     text        NOT NULL,
    stream_name  text        NOT NULL,
    position     bigint      NOT NULL,
    step         text        NOT NULL
        CHECK (step IN ('failed', 'held', 'waited', 'redriven', 'buried')),
    attempt      integer,
    error        text,
    due_at       timestamptz,
    operation_id bigint,
    noted_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.trail IS
    'What happened to events that were not simply handled, in the transaction in which it did. '
    'Parked and buried rows go when an event is handled at last; this tells of them afterwards.';
COMMENT ON COLUMN events.trail.due_at IS 'When it was to be tried again.';
CREATE INDEX trail_event ON events.trail (event_uuid);
CREATE INDEX trail_age ON events.trail (noted_at);

-- With the owner's rights: whoever may park an event need not be able to read all trails.
CREATE FUNCTION events.note_parked() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO events.trail (event_uuid, consumer, stream_name, position, step, attempt, error,
                              due_at, operation_id)
    SELECT p.event_uuid, p.consumer, p.stream_name, p.position,
           CASE WHEN p.operation_id IS NOT NULL THEN 'redriven'
                WHEN p.attempts = 0 THEN 'waited'
                WHEN p.held THEN 'held' ELSE 'failed' END,
           nullif(p.attempts, 0),
           CASE WHEN p.operation_id IS NULL THEN p.last_error END, p.next_attempt_at,
           p.operation_id
      FROM parked p ORDER BY p.position;
    RETURN NULL;
END $$;
-- For whole statements: hundreds may come to wait behind one at once.
CREATE TRIGGER note_parked AFTER INSERT ON events.parked_event
    REFERENCING NEW TABLE AS parked FOR EACH STATEMENT EXECUTE FUNCTION events.note_parked();

CREATE FUNCTION events.note_parked_again() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO events.trail (event_uuid, consumer, stream_name, position, step, attempt, error,
                              due_at, operation_id)
    VALUES (NEW.event_uuid, NEW.consumer, NEW.stream_name, NEW.position,
            CASE WHEN NEW.held THEN 'held' WHEN OLD.held THEN 'redriven' ELSE 'failed' END,
            nullif(NEW.attempts, 0),
            CASE WHEN NEW.operation_id IS NULL THEN NEW.last_error END, NEW.next_attempt_at,
            NEW.operation_id);
    RETURN NULL;
END $$;
CREATE TRIGGER note_parked_again AFTER UPDATE ON events.parked_event FOR EACH ROW
    WHEN (NEW.attempts > OLD.attempts OR NEW.held <> OLD.held)
    EXECUTE FUNCTION events.note_parked_again();

CREATE FUNCTION events.note_buried() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO events.trail (event_uuid, consumer, stream_name, position, step, attempt, error,
                              operation_id)
    VALUES (NEW.event_uuid, NEW.consumer, NEW.stream_name, NEW.position, 'buried',
            nullif(jsonb_array_length(NEW.attempts), 0),
            concat_ws(': ', NEW.reason, NEW.error_type, NEW.error_message), NEW.operation_id);
    RETURN NULL;
END $$;
CREATE TRIGGER note_buried AFTER INSERT OR UPDATE OF buried_at ON events.dead_letter
    FOR EACH ROW EXECUTE FUNCTION events.note_buried();
