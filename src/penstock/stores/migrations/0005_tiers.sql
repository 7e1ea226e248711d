-- Tiers: keys that sign what lies on the hot log, holes, and what a failover of PostgreSQL demands.

CREATE TABLE events.mac_key (
    key_id     text        PRIMARY KEY CHECK (key_id ~ '^[A-Za-z0-9_.-]{1,40}$'),
    secret     bytea       NOT NULL CHECK (length(secret) >= 16),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.mac_key IS
    'The keys that sign entries of the hot log. The latest signs; all of them are accepted.';

CREATE FUNCTION events.add_mac_key() RETURNS text LANGUAGE sql AS $$
    -- Three random uuids are more than 256 random bits; sha256 makes one key of them.
    INSERT INTO events.mac_key (key_id, secret)
    SELECT left(gen_random_uuid()::text, 8),
           sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
                  || uuid_send(gen_random_uuid()))
    RETURNING key_id
$$;
SELECT events.add_mac_key();

-- ── timelines and holes ───────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.timeline() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN left(pg_walfile_name(pg_current_wal_lsn()), 8);
EXCEPTION WHEN OTHERS THEN
    -- Servers that do not tell are trusted to have one only.
    RETURN '';
END $$;

-- Set before the first position: a standby may know the stream and none of its positions.
ALTER TABLE events.stream ADD COLUMN timeline text NOT NULL DEFAULT events.timeline();
COMMENT ON COLUMN events.stream.timeline IS
    'The timeline of the write-ahead log on which the last position was given out. Another one '
    'means that a standby took over, which may have lost positions that are in use elsewhere.';

CREATE FUNCTION events.incarnation() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    cluster text;
BEGIN
    BEGIN
        SELECT system_identifier::text INTO cluster FROM pg_control_system();
    EXCEPTION WHEN OTHERS THEN
        cluster := '';
    END;
    RETURN cluster || '/' || (SELECT oid FROM pg_database WHERE datname = current_database())
        || '/' || events.timeline();
END $$;
COMMENT ON FUNCTION events.incarnation() IS
    'Which database this is, as cluster/database/timeline: a restored copy has the same origin, '
    'and differs here.';

CREATE FUNCTION events.require_publisher(of_stream text, owner text, held_term bigint)
RETURNS events.stream LANGUAGE plpgsql AS $$
DECLARE
    s events.stream;
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
    RETURN s;
END $$;

CREATE FUNCTION events.step_over(
    of_stream text, owner text, held_term bigint, reached bigint, margin bigint, why text
) RETURNS TABLE (hole_first bigint, hole_last bigint) LANGUAGE plpgsql AS $$
DECLARE
    s    events.stream := events.require_publisher(of_stream, owner, held_term);
    goal bigint;
BEGIN
    SELECT max(used) + margin INTO goal FROM (
        SELECT s.head UNION ALL SELECT reached
        UNION ALL SELECT max(l.checkpoint) FROM events.stream_lease l
                   WHERE l.stream_name = of_stream AND l.role LIKE 'consumer:%'
        UNION ALL SELECT max(r.checkpoint) FROM events.remote_consumer r
                   WHERE r.stream_name = of_stream) AS known(used);
    INSERT INTO events.hole (stream_name, first, last, reason)
    VALUES (of_stream, s.head + 1, goal, why);
    UPDATE events.stream SET head = goal, timeline = events.timeline() WHERE name = of_stream;
    RETURN QUERY SELECT s.head + 1, goal;
END $$;
COMMENT ON FUNCTION events.step_over(text, text, bigint, bigint, bigint, text) IS
    'Moves the head past every position that may be in use although this database does not know '
    'it, and leaves a hole there.';

CREATE FUNCTION events.hole_entry(h events.hole, origin uuid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT 'hole' || E'\n' || origin || E'\n' || (h).first || E'\n' || (h).last
$$;
COMMENT ON FUNCTION events.hole_entry(events.hole, uuid) IS
    'The bytes of a hole on every tier; its place is its last position.';

CREATE FUNCTION events.read_entries(of_stream text, after bigint, count_max integer)
RETURNS TABLE (entry_position bigint, body text)
LANGUAGE plpgsql STABLE
-- Statistics of an outbox are always stale: with a backlog of 300,000 a read of 500 sorted all of
-- them, in 360 ms. The right plan is always the index.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
    source uuid;
    hole   events.hole;
    found  integer;
BEGIN
    SELECT origin INTO source FROM events.stream WHERE name = of_stream;
    WHILE count_max > 0 LOOP
        SELECT * INTO hole FROM events.hole h
         WHERE h.stream_name = of_stream AND h.last > after ORDER BY h.first LIMIT 1;
        RETURN QUERY
        SELECT o.position, events.entry(o, source)
          FROM events.outbox_event o
         WHERE o.stream_name = of_stream AND o.position > after
           AND (hole.first IS NULL OR o.position < hole.first)
         ORDER BY o.position
         LIMIT count_max;
        GET DIAGNOSTICS found = ROW_COUNT;
        count_max := count_max - found - 1;
        EXIT WHEN hole.first IS NULL OR count_max < 0;
        RETURN QUERY SELECT hole.last, events.hole_entry(hole, source);
        after := hole.last;
    END LOOP;
END $$;
COMMENT ON FUNCTION events.read_entries(text, bigint, integer) IS
    'The warm tier: what stands behind a position, in order, as the bytes that the hot log holds, '
    'and the holes between, each at its last position.';

-- As before, and refuses to number on another timeline until the stream was stepped over.
CREATE OR REPLACE FUNCTION events.number_events(
    of_stream text, owner text, held_term bigint, batch_size integer, sweep boolean
) RETURNS TABLE (event_position bigint, body text)
LANGUAGE plpgsql
-- Statistics of an outbox are always stale; the right plan is always the index.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    s         events.stream := events.require_publisher(of_stream, owner, held_term);
    present   text := events.timeline();
    horizon   pg_snapshot;
    numbered  integer;
    last_id   bigint;
    new_floor bigint;
BEGIN
    IF s.timeline <> present THEN
        RAISE EXCEPTION USING ERRCODE = 'PS005', MESSAGE =
            format('timeline %s follows %s on which %s was numbered', present, s.timeline, s.name);
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
