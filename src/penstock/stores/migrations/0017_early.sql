-- A consumer with nothing to do may begin with an event before it has its position.

-- As before, and tells consumers of the stream too: they listen on its slot's own channel, so that
-- a word is heard by few.
CREATE OR REPLACE FUNCTION events.send_many(batch jsonb) RETURNS integer LANGUAGE plpgsql AS $$
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
    PERFORM pg_notify('events_outbox_insert', ''), pg_notify('events_sent_' || streams.slot, '')
       FROM (
        SELECT DISTINCT hashtext(e.stream_name) & 255 AS slot
          FROM jsonb_to_recordset(batch) AS e(stream_name text)
    ) AS streams
     WHERE NOT pg_try_advisory_xact_lock_shared(hashtext('penstock wake-up'), streams.slot);
    RETURN inserted;
END $$;

CREATE FUNCTION events.foresee(of_stream text, after bigint) RETURNS text
LANGUAGE plpgsql STABLE
-- As in events.number_events, which takes the same row.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
    s events.stream;
    o events.outbox_event;
BEGIN
    SELECT * INTO s FROM events.stream WHERE name = of_stream AND head = after;
    IF FOUND THEN
        SELECT * INTO o FROM events.outbox_event u
         WHERE (u.stream_name, u.id) > (of_stream, s.id_floor) AND u.stream_name <= of_stream
           AND u.position IS NULL
         ORDER BY u.stream_name, u.id LIMIT 1;
        -- No publisher has numbered it, in any term.
        o.term := 0;
    END IF;
    RETURN events.entry(o, s.origin);
END $$;
COMMENT ON FUNCTION events.foresee(text, bigint) IS
    'The event that will most likely follow a position, where that is the last one; else NULL. '
    'Whoever begins with it must see it there before anything is committed.';
