-- The claim of a batch as a function: the server keeps the plans of its statements, so that a
-- worker need not prepare it under a name that others may remove, or a pooler lose.

CREATE FUNCTION events.claim_batch(
    seal_id bigint, who text, of_stream text, lease_role text, epoch_group text,
    event_uuids uuid[], positions bigint[], outcomes text[],
    OUT fresh bigint[], OUT waiting bigint[]
) LANGUAGE plpgsql AS $$
BEGIN
    -- First the locks by which a successor in the lane, or a later epoch, finds this backend.
    PERFORM pg_advisory_xact_lock_shared(
        hashtext('penstock lane'), hashtext(of_stream || ' ' || lease_role));
    PERFORM pg_advisory_xact_lock_shared(
        hashtext('penstock epoch'), hashtext(of_stream || ' ' || epoch_group));
    -- Then the deduplication rows, of which those that come back are new; then the seal, which
    -- forbids any COMMIT but the worker's and remembers how many were new. Parked ones are not:
    -- they wait.
    WITH entered AS (
        INSERT INTO events.processed_event AS p (consumer, event_uuid, position, outcome)
        SELECT who, e.event_uuid, e.position, e.outcome
          FROM unnest(event_uuids, positions, outcomes) AS e(event_uuid, position, outcome)
            ON CONFLICT DO NOTHING
        RETURNING p.position, p.outcome
    ), seal AS (
        INSERT INTO events.seal (id, fresh)
        SELECT seal_id, count(*) FROM entered e WHERE e.outcome <> 'parked'
    )
    SELECT ARRAY(SELECT e.position FROM entered e WHERE e.outcome <> 'parked'),
           ARRAY(SELECT e.position FROM entered e WHERE e.outcome = 'parked')
      INTO fresh, waiting;
END
$$;
COMMENT ON FUNCTION events.claim_batch IS
    'Begins a batch: enters its events as settled, unless they are, and seals the transaction. '
    'Returns the positions that are new, and those that wait behind a parked one.';
