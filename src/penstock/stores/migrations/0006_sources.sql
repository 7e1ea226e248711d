-- Sources: streams of other services that this database's consumers read, and the consumers of
-- other services that read ours.

CREATE TABLE events.source (
    stream_name text        PRIMARY KEY,
    first       bigint      NOT NULL DEFAULT 1,
    head        bigint      NOT NULL DEFAULT 0,
    seen_at     timestamptz,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.source IS
    'Streams that another database numbers. They are in no other table of streams, so that nobody '
    'here publishes or prunes them.';
COMMENT ON COLUMN events.source.first IS 'The first position that could be read, as last seen.';
COMMENT ON COLUMN events.source.head IS 'The last position given out, as last seen.';

CREATE FUNCTION events.register_source(of_stream text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM events.source WHERE stream_name = of_stream;
    IF FOUND THEN
        RETURN true;
    END IF;
    -- A name that was met before anybody said that it is another service's.
    DELETE FROM events.stream s
     WHERE s.name = of_stream AND s.head = 0
       AND NOT EXISTS (SELECT 1 FROM events.outbox_event o WHERE o.stream_name = of_stream);
    PERFORM 1 FROM events.stream WHERE name = of_stream;
    IF FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO events.source (stream_name) VALUES (of_stream) ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
COMMENT ON FUNCTION events.register_source(text) IS
    'Enters a stream of another service. False: this database numbers a stream of that name.';

-- ── consumers of other services ───────────────────────────────────────────────────────────────

ALTER TABLE events.remote_consumer ADD COLUMN generation bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN events.remote_consumer.generation IS
    'Grows when the consumer is registered or moved. Within one its checkpoint never moves back, '
    'and what an earlier one still reports is ignored.';

CREATE FUNCTION events.record_remote_checkpoint(
    consumer_name text, of_stream text, reached bigint, of_generation bigint DEFAULT 0
) RETURNS boolean LANGUAGE plpgsql
-- With its owner's rights: a reader of another service may do this and write nothing else.
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last_given bigint;
BEGIN
    IF coalesce(consumer_name !~ '^[^.[:cntrl:]]{1,200}[.][^[:cntrl:]]{1,200}$', true)
       OR coalesce(reached < 0, true) OR coalesce(of_generation < 0, true) THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE =
            'a remote consumer has a full name, pipeline.consumer, and a checkpoint from 0 on';
    END IF;
    SELECT s.head INTO last_given FROM events.stream s WHERE s.name = of_stream;
    IF NOT FOUND THEN
        -- Nothing was ever sent; there is nothing to keep either.
        RETURN false;
    END IF;
    -- A standby that took over may have lost positions that were read, and must learn of these;
    -- but nobody is let to move the head by a number out of thin air.
    IF reached > last_given + 100000 THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE =
            format('%s has given out %s positions; %s cannot be a checkpoint',
                   of_stream, last_given, reached);
    END IF;
    IF (SELECT count(*) FROM events.remote_consumer r
         WHERE r.stream_name = of_stream AND r.name <> consumer_name) >= 1000 THEN
        RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE =
            format('%s has too many remote consumers; forget some', of_stream);
    END IF;
    -- The pruning that is going on ends first; the next one sees this row. See hold_pruning.
    PERFORM pg_advisory_xact_lock_shared(hashtext('penstock prune'), hashtext(of_stream));
    INSERT INTO events.remote_consumer AS r (name, stream_name, checkpoint, generation)
    VALUES (consumer_name, of_stream, reached, of_generation)
    ON CONFLICT (name, stream_name) DO UPDATE
       SET checkpoint = CASE WHEN excluded.generation > r.generation THEN excluded.checkpoint
                             ELSE greatest(r.checkpoint, excluded.checkpoint) END,
           generation = excluded.generation,
           seen_at = clock_timestamp()
     WHERE excluded.generation >= r.generation;
    RETURN true;
END $$;
REVOKE ALL ON FUNCTION events.record_remote_checkpoint(text, text, bigint, bigint) FROM PUBLIC;
COMMENT ON FUNCTION events.record_remote_checkpoint(text, text, bigint, bigint) IS
    'How far a consumer of another service is: pruning waits for it. False: no such stream yet.';
