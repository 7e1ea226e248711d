-- The line: outbox, streams, leases, consumers, settled events, seal and fence.
-- Every name is written with the schema `events`; the loader puts the configured one in its place.

CREATE TABLE events.origin (
    id          uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.origin IS
    'One row: the identity of this database, carried by every entry that it publishes.';
CREATE UNIQUE INDEX origin_is_one ON events.origin ((true));
INSERT INTO events.origin DEFAULT VALUES;

CREATE TABLE events.outbox_event (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid    uuid        NOT NULL UNIQUE,
    stream_name   text        NOT NULL CHECK (
        length(stream_name) <= 200 AND stream_name ~ '^[A-Za-z0-9][A-Za-z0-9._:/-]*$'),
    event_type    text        NOT NULL CHECK (
        length(event_type) BETWEEN 1 AND 200 AND event_type !~ '[[:cntrl:]]'),
    version       integer     NOT NULL DEFAULT 1 CHECK (version > 0),
    key           text        CHECK (length(key) <= 1000),
    key_id        text        CHECK (length(key_id) BETWEEN 1 AND 200 AND key_id !~ '[^!-~]'),
    payload       jsonb       NOT NULL,
    metadata      jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(metadata) = 'object'),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    position      bigint      CHECK (position > 0),
    term          bigint,
    published_at  timestamptz
) WITH (fillfactor = 50);
COMMENT ON COLUMN events.outbox_event.position IS
    'The place in the stream: 1, 2, 3 … without gaps. NULL: not numbered yet.';
COMMENT ON COLUMN events.outbox_event.key_id IS
    'The data key that payload and metadata are encrypted with. NULL: plain.';
COMMENT ON COLUMN events.outbox_event.term IS
    'The publisher''s term that numbered the row, so that every tier yields the same bytes.';
CREATE UNIQUE INDEX outbox_event_position
    ON events.outbox_event (stream_name, position) WHERE position IS NOT NULL;
CREATE INDEX outbox_event_unnumbered
    ON events.outbox_event (stream_name, id) WHERE position IS NULL;

CREATE TABLE events.stream (
    name        text        PRIMARY KEY,
    origin      uuid        NOT NULL,
    head        bigint      NOT NULL DEFAULT 0,
    published   bigint      NOT NULL DEFAULT 0,
    id_floor    bigint      NOT NULL DEFAULT 0,
    floor_next  bigint      NOT NULL DEFAULT 0,
    floor_xid   xid8        NOT NULL DEFAULT '0',
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON COLUMN events.stream.head IS 'The last position given out.';
COMMENT ON COLUMN events.stream.published IS 'The last position confirmed in the hot log.';
COMMENT ON COLUMN events.stream.id_floor IS
    'A planner hint: rows at or below it are numbered. A sweep without it finds the rest.';

CREATE TABLE events.hole (
    stream_name text        NOT NULL,
    first       bigint      NOT NULL,
    last        bigint      NOT NULL CHECK (last >= first),
    reason      text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream_name, first)
);
COMMENT ON TABLE events.hole IS 'Positions that no event will ever have; readers step over them.';

CREATE TABLE events.stream_lease (
    stream_name text        NOT NULL,
    role        text        NOT NULL,
    owner_id    text,
    worker_id   text,
    term        bigint      NOT NULL DEFAULT 0,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    checkpoint  bigint      NOT NULL DEFAULT 0,
    clean       boolean     NOT NULL DEFAULT true,
    epoch       integer     NOT NULL DEFAULT 1,
    lane        integer     NOT NULL DEFAULT 0,
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream_name, role)
) WITH (fillfactor = 50);
COMMENT ON COLUMN events.stream_lease.term IS
    'Grows with every acquisition; together with owner_id it fences late writers.';
COMMENT ON COLUMN events.stream_lease.worker_id IS
    'The process that holds the lease, so that its supervisor can release for it.';
COMMENT ON COLUMN events.stream_lease.clean IS
    'Whether the last holder gave the lease back. False and expired: it died or hung.';
CREATE INDEX stream_lease_worker ON events.stream_lease (worker_id) WHERE worker_id IS NOT NULL;

