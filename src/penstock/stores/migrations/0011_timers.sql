-- Timers: rows that become events when they are due.

ALTER TABLE events.timer
    ADD COLUMN held_at     timestamptz,
    ADD COLUMN held_reason text,
    -- The rules of outbox_event: a timer that could never be fired is refused when it is made.
    ADD CONSTRAINT timer_id_is_name CHECK (
        length(timer_id) BETWEEN 1 AND 200 AND timer_id !~ '[[:cntrl:]]'),
    ADD CONSTRAINT timer_stream_name CHECK (
        length(stream_name) <= 200 AND stream_name ~ '^[A-Za-z0-9][A-Za-z0-9._:/-]*$'),
    ADD CONSTRAINT timer_event_type CHECK (
        length(event_type) BETWEEN 1 AND 200 AND event_type !~ '[[:cntrl:]]'),
    ADD CONSTRAINT timer_version CHECK (version > 0),
    ADD CONSTRAINT timer_key CHECK (length(key) <= 1000),
    ADD CONSTRAINT timer_key_id CHECK (length(key_id) BETWEEN 1 AND 200 AND key_id !~ '[^!-~]'),
    ADD CONSTRAINT timer_metadata CHECK (jsonb_typeof(metadata) = 'object'),
    ADD CONSTRAINT timer_due_at CHECK (isfinite(due_at)),
    ADD CONSTRAINT timer_schedule CHECK (jsonb_typeof(schedule) = 'object');
COMMENT ON COLUMN events.timer.generation IS
    'The transaction that wrote the row last. Whoever fires what it has read compares it.';
COMMENT ON COLUMN events.timer.schedule IS 'How it recurs; NULL: it is fired once and gone.';
COMMENT ON COLUMN events.timer.held_at IS
    'When it was set aside because it could not be fired; NULL: it is fired when it is due.';
ALTER TABLE events.timer ALTER COLUMN generation SET DEFAULT pg_current_xact_id()::text::bigint;
CREATE INDEX timer_next ON events.timer (due_at, timer_id) WHERE held_at IS NULL;
CREATE INDEX timer_held ON events.timer (due_at, timer_id) WHERE held_at IS NOT NULL;
DROP INDEX events.timer_due;

