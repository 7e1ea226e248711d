-- Contracts: what was sent under each type and version, by whom, and to which stream.

-- An optional field may come and go within a version. Every schema that was ever in use under it is
-- kept, because events of each are in the stream, and a new one has to get along with them all.
ALTER TABLE events.contract DROP CONSTRAINT contract_pkey;
ALTER TABLE events.contract ADD PRIMARY KEY (event_type, version, schema_hash);
COMMENT ON TABLE events.contract IS
    'The JSON Schemas under which events were sent; the one seen last is a version''s present one.';
COMMENT ON COLUMN events.contract.schema_hash IS
    'SHA-256 of the schema''s canonical form, which leaves titles, descriptions and examples out.';

CREATE TABLE events.contract_producer (
    stream_name text        NOT NULL,
    event_type  text        NOT NULL,
    version     integer     NOT NULL,
    schema_hash text        NOT NULL,
    producer    text        NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream_name, event_type, version, producer)
);
COMMENT ON TABLE events.contract_producer IS
    'Which pipeline sends what to which stream, with the schema that it was last seen to have.';

CREATE FUNCTION events.record_contract(
    of_stream text, of_type text, of_version integer, hash text, described jsonb, of_producer text,
    compared text[]
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    -- Called in applications' transactions: nobody waits here for somebody else's COMMIT. Who
    -- comes second leaves it to the first, and looks again at its next transaction.
    IF NOT pg_try_advisory_xact_lock(hashtext('penstock contract'), hashtext(of_type)) THEN
        RETURN false;
    END IF;
    -- Somebody else was faster: that one has not been compared with this yet.
    PERFORM 1 FROM events.contract c
      WHERE c.event_type = of_type AND c.version = of_version
        AND c.schema_hash <> ALL (compared || hash);
    IF FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO events.contract (event_type, version, schema_hash, json_schema, registered_by)
    VALUES (of_type, of_version, hash, described, of_producer)
    ON CONFLICT DO NOTHING;
    INSERT INTO events.contract_producer AS p
           (stream_name, event_type, version, schema_hash, producer)
    VALUES (of_stream, of_type, of_version, hash, of_producer)
    ON CONFLICT (stream_name, event_type, version, producer) DO UPDATE
       SET schema_hash = excluded.schema_hash, seen_at = excluded.seen_at
     WHERE p.schema_hash <> excluded.schema_hash;
    RETURN true;
END $$;
COMMENT ON FUNCTION events.record_contract(text, text, integer, text, jsonb, text, text[]) IS
    'Records what a producer sends, if nothing is recorded under its version but what it was compared '
    'with. False: somebody else is, or was, just recording this type; look again.';