CREATE TABLE events.consumer (
    name            text        PRIMARY KEY,
    stream_name     text        NOT NULL,
    origin          uuid,
    guarantee       text        NOT NULL DEFAULT 'exactly_once',
    lanes           integer     NOT NULL DEFAULT 1 CHECK (lanes > 0),
    epoch           integer     NOT NULL DEFAULT 1,
    start_position  bigint      NOT NULL,
    paused_at       timestamptz,
    registered_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN events.consumer.origin IS 'The producing database, pinned at the first read.';
COMMENT ON COLUMN events.consumer.start_position IS 'The first position that it has to settle.';

CREATE TABLE events.remote_consumer (
    name        text        NOT NULL,
    stream_name text        NOT NULL,
    checkpoint  bigint      NOT NULL DEFAULT 0,
    seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, stream_name)
);
COMMENT ON TABLE events.remote_consumer IS
    'Consumers of other databases that read this one; pruning waits for them.';

CREATE TABLE events.processed_event (
    consumer     text        NOT NULL,
    event_uuid   uuid        NOT NULL,
    position     bigint      NOT NULL,
    outcome      text        NOT NULL
        CHECK (outcome IN ('handled', 'parked', 'dead', 'skipped', 'discarded')),
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, event_uuid)
);

CREATE TABLE events.parked_event (
    consumer        text        NOT NULL,
    stream_name     text        NOT NULL,
    position        bigint      NOT NULL,
    event_uuid      uuid        NOT NULL,
    key_hash        bigint      NOT NULL,
    entry           text        NOT NULL,
    attempts        integer     NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    held            boolean     NOT NULL DEFAULT false,
    last_error      text,
    parked_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, position)
);
CREATE INDEX parked_event_key ON events.parked_event (consumer, key_hash, position);
CREATE INDEX parked_event_due
    ON events.parked_event (consumer, next_attempt_at) WHERE next_attempt_at IS NOT NULL;

CREATE TABLE events.dead_letter (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer      text        NOT NULL,
    stream_name   text        NOT NULL,
    position      bigint      NOT NULL,
    event_uuid    uuid        NOT NULL,
    event_type    text        NOT NULL,
    version       integer     NOT NULL,
    key_hash      bigint      NOT NULL,
    entry         text        NOT NULL,
    reason        text        NOT NULL,
    error_type    text,
    error_message text,
    traceback     text,
    fingerprint   text,
    handler       text,
    attempts      jsonb       NOT NULL DEFAULT '[]',
    host          text,
    buried_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer, event_uuid)
);
CREATE INDEX dead_letter_group ON events.dead_letter (consumer, error_type, fingerprint);

