-- Policy: who may use a stream, enforced here too. Where no policy names anybody and nothing is
-- confidential, there is no trigger and no row-level security, and nothing to pay for them.

CREATE TABLE events.policy_member (
    stream_name text        NOT NULL REFERENCES events.stream_policy ON DELETE CASCADE,
    kind        text        NOT NULL CHECK (kind IN ('producer', 'consumer')),
    name        text        NOT NULL CHECK (length(name) BETWEEN 1 AND 400),
    role_name   text,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream_name, kind, name)
);
COMMENT ON TABLE events.policy_member IS
    'Who may send to and read a restricted stream. After a change, events.apply_policies().';
COMMENT ON COLUMN events.policy_member.name IS
    'A producing pipeline, or the full name of a consumer.';
COMMENT ON COLUMN events.policy_member.role_name IS
    'The database role that it connects with. NULL: only the owner and workers get at its rows.';

CREATE TABLE events.policy_change (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_name text        NOT NULL,
    change      text        NOT NULL,
    changed_by  text        NOT NULL,
    role_name   text        NOT NULL DEFAULT session_user,
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.policy_change IS
    'What operators did to policies and data keys: who, when, what. Kept for ever.';
CREATE INDEX policy_change_stream ON events.policy_change (stream_name, id);

ALTER TABLE events.data_key ADD COLUMN head_at_creation bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN events.data_key.head_at_creation IS
    'How far the stream was when the key was made: a key seals a limited number of events.';
COMMENT ON COLUMN events.data_key.version IS
    '0: the secret that keys are hashed with, for ever. From 1 on: data keys; the active one seals.';
COMMENT ON COLUMN events.data_key.wrapped_key IS
    'The key, encrypted by the KMS. NULL: shredded, and nobody can open what it has sealed.';

CREATE VIEW events.limited_stream AS
    SELECT p.stream_name FROM events.stream_policy p
     WHERE p.security_level = 'restricted'
        OR p.security_level = 'confidential'
           AND EXISTS (SELECT 1 FROM events.policy_member m WHERE m.stream_name = p.stream_name);
COMMENT ON VIEW events.limited_stream IS 'Streams that only those who are named may use.';

-- Every sender asks, whatever its rights are; nothing in here is secret.
GRANT SELECT ON events.stream_policy, events.policy_member TO PUBLIC;

-- ── plaintext ─────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.is_sealed(key text, key_id text, payload jsonb, metadata jsonb)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT key_id IS NOT NULL
       AND (key IS NULL OR key ~ '^[0-9a-f]{64}$')
       AND jsonb_typeof(payload) = 'string'
       AND payload #>> '{}' ~ '^[A-Za-z0-9+/]{38,}={0,2}$'
       AND metadata - '__creation_timestamp_ms__' = '{}'
$$;
COMMENT ON FUNCTION events.is_sealed(text, text, jsonb, jsonb) IS
    'Whether a row has the shape of an encrypted event: what it is made of cannot be seen from here.';

CREATE FUNCTION events.refuse_plaintext() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Before the row is stored, and without a word of what is in it.
    RAISE EXCEPTION USING ERRCODE = 'PS020', MESSAGE =
        format('the stream %s is confidential and takes encrypted events only', NEW.stream_name);
END $$;

CREATE FUNCTION events.refuse_dead_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Held to COMMIT: shredding waits for it, so that no event is sealed with a key that is gone.
    PERFORM pg_advisory_xact_lock_shared(hashtext('penstock data key'), hashtext(NEW.key_id));
    PERFORM 1 FROM events.data_key k
      WHERE k.key_id = NEW.key_id AND k.stream_name = NEW.stream_name AND k.version > 0
        AND k.wrapped_key IS NOT NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS020', MESSAGE = format(
            'the stream %s has no data key %s any more', NEW.stream_name, NEW.key_id);
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION events.apply_plaintext_triggers() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    confidential text[] := ARRAY(
        SELECT p.stream_name FROM events.stream_policy p
         WHERE p.security_level = 'confidential' ORDER BY 1);
    target       regclass;
BEGIN
    FOREACH target IN ARRAY ARRAY['events.outbox_event', 'events.timer']::regclass[] LOOP
        -- Not on other columns: plaintext of the time before has to be numbered all the same.
        PERFORM events.replace_trigger(target, 'refuse_plaintext',
            'INSERT OR UPDATE OF stream_name, key, key_id, payload, metadata', confidential,
            'events.is_sealed(NEW.key, NEW.key_id, NEW.payload, NEW.metadata) IS NOT TRUE');
    END LOOP;
    PERFORM events.replace_trigger('events.outbox_event', 'refuse_dead_key',
                                   'INSERT', confidential, 'NEW.key_id IS NOT NULL');
END $$;

CREATE FUNCTION events.replace_trigger(
    target regclass, trigger_name text, moment text, streams text[], condition text DEFAULT 'true'
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(streams) > 0 THEN
        -- The streams stand in the condition itself: rows of others cost no call and no look-up.
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER %1$I BEFORE %2$s ON %3$s FOR EACH ROW '
            'WHEN (NEW.stream_name = ANY (%4$L::text[]) AND %5$s) EXECUTE FUNCTION events.%1$I()',
            trigger_name, moment, target, streams, condition);
    ELSIF EXISTS (SELECT 1 FROM pg_trigger t
                   WHERE t.tgrelid = target AND t.tgname = trigger_name) THEN
        EXECUTE format('DROP TRIGGER %I ON %s', trigger_name, target);
    END IF;
END $$;

