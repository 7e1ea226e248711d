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

CREATE FUNCTION events.claim_early(
    seal_id bigint, who text, of_stream text, lease_role text, epoch_group text, after bigint
) RETURNS text
LANGUAGE plpgsql
-- As in events.number_events, which takes the same row.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
    s events.stream;
    o events.outbox_event;
BEGIN
    SELECT * INTO s FROM events.stream WHERE name = of_stream AND head = after;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO o FROM events.outbox_event u
     WHERE (u.stream_name, u.id) > (of_stream, s.id_floor) AND u.stream_name <= of_stream
       AND u.position IS NULL
     ORDER BY u.stream_name, u.id LIMIT 1;
    -- For a key a KMS may have to be asked, which is not for the middle of a transaction.
    IF NOT FOUND OR o.key_id IS NOT NULL THEN
        RETURN NULL;
    END IF;
    IF (events.claim_batch(seal_id, who, of_stream, lease_role, epoch_group,
                           ARRAY[o.event_uuid], ARRAY[after + 1], ARRAY['handled'])).fresh = '{}' THEN
        RETURN NULL;
    END IF;
    -- No publisher has numbered it, in any term.
    o.term := 0;
    RETURN events.entry(o, s.origin);
END $$;
COMMENT ON FUNCTION events.claim_early(bigint, text, text, text, text, bigint) IS
    'Begins with the event that will most likely follow the stream''s last one: enters it as '
    'handled at that place, seals the transaction, and returns it; NULL where there is none that is '
    'new and plain. events.require_numbered has to be asked before COMMIT.';

CREATE FUNCTION events.await_numbering(of_stream text) RETURNS void LANGUAGE plpgsql
-- A numbering that takes longer than this is not worth waiting for.
SET lock_timeout = '50ms'
AS $$
BEGIN
    PERFORM FROM events.stream WHERE name = of_stream FOR KEY SHARE;
END $$;

CREATE FUNCTION events.require_numbered(of_stream text, at bigint, of_event uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    FOR look IN 1..2 LOOP
        IF EXISTS (SELECT FROM events.outbox_event o
                    WHERE o.stream_name = of_stream AND o.position = at
                      AND o.event_uuid = of_event) THEN
            RETURN;
        END IF;
        IF look = 1 THEN
            PERFORM events.await_numbering(of_stream);
        END IF;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'PS006', MESSAGE =
        format('event %s is not at position %s of %s, or not yet', of_event, at, of_stream);
END $$;
COMMENT ON FUNCTION events.require_numbered(text, bigint, uuid) IS
    'Raises unless the event has this position, durably: a numbering under way is waited for. '
    'The lock that this takes is that of the stream''s row, and ends with the transaction.';