CREATE TABLE events.quarantine (
    name           text        PRIMARY KEY,
    stream_name    text,
    reason         text        NOT NULL,
    crashes        jsonb       NOT NULL DEFAULT '[]',
    quarantined_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE events.timer (
    timer_id    text        PRIMARY KEY,
    stream_name text        NOT NULL,
    event_type  text        NOT NULL,
    version     integer     NOT NULL DEFAULT 1,
    key         text,
    key_id      text,
    payload     jsonb       NOT NULL,
    metadata    jsonb       NOT NULL DEFAULT '{}',
    due_at      timestamptz NOT NULL,
    schedule    jsonb,
    generation  bigint      NOT NULL DEFAULT 1,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX timer_due ON events.timer (due_at);

CREATE TABLE events.contract (
    event_type    text        NOT NULL,
    version       integer     NOT NULL,
    schema_hash   text        NOT NULL,
    json_schema   jsonb       NOT NULL,
    registered_by text        NOT NULL,
    first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (event_type, version)
);

CREATE TABLE events.stream_policy (
    stream_name        text        PRIMARY KEY,
    security_level     text        NOT NULL DEFAULT 'open'
        CHECK (security_level IN ('open', 'restricted', 'confidential')),
    encryption_alg     text,
    kms_key_id         text,
    dek_rotation_days  integer     CHECK (dek_rotation_days > 0),
    active_key_version integer,
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE events.data_key (
    key_id      text        PRIMARY KEY,
    stream_name text        NOT NULL,
    version     integer     NOT NULL,
    wrapped_key bytea,
    kms_key_id  text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    shredded_at timestamptz,
    UNIQUE (stream_name, version)
);

-- ── seal ──────────────────────────────────────────────────────────────────────────────────────

CREATE UNLOGGED TABLE events.seal (
    id    bigint PRIMARY KEY,
    xid   xid8   NOT NULL DEFAULT pg_current_xact_id(),
    fresh bigint NOT NULL
);
COMMENT ON TABLE events.seal IS
    'One row per batch in hand; a transaction that still has its row cannot commit.';
COMMENT ON COLUMN events.seal.id IS
    'Drawn by the worker, so that it can send the fence without knowing what the claim returned.';
COMMENT ON COLUMN events.seal.fresh IS 'How many events of the batch were new.';

CREATE FUNCTION events.refuse_unsealed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM events.seal WHERE id = NEW.id) THEN
        -- End the backend as well: after a refusal that the handler swallows, its next
        -- COMMIT would otherwise keep whatever it wrote since.
        PERFORM pg_terminate_backend(pg_backend_pid());
        RAISE EXCEPTION USING ERRCODE = 'PS001', MESSAGE =
            'COMMIT (or SET CONSTRAINTS … IMMEDIATE) inside an exactly-once handler: '
            'the worker commits, once, together with the checkpoint';
    END IF;
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER refuse_unsealed AFTER INSERT ON events.seal
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION events.refuse_unsealed();

CREATE FUNCTION events.fence(
    seal_id bigint, taken_for_fresh bigint, of_stream text, lease_role text, owner text,
    held_term bigint, old_checkpoint bigint, new_checkpoint bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    broken events.seal;
    holder text;
BEGIN
    DELETE FROM events.seal WHERE id = seal_id RETURNING * INTO broken;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS002', MESSAGE =
            'the batch''s seal is missing: a handler removed it or ended the transaction';
    END IF;
    IF pg_current_xact_id_if_assigned() IS DISTINCT FROM broken.xid THEN
        RAISE EXCEPTION USING ERRCODE = 'PS002', MESSAGE =
            'the batch''s transaction was ended inside a handler: its earlier writes are gone';
    END IF;
    UPDATE events.stream_lease
       SET checkpoint = new_checkpoint, updated_at = clock_timestamp()
     WHERE stream_name = of_stream AND role = lease_role AND owner_id = owner AND term = held_term
       AND checkpoint = old_checkpoint AND lease_until > clock_timestamp();
    IF NOT FOUND THEN
        SELECT coalesce(owner_id, 'nobody') INTO holder
          FROM events.stream_lease WHERE stream_name = of_stream AND role = lease_role;
        RAISE EXCEPTION USING ERRCODE = 'PS003', MESSAGE =
            format('the lease on %s as %s is held by %s', of_stream, lease_role, holder);
    END IF;
    IF broken.fresh <> taken_for_fresh THEN
        RAISE EXCEPTION USING ERRCODE = 'PS004', MESSAGE =
            format('%s events of the batch are new, not %s', broken.fresh, taken_for_fresh);
    END IF;
END $$;

-- ── send ──────────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.send_many(batch jsonb) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    moment   timestamptz;
    inserted integer;
BEGIN
    -- The transaction has its xid before it draws an id, so that the id floor can wait for it.
    PERFORM pg_current_xact_id();
    -- Keyed events draw their ids under one of 256 lock slots per stream, held to COMMIT:
    -- that gives a key's events the order of its commits. Sorted, so that two senders
    -- never wait for each other in a circle.
    PERFORM pg_advisory_xact_lock(slots.stream_hash, slots.slot) FROM (
        SELECT DISTINCT hashtext('penstock key ' || e.stream_name) AS stream_hash,
               hashtext(e.key) & 255 AS slot
          FROM jsonb_to_recordset(batch) AS e(stream_name text, key text)
         WHERE e.key IS NOT NULL
         ORDER BY 1, 2
    ) AS slots;
    moment := clock_timestamp();
    INSERT INTO events.outbox_event
           (event_uuid, stream_name, event_type, version, key, key_id, payload, metadata, created_at)
    SELECT e.event_uuid, e.stream_name, e.event_type, coalesce(e.version, 1), e.key, e.key_id,
           -- A JSON null arrives here as NULL, like a payload that is missing.
           coalesce(e.payload, CASE WHEN batch -> (e.ordinality - 1)::integer ? 'payload'
                                    THEN 'null'::jsonb END),
           coalesce(e.metadata, '{}') || jsonb_build_object(
               '__creation_timestamp_ms__', floor(extract(epoch FROM moment) * 1000)::bigint),
           moment
      FROM ROWS FROM (jsonb_to_recordset(batch) AS (
               event_uuid uuid, stream_name text, event_type text, version integer,
               key text, key_id text, payload jsonb, metadata jsonb
           )) WITH ORDINALITY AS e
     ORDER BY e.ordinality
        ON CONFLICT (event_uuid) DO NOTHING;
    GET DIAGNOSTICS inserted = ROW_COUNT;
    IF inserted < jsonb_array_length(batch) THEN
        PERFORM events.require_same_events(batch);
    END IF;
    -- A sleeping publisher holds its streams' slots exclusively. A sender that gets the shared
    -- lock keeps the publisher awake until this transaction is decided; one that does not
    -- notifies. So it cannot fall asleep over us, and a busy one costs no NOTIFY.
    PERFORM pg_notify('events_outbox_insert', '') FROM (
        SELECT DISTINCT hashtext(e.stream_name) & 255 AS slot
          FROM jsonb_to_recordset(batch) AS e(stream_name text)
    ) AS streams
     WHERE NOT pg_try_advisory_xact_lock_shared(hashtext('penstock wake-up'), streams.slot);
    RETURN inserted;
END $$;
COMMENT ON FUNCTION events.send_many(jsonb) IS
    'Inserts an array of events in order. An event_uuid that is there already is left alone, '
    'so a second try is safe. Returns how many were new.';

CREATE FUNCTION events.require_same_events(batch jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    taken uuid;
BEGIN
    SELECT e.event_uuid INTO taken
      FROM jsonb_to_recordset(batch) AS e(
               event_uuid uuid, stream_name text, event_type text, version integer, key text,
               payload jsonb)
      JOIN events.outbox_event o USING (event_uuid)
     WHERE (o.stream_name, o.event_type, o.version, o.key, o.payload) IS DISTINCT FROM
           (e.stream_name, e.event_type, coalesce(e.version, 1), e.key,
            coalesce(e.payload, 'null'))
       AND o.key_id IS NULL
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS010', MESSAGE = format(
            'event_uuid %s is already taken by an event with other content', taken);
    END IF;
END $$;

CREATE FUNCTION events.uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid()) PLACING substring(int8send(
                floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid
$$;
COMMENT ON FUNCTION events.uuid7() IS 'Time-ordered ids keep deduplication inserts cheap.';

CREATE FUNCTION events.send(
    stream_name text, event_type text, payload jsonb, key text DEFAULT NULL,
    version integer DEFAULT 1, metadata jsonb DEFAULT '{}', event_uuid uuid DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    id uuid := coalesce(send.event_uuid, events.uuid7());
BEGIN
    IF send.payload IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'not_null_violation', MESSAGE =
            'the payload is NULL; nothing was sent. A JSON null is written ''null''::jsonb';
    END IF;
    PERFORM events.send_many(jsonb_build_array(jsonb_build_object(
        'event_uuid', id, 'stream_name', send.stream_name, 'event_type', send.event_type,
        'version', send.version, 'key', send.key, 'payload', send.payload,
        'metadata', send.metadata)));
    RETURN id;
END $$;
COMMENT ON FUNCTION events.send(text, text, jsonb, text, integer, jsonb, uuid) IS
    'Sends one event in the current transaction. For programs in any language.';

-- ── publish ───────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.entry(o events.outbox_event, origin uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT 'event' || E'\n' || origin || E'\n' || (o).term || E'\n' || (o).id || E'\n'
        || (o).event_uuid || E'\n' || (o).event_type || E'\n' || (o).version || E'\n'
        || coalesce((o).key_id, '') || E'\n'
        || floor(extract(epoch FROM (o).created_at) * 1000000)::bigint || E'\n'
        || coalesce(to_json((o).key)::text, 'null') || E'\n'
        || (o).metadata::text || E'\n' || (o).payload::text
$$;
COMMENT ON FUNCTION events.entry(events.outbox_event, uuid) IS
    'The bytes of an event on every tier: one field a line, payload last, as PostgreSQL prints it.';

CREATE FUNCTION events.number_events(
    of_stream text, owner text, held_term bigint, batch_size integer, sweep boolean
) RETURNS TABLE (event_position bigint, body text)
LANGUAGE plpgsql
-- Statistics of an outbox are always stale; the right plan is always the index.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    s         events.stream;
    horizon   pg_snapshot;
    numbered  integer;
    last_id   bigint;
    new_floor bigint;
BEGIN
    -- A position that reached the hot log must never be given to another event, so this commit
    -- is durable whatever the role or the database says. Lasts to the end of the transaction.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- By this lock a successor finds and ends us: a backend whose stopped client does not read its
    -- rows cannot commit, and would hold the stream's row for as long.
    PERFORM pg_advisory_xact_lock_shared(
        hashtext('penstock lane'), hashtext(of_stream || ' publisher'));
    -- A statement of its own: a single statement would take its snapshot before it waits for
    -- the lock, and two publishers would number the same rows.
    SELECT * INTO s FROM events.stream WHERE name = of_stream FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS003', MESSAGE =
            format('the stream %s is not registered any more', of_stream);
    END IF;
    PERFORM 1 FROM events.stream_lease
      WHERE stream_name = of_stream AND role = 'publisher' AND owner_id = owner AND term = held_term;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS003', MESSAGE =
            format('the lease on %s as publisher is held by another worker', of_stream);
    END IF;
    horizon := pg_current_snapshot();
    -- The pair is compared, not each column, because only the index of unnumbered rows is sorted
    -- by both: with `stream_name = …` stale statistics led to a walk over the primary key, past
    -- every published row (338 ms over 200,000).
    RETURN QUERY
    WITH claimed AS MATERIALIZED (
        SELECT u.id, row_number() OVER (ORDER BY u.id) AS n
          FROM (SELECT o.id FROM events.outbox_event o
                 WHERE (o.stream_name, o.id)
                     > (of_stream, CASE WHEN sweep THEN 0 ELSE s.id_floor END)
                   AND o.stream_name <= of_stream AND o.position IS NULL
                 ORDER BY o.stream_name, o.id LIMIT batch_size) AS u
    )
    UPDATE events.outbox_event o
       SET position = s.head + claimed.n, term = held_term, published_at = clock_timestamp()
      FROM claimed
     WHERE o.id = claimed.id
    RETURNING o.position, events.entry(o, s.origin);
    GET DIAGNOSTICS numbered = ROW_COUNT;
    IF numbered = 0 THEN
        RETURN;
    END IF;
    SELECT o.id INTO last_id FROM events.outbox_event o
     WHERE o.stream_name = of_stream AND o.position = s.head + numbered;
    -- The floor follows only behind finished transactions. A candidate (floor_next) gets its bound
    -- from the next call, whose own xid is larger than that of every transaction which had drawn
    -- an id when the candidate was seen; a snapshot's xmax is not: it ignores running ones.
    new_floor := s.id_floor;
    IF s.floor_xid <> '0' AND s.floor_xid <= pg_snapshot_xmin(horizon) THEN
        new_floor := CASE WHEN numbered < batch_size THEN s.floor_next
                          ELSE least(s.floor_next, last_id) END;
    END IF;
    UPDATE events.stream
       SET head = s.head + numbered,
           id_floor = greatest(id_floor, new_floor),
           floor_next = CASE WHEN new_floor >= s.floor_next THEN greatest(last_id, floor_next)
                             ELSE floor_next END,
           floor_xid = CASE WHEN new_floor >= s.floor_next THEN '0'
                            WHEN s.floor_xid = '0' THEN pg_current_xact_id()
                            ELSE s.floor_xid END
     WHERE name = of_stream;
END $$;
