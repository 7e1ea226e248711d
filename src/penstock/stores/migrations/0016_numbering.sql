-- As before, except where a row is deleted by hand between its choice and its numbering: the others
-- kept their numbers and the head did not, so that a position was missing and the last one was given
-- out twice.
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
    last_position bigint;
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
    SELECT o.id, o.position INTO last_id, last_position FROM events.outbox_event o
     WHERE o.stream_name = of_stream AND o.position > s.head
     ORDER BY o.position DESC LIMIT 1;
    IF last_position <> s.head + numbered THEN
        -- Nothing of it is kept; the next round numbers what is left.
        RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE =
            format('rows of the outbox of %s went away while they were numbered', of_stream);
    END IF;
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