-- ── members ───────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.refuse_stranger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- The session's user: a remote consumer gets here through a function with its owner's rights.
    PERFORM 1 FROM events.policy_member m
      WHERE m.stream_name = NEW.stream_name AND m.kind = 'consumer'
        AND m.name = split_part(NEW.name, '@', 1)
        AND (has_table_privilege(session_user, 'events.stream', 'UPDATE')
             OR pg_has_role(session_user, m.role_name, 'USAGE'));
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS021', MESSAGE = format(
            'the stream %s is restricted, and %s as %s is not among its consumers',
            NEW.stream_name, NEW.name, session_user);
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION events.apply_member_triggers() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    limited text[] := ARRAY(SELECT l.stream_name FROM events.limited_stream l ORDER BY 1);
BEGIN
    PERFORM events.replace_trigger('events.consumer', 'refuse_stranger',
                                   'INSERT OR UPDATE OF name, stream_name', limited);
    PERFORM events.replace_trigger('events.remote_consumer', 'refuse_stranger',
                                   'INSERT OR UPDATE', limited);
END $$;

-- ── rows ──────────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.apply_row_security() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    limited text[] := ARRAY(SELECT l.stream_name FROM events.limited_stream l ORDER BY 1);
    guarded regclass[] := ARRAY['events.outbox_event', 'events.timer', 'events.parked_event',
                                'events.dead_letter'];
    target  regclass;
    made    record;
    member  record;
BEGIN
    FOR made IN SELECT p.polname, p.polrelid::regclass AS target FROM pg_policy p
                 WHERE p.polrelid = ANY (guarded) AND p.polname LIKE 'penstock %' LOOP
        EXECUTE format('DROP POLICY %I ON %s', made.polname, made.target);
    END LOOP;
    FOREACH target IN ARRAY guarded LOOP
        IF cardinality(limited) > 0 THEN
            EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
            EXECUTE format('CREATE POLICY "penstock open" ON %s '
                           'USING (stream_name <> ALL (%L::text[]))', target, limited);
            -- Whoever may number events serves all streams. A publisher without this right fails
            -- at once instead of seeing no rows, so that no stream can stand still in silence.
            EXECUTE format('CREATE POLICY "penstock worker" ON %s '
                           'USING ((SELECT has_table_privilege(''events.stream'', ''UPDATE'')))',
                           target);
        ELSIF EXISTS (SELECT 1 FROM pg_class c WHERE c.oid = target AND c.relrowsecurity)
              AND NOT EXISTS (SELECT 1 FROM pg_policy p WHERE p.polrelid = target) THEN
            EXECUTE format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', target);
        END IF;
    END LOOP;
    FOR member IN SELECT m.*, row_number() OVER (ORDER BY m.stream_name, m.kind, m.name) AS n
                    FROM events.policy_member m
                   WHERE m.stream_name = ANY (limited) AND m.role_name IS NOT NULL LOOP
        PERFORM events.admit_member(member.n, member.kind, member.stream_name, member.name,
                                    member.role_name);
    END LOOP;
END $$;

CREATE FUNCTION events.admit_member(
    n bigint, kind text, of_stream text, of_name text, of_role text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    rows_of_stream   text := format('stream_name = %L', of_stream);
    rows_of_consumer text := rows_of_stream
        || format(' AND split_part(consumer, ''@'', 1) = %L', of_name);
    made             record;
BEGIN
    FOR made IN SELECT * FROM (VALUES
        -- A producer sees what its stream has: the same event sent twice is compared with itself.
        ('producer', 'events.outbox_event', 'read', 'SELECT', 'USING', rows_of_stream),
        ('producer', 'events.outbox_event', 'send', 'INSERT', 'WITH CHECK', rows_of_stream),
        ('producer', 'events.timer', 'schedule', 'ALL', 'USING', rows_of_stream),
        ('consumer', 'events.outbox_event', 'read', 'SELECT', 'USING', rows_of_stream),
        ('consumer', 'events.parked_event', 'own', 'ALL', 'USING', rows_of_consumer),
        ('consumer', 'events.dead_letter', 'own', 'ALL', 'USING', rows_of_consumer)
    ) AS policy(of_kind, target, purpose, command, clause, condition) WHERE of_kind = kind LOOP
        EXECUTE format('CREATE POLICY %I ON %s FOR %s TO %I %s (%s)',
                       format('penstock %s %s', n, made.purpose), made.target::regclass,
                       made.command, of_role, made.clause, made.condition);
    END LOOP;
END $$;

-- An event_uuid that is taken where the sender may not look would otherwise pass for sent.
CREATE OR REPLACE FUNCTION events.require_same_events(batch jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    taken uuid;
BEGIN
    SELECT e.event_uuid INTO taken
      FROM jsonb_to_recordset(batch) AS e(
               event_uuid uuid, stream_name text, event_type text, version integer, key text,
               payload jsonb)
      LEFT JOIN events.outbox_event o USING (event_uuid)
     WHERE CASE WHEN o.id IS NULL THEN row_security_active('events.outbox_event')
                ELSE (o.stream_name, o.event_type, o.version, o.key)
                     IS DISTINCT FROM (e.stream_name, e.event_type, coalesce(e.version, 1), e.key)
                     -- Encrypted twice, the same payload is never the same.
                     OR o.key_id IS NULL AND o.payload <> coalesce(e.payload, 'null') END
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS010', MESSAGE = format(
            'event_uuid %s is already taken by an event with other content', taken);
    END IF;
END $$;

-- ── all of it ─────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.apply_policies() RETURNS void LANGUAGE plpgsql
-- With its owner's rights, so that whoever administers policies need not own the tables.
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM events.apply_plaintext_triggers();
    PERFORM events.apply_member_triggers();
    PERFORM events.apply_row_security();
END $$;
REVOKE ALL ON FUNCTION events.apply_policies() FROM PUBLIC;
COMMENT ON FUNCTION events.apply_policies() IS
    'Makes triggers and row-level security what the policies say. Locks the outbox for a moment.';