-- ── making ────────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.wake_for_timer(due_at timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Whoever fires timers looks once a second, so only a near one has to wake it. While it sleeps
    -- it holds this lock exclusively; as long as this transaction has its share, it stays awake.
    IF due_at < clock_timestamp() + interval '10 s'
       AND NOT pg_try_advisory_xact_lock_shared(hashtext('penstock timers'), 1) THEN
        PERFORM pg_notify('events_timer', '');
    END IF;
END $$;

CREATE FUNCTION events.schedule(
    timer_id text, stream_name text, event_type text, payload jsonb,
    due_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, key text DEFAULT NULL,
    version integer DEFAULT 1, metadata jsonb DEFAULT '{}', recurrence jsonb DEFAULT NULL,
    key_id text DEFAULT NULL, on_conflict text DEFAULT 'replace'
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    moment timestamptz := coalesce(schedule.due_at, clock_timestamp() + schedule.delay);
    is_new boolean;
BEGIN
    IF schedule.payload IS NULL OR num_nonnulls(schedule.due_at, schedule.delay) <> 1
       OR coalesce(schedule.on_conflict, '') NOT IN ('replace', 'keep', 'error') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
            'a timer needs a payload, either due_at or delay, and on_conflict replace, keep or '
            'error; nothing was scheduled';
    END IF;
    IF schedule.on_conflict = 'replace' THEN
        INSERT INTO events.timer AS t (timer_id, stream_name, event_type, version, key, key_id,
                                       payload, metadata, due_at, schedule)
        VALUES (schedule.timer_id, schedule.stream_name, schedule.event_type, schedule.version,
                schedule.key, schedule.key_id, schedule.payload, schedule.metadata, moment,
                schedule.recurrence)
            ON CONFLICT (timer_id) DO UPDATE
           SET stream_name = excluded.stream_name, event_type = excluded.event_type,
               version = excluded.version, key = excluded.key, key_id = excluded.key_id,
               payload = excluded.payload, metadata = excluded.metadata,
               due_at = excluded.due_at, schedule = excluded.schedule,
               generation = excluded.generation, created_at = excluded.created_at,
               held_at = NULL, held_reason = NULL
        RETURNING t.xmax = 0 INTO is_new;
    ELSE
        INSERT INTO events.timer (timer_id, stream_name, event_type, version, key, key_id,
                                  payload, metadata, due_at, schedule)
        VALUES (schedule.timer_id, schedule.stream_name, schedule.event_type, schedule.version,
                schedule.key, schedule.key_id, schedule.payload, schedule.metadata, moment,
                schedule.recurrence)
            ON CONFLICT (timer_id) DO NOTHING
        RETURNING true INTO is_new;
        IF is_new IS NULL THEN
            PERFORM events.require_timer_visible(schedule.timer_id);
            IF schedule.on_conflict = 'error' THEN
                RAISE EXCEPTION USING ERRCODE = 'PS030', MESSAGE =
                    format('there is already a timer %s', schedule.timer_id);
            END IF;
            RETURN 'kept';
        END IF;
    END IF;
    PERFORM events.wake_for_timer(moment);
    RETURN CASE WHEN is_new THEN 'scheduled' ELSE 'replaced' END;
END $$;
COMMENT ON FUNCTION events.schedule(text, text, text, jsonb, timestamptz, interval, text, integer,
                                    jsonb, jsonb, text, text) IS
    'Schedules an event in the current transaction: scheduled, replaced or kept.';

CREATE FUNCTION events.require_timer_visible(of_timer text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Somebody else's timer, on a stream that this role may not see, would pass for one of ours.
    IF row_security_active('events.timer')
       AND NOT EXISTS (SELECT 1 FROM events.timer t WHERE t.timer_id = of_timer) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE =
            'the timer''s id is taken behind the row-level security policy of events.timer';
    END IF;
END $$;

CREATE FUNCTION events.reschedule(
    timer_id text, due_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    moment timestamptz := coalesce(reschedule.due_at, clock_timestamp() + reschedule.delay);
BEGIN
    IF num_nonnulls(reschedule.due_at, reschedule.delay) <> 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE =
            'give either due_at or delay; nothing was rescheduled';
    END IF;
    UPDATE events.timer t
       SET due_at = moment, generation = DEFAULT, held_at = NULL, held_reason = NULL
     WHERE t.timer_id = reschedule.timer_id;
    IF FOUND THEN
        PERFORM events.wake_for_timer(moment);
    END IF;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION events.reschedule(text, timestamptz, interval) IS
    'Moves a timer''s next firing. False: there is none of that id, or it was fired already.';

CREATE FUNCTION events.cancel_timer(timer_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    -- Waits for whoever is firing it, so that the answer is final.
    DELETE FROM events.timer t WHERE t.timer_id = cancel_timer.timer_id;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION events.cancel_timer(text) IS
    'Takes a timer back. False: there is none of that id, or it was fired already.';

-- ── firing ────────────────────────────────────────────────────────────────────────────────────

CREATE FUNCTION events.timer_slot(stream_name text, key text) RETURNS bigint
-- The lock slot of a key as events.send_many takes it, in one number.
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT hashtext('penstock key ' || stream_name)::bigint * 256 + (hashtext(key) & 255)
$$;

CREATE FUNCTION events.free_slots(slots bigint[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    free bigint[] := '{}';
    slot bigint;
BEGIN
    -- Asked once per slot and never waited for: an application that holds a key for long delays
    -- the timers of that key, and no others.
    FOREACH slot IN ARRAY slots LOOP
        IF pg_try_advisory_xact_lock((slot >> 8)::integer, (slot & 255)::integer) THEN
            free := free || slot;
        END IF;
    END LOOP;
    RETURN free;
END $$;

CREATE FUNCTION events.fire_timers(
    batch_size integer, busy bigint[] DEFAULT '{}', without text[] DEFAULT '{}',
    since timestamptz DEFAULT '-infinity', OUT moment timestamptz, OUT fired integer,
    OUT met_special boolean, OUT left_due boolean, OUT busy_slots bigint[],
    OUT wait_seconds float8, OUT late_seconds float8
) LANGUAGE plpgsql
-- Timers come and go; whatever the statistics say, the right plan is the index.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    taken  events.timer[];
    slots  bigint[];
    free   bigint[];
    batch  jsonb;
BEGIN
    met_special := false; left_due := false; busy_slots := '{}';
    -- One at a time, so that timers are fired in the order in which they are due. All of this is
    -- one statement: whoever asked for it may die or hang and keep nobody waiting.
    IF NOT pg_try_advisory_xact_lock(hashtext('penstock timers'), 0) THEN
        RETURN;
    END IF;
    fired := 0;
    moment := clock_timestamp();
    SELECT array_agg(due.t ORDER BY (due.t).due_at, (due.t).timer_id) INTO taken FROM (
        SELECT t FROM events.timer t
         WHERE t.held_at IS NULL AND t.due_at BETWEEN since AND moment
           AND t.stream_name <> ALL (without)
           AND (t.key IS NULL OR events.timer_slot(t.stream_name, t.key) <> ALL (busy))
         ORDER BY t.due_at, t.timer_id
         LIMIT batch_size
           FOR UPDATE SKIP LOCKED
    ) AS due;
    IF taken IS NOT NULL THEN
        -- What recurs or is sealed takes more than SQL: up to the first of those, in order.
        SELECT coalesce(taken[:min(n) - 1], taken), count(*) > 0 INTO taken, met_special
          FROM unnest(taken) WITH ORDINALITY AS t(timer_id, stream_name, event_type, version, key,
               key_id, payload, metadata, due_at, schedule, generation, created_at, held_at,
               held_reason, n)
         WHERE t.schedule IS NOT NULL OR t.key_id IS NOT NULL OR EXISTS (
               SELECT 1 FROM events.stream_policy p
                WHERE p.stream_name = t.stream_name AND p.security_level = 'confidential');
        SELECT coalesce(array_agg(DISTINCT events.timer_slot(t.stream_name, t.key)), '{}')
          INTO slots FROM unnest(taken) AS t WHERE t.key IS NOT NULL;
        free := events.free_slots(slots);
        SELECT coalesce(array_agg(slot), '{}') INTO busy_slots
          FROM unnest(slots) AS slot WHERE slot <> ALL (free);
        SELECT jsonb_agg(jsonb_build_object(
                   'event_uuid', events.uuid7(), 'stream_name', t.stream_name,
                   'event_type', t.event_type, 'version', t.version, 'key', t.key,
                   'payload', t.payload,
                   'metadata', t.metadata || events.timer_metadata(t.timer_id, t.due_at)
               ) ORDER BY t.due_at, t.timer_id),
               extract(epoch FROM moment - min(greatest(t.due_at, t.created_at)))
          INTO batch, late_seconds FROM unnest(taken) AS t
         WHERE t.key IS NULL OR events.timer_slot(t.stream_name, t.key) = ANY (free);
    END IF;
    IF batch IS NOT NULL THEN
        DELETE FROM events.timer t
         WHERE t.timer_id = ANY (ARRAY(
               SELECT t.timer_id FROM unnest(taken) AS t
                WHERE t.key IS NULL OR events.timer_slot(t.stream_name, t.key) = ANY (free)));
        GET DIAGNOSTICS fired = ROW_COUNT;
        PERFORM events.send_many(batch);
    END IF;
    -- Apart: what is due and has to wait must not keep anybody from waking for what comes next.
    left_due := EXISTS (
        SELECT 1 FROM events.timer t
         WHERE t.held_at IS NULL AND t.due_at BETWEEN since AND moment
           AND t.stream_name <> ALL (without));
    SELECT greatest(extract(epoch FROM next.due_at - clock_timestamp()), 0) INTO wait_seconds FROM (
        SELECT t.due_at FROM events.timer t
         WHERE t.held_at IS NULL AND t.due_at > moment AND t.stream_name <> ALL (without)
         ORDER BY t.due_at LIMIT 1
    ) AS next;
END $$;
COMMENT ON FUNCTION events.fire_timers(integer, bigint[], text[], timestamptz) IS
    'Moves due timers into the outbox, in order, but none whose key is in busy or whose stream is '
    'in without, and none that were due before since. fired: NULL where somebody else is at it. met_special: the next one has to be '
    'prepared. left_due: some are due that were not fired. busy_slots: keys that others are '
    'sending with. wait_seconds: until the next is due; NULL where there is none.';

CREATE FUNCTION events.timer_metadata(timer_id text, due_at timestamptz) RETURNS jsonb
-- What an event says of the timer that it comes from.
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT jsonb_build_object(
        '__timer_id__', timer_id,
        '__timer_due_ms__', floor(extract(epoch FROM due_at) * 1000)::bigint)
$$;

CREATE FUNCTION events.due_timers(
    batch_size integer, busy bigint[] DEFAULT '{}', without text[] DEFAULT '{}',
    passed_by text[] DEFAULT '{}'
)
RETURNS TABLE (timer_id text, generation bigint, stream_name text, event_type text,
               version integer, key text, key_id text, payload text, metadata text,
               due_at timestamptz, schedule jsonb, moment timestamptz)
LANGUAGE sql VOLATILE
SET enable_seqscan = off SET jit = off AS $$
    -- Without a lock: what is made of them is compared by generation when it is fired.
    WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS moment)
    SELECT t.timer_id, t.generation, t.stream_name, t.event_type, t.version, t.key, t.key_id,
           -- Not every program can read a date before Christ.
           t.payload::text, t.metadata::text, greatest(t.due_at, '0002-01-01 00:00+00'),
           t.schedule, clock.moment
      FROM clock CROSS JOIN LATERAL (
           SELECT * FROM events.timer t
            WHERE t.held_at IS NULL AND t.due_at <= clock.moment
              AND t.stream_name <> ALL (without) AND t.timer_id <> ALL (passed_by)
              AND (t.key IS NULL OR events.timer_slot(t.stream_name, t.key) <> ALL (busy))
            ORDER BY t.due_at, t.timer_id
            LIMIT batch_size) AS t
     ORDER BY t.due_at, t.timer_id
$$;
COMMENT ON FUNCTION events.due_timers(integer, bigint[], text[], text[]) IS
    'Timers that are due, in order, to be prepared outside and fired with events.fire_prepared.';

CREATE FUNCTION events.fire_prepared(
    batch jsonb, OUT fired text[], OUT busy_slots bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
AS $$
DECLARE
    locked text[];
    free   bigint[];
    chosen jsonb;
BEGIN
    busy_slots := '{}';
    IF NOT pg_try_advisory_xact_lock(hashtext('penstock timers'), 0) THEN
        RETURN;
    END IF;
    fired := '{}';
    -- Only those that are still as they were read: a change since then has another generation.
    SELECT array_agg(same.timer_id) INTO locked FROM (
        SELECT t.timer_id
          FROM jsonb_to_recordset(batch) AS b(timer_id text, generation bigint)
          JOIN events.timer t ON t.timer_id = b.timer_id AND t.generation = b.generation
         WHERE t.held_at IS NULL AND t.due_at <= clock_timestamp()
           FOR UPDATE OF t SKIP LOCKED
    ) AS same;
    IF locked IS NULL THEN
        RETURN;
    END IF;
    WITH slots AS (
        SELECT DISTINCT events.timer_slot(e.stream_name, e.key) AS slot
          FROM jsonb_to_recordset(batch) AS b(timer_id text, events jsonb)
         CROSS JOIN jsonb_to_recordset(b.events) AS e(stream_name text, key text)
         WHERE b.timer_id = ANY (locked) AND e.key IS NOT NULL
    ), found AS (
        SELECT coalesce(array_agg(slot), '{}') AS every,
               events.free_slots(coalesce(array_agg(slot), '{}')) AS free
          FROM slots
    )
    SELECT found.free, ARRAY(SELECT unnest(every) EXCEPT SELECT unnest(found.free))
      INTO free, busy_slots FROM found;
    SELECT jsonb_agg(b.timer ORDER BY b.n) INTO chosen
      FROM jsonb_array_elements(batch) WITH ORDINALITY AS b(timer, n)
     WHERE b.timer ->> 'timer_id' = ANY (locked) AND NOT EXISTS (
           SELECT 1 FROM jsonb_to_recordset(b.timer -> 'events') AS e(stream_name text, key text)
            WHERE e.key IS NOT NULL
              AND events.timer_slot(e.stream_name, e.key) <> ALL (free));
    IF chosen IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM events.timer t
     USING jsonb_to_recordset(chosen) AS c(timer_id text, next_due_at timestamptz)
     WHERE t.timer_id = c.timer_id AND c.next_due_at IS NULL;
    UPDATE events.timer t SET due_at = c.next_due_at, generation = DEFAULT
      FROM jsonb_to_recordset(chosen) AS c(timer_id text, next_due_at timestamptz)
     WHERE t.timer_id = c.timer_id AND c.next_due_at IS NOT NULL;
    fired := ARRAY(SELECT c.timer_id FROM jsonb_to_recordset(chosen) AS c(timer_id text));
    PERFORM events.send_many(sent.batch) FROM (
        SELECT jsonb_agg(e.event ORDER BY c.n, e.n) AS batch
          FROM jsonb_array_elements(chosen) WITH ORDINALITY AS c(timer, n)
         CROSS JOIN jsonb_array_elements(c.timer -> 'events') WITH ORDINALITY AS e(event, n)
    ) AS sent WHERE sent.batch IS NOT NULL;
END $$;
COMMENT ON FUNCTION events.fire_prepared(jsonb) IS
    'Fires timers whose events were prepared outside: [{timer_id, generation, next_due_at, '
    'events}], in order. Those that changed since they were read are left alone. fired: the ids '
    'of those that were fired; NULL where somebody else is at it.';
