-- Workers: who is alive, how a consumer is split into lanes, and events that kill processes.

CREATE TABLE events.worker (
    consumer    text        NOT NULL,
    worker_id   text        NOT NULL,
    host        text        NOT NULL,
    pid         integer     NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    alive_until timestamptz NOT NULL,
    PRIMARY KEY (consumer, worker_id)
) WITH (fillfactor = 50);
COMMENT ON TABLE events.worker IS
    'The processes that serve a consumer; its lanes are shared out among those alive.';

ALTER TABLE events.consumer
    ADD COLUMN deployed_at  timestamptz NOT NULL DEFAULT '-infinity',
    ADD COLUMN settled_to   bigint      NOT NULL DEFAULT 0,
    ADD COLUMN paused_by    text,
    ADD COLUMN pause_reason text;
COMMENT ON COLUMN events.consumer.deployed_at IS
    'When the supervisor started that decided on the lane count; an earlier one does not undo it.';
COMMENT ON COLUMN events.consumer.settled_to IS
    'Lanes of earlier epochs may have settled events up to here, beyond the present checkpoints.';

CREATE TABLE events.suspect (
    consumer   text        NOT NULL,
    position   bigint      NOT NULL,
    event_uuid uuid        NOT NULL,
    worker_id  text        NOT NULL,
    starts     jsonb       NOT NULL DEFAULT '[]',
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, position)
);
COMMENT ON TABLE events.suspect IS
    'Attempts that were started alone, after a crash, and have not finished. '
    'A row whose worker is dead is a strike against its event.';
CREATE INDEX suspect_worker ON events.suspect (worker_id);

CREATE TABLE events.seek (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer   text        NOT NULL,
    old_checkpoint bigint  NOT NULL,
    new_checkpoint bigint  NOT NULL,
    sought_by  text        NOT NULL,
    reason     text        NOT NULL DEFAULT '',
    sought_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE events.seek IS
    'Who moved a consumer by hand. Positions that it was moved over are accounted for here.';
CREATE INDEX seek_consumer ON events.seek (consumer, id);

ALTER TABLE events.quarantine
    ADD COLUMN host text;

-- ── lanes ─────────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.lane_role(
    of_consumer text, of_epoch integer, of_lane integer, of_lanes integer
) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'consumer:' || of_consumer
        || CASE WHEN of_epoch = 1 AND of_lanes = 1 THEN ''
                ELSE '/' || of_epoch || '/' || of_lane END
$$;

CREATE FUNCTION events.begin_epoch(
    of_consumer text, new_lanes integer, new_checkpoint bigint DEFAULT NULL
) RETURNS events.consumer LANGUAGE plpgsql AS $$
DECLARE
    c         events.consumer;
    lowest    bigint;
    highest   bigint;
    was_clean boolean;
BEGIN
    SELECT * INTO c FROM events.consumer WHERE name = of_consumer FOR UPDATE;
    -- A worker that is just committing is waited for; the next fence of any old lane finds no row.
    -- In order, as renewals take them, so that nobody waits in a circle.
    PERFORM 1 FROM events.stream_lease l
      WHERE l.stream_name = c.stream_name AND split_part(l.role, '/', 1) = 'consumer:' || c.name
      ORDER BY l.role FOR UPDATE;
    WITH ended AS (
        DELETE FROM events.stream_lease l
         WHERE l.stream_name = c.stream_name AND split_part(l.role, '/', 1) = 'consumer:' || c.name
        RETURNING l.checkpoint, l.clean OR l.lease_until > clock_timestamp() AS clean
    )
    SELECT min(checkpoint), max(checkpoint), coalesce(bool_and(clean), true)
      INTO lowest, highest, was_clean FROM ended;
    UPDATE events.consumer
       SET lanes = new_lanes, epoch = c.epoch + 1,
           settled_to = greatest(c.settled_to, coalesce(highest, 0))
     WHERE name = of_consumer RETURNING * INTO c;
    INSERT INTO events.stream_lease (stream_name, role, checkpoint, epoch, lane, clean)
    SELECT c.stream_name, events.lane_role(c.name, c.epoch, n, c.lanes),
           coalesce(new_checkpoint, lowest, c.start_position - 1), c.epoch, n, was_clean
      FROM generate_series(0, c.lanes - 1) AS n;
    RETURN c;
END $$;
COMMENT ON FUNCTION events.begin_epoch(text, integer, bigint) IS
    'Ends all terms of a consumer and starts its lanes anew, at the lowest checkpoint or at the '
    'given one; what is settled above that is not handled again.';

CREATE FUNCTION events.agree_on_lanes(
    of_consumer text, wanted integer, of_deploy timestamptz
) RETURNS events.consumer LANGUAGE plpgsql AS $$
DECLARE
    c events.consumer;
BEGIN
    SELECT * INTO c FROM events.consumer WHERE name = of_consumer;
    IF of_deploy > c.deployed_at THEN
        SELECT * INTO c FROM events.consumer WHERE name = of_consumer FOR UPDATE;
        IF of_deploy > c.deployed_at THEN
            IF c.lanes <> wanted THEN
                c := events.begin_epoch(of_consumer, wanted);
            END IF;
            UPDATE events.consumer SET deployed_at = of_deploy
             WHERE name = of_consumer RETURNING * INTO c;
        END IF;
    END IF;
    -- Held while missing lanes are entered: an epoch that ends meanwhile must not get its lanes
    -- back, at a checkpoint of long ago.
    SELECT * INTO c FROM events.consumer WHERE name = of_consumer FOR KEY SHARE;
    -- It looks first: ON CONFLICT alone would wait for whoever is just updating a row.
    INSERT INTO events.stream_lease (stream_name, role, checkpoint, epoch, lane)
    SELECT c.stream_name, events.lane_role(c.name, c.epoch, n, c.lanes), c.start_position - 1,
           c.epoch, n
      FROM generate_series(0, c.lanes - 1) AS n
     WHERE NOT EXISTS (
           SELECT 1 FROM events.stream_lease l
            WHERE l.stream_name = c.stream_name
              AND l.role = events.lane_role(c.name, c.epoch, n, c.lanes))
        ON CONFLICT DO NOTHING;
    RETURN c;
END $$;
COMMENT ON FUNCTION events.agree_on_lanes(text, integer, timestamptz) IS
    'The lane count as the books have it. A later deploy than the one that set it may change it; '
    'a worker of an earlier one, restarted meanwhile, may not change it back.';
