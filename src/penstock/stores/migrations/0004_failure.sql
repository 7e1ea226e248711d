-- Failure: parked keys, dead letters that people work with, effects outside of the database.

ALTER TABLE events.consumer
    ADD COLUMN ordering text NOT NULL DEFAULT 'key' CHECK (ordering IN ('key', 'stream', 'none'));
COMMENT ON COLUMN events.consumer.ordering IS
    'What waits behind a failing event: its key, the whole stream, or nothing.';

-- ── parked ────────────────────────────────────────────────────────────────────────────────────

ALTER TABLE events.parked_event
    ADD COLUMN depth        integer NOT NULL DEFAULT 1,
    ADD COLUMN history      jsonb   NOT NULL DEFAULT '[]',
    ADD COLUMN operation_id bigint;
COMMENT ON COLUMN events.parked_event.next_attempt_at IS
    'When to try. NULL: it waits behind an earlier event of its key, or is held. A time that is '
    'early does no harm, since only the first event of a key is tried; a missing one would.';
COMMENT ON COLUMN events.parked_event.held IS
    'Its attempts are exhausted, and its key waits until somebody redrives or discards it.';
COMMENT ON COLUMN events.parked_event.depth IS
    'Counts on from the event before it in its key, so that how many wait is a subtraction.';
COMMENT ON COLUMN events.parked_event.history IS 'The attempts so far: when, where, what error.';
COMMENT ON COLUMN events.parked_event.operation_id IS
    'The redrive that put it here: it has one attempt, then it is a dead letter again.';
-- One row for each key, however many events wait behind it.
CREATE INDEX parked_event_head ON events.parked_event (consumer, key_hash)
    WHERE next_attempt_at IS NOT NULL OR held;
CREATE INDEX parked_event_operation ON events.parked_event (operation_id)
    WHERE operation_id IS NOT NULL;

CREATE FUNCTION events.promote_parked(
    of_consumer text, key_hashes bigint[], leaving bigint[] DEFAULT '{}'
) RETURNS bigint LANGUAGE sql AS $$
    WITH promoted AS (
        UPDATE events.parked_event p SET next_attempt_at = clock_timestamp()
          FROM (SELECT DISTINCT unnest(key_hashes) AS key_hash) AS k
         CROSS JOIN LATERAL (
               SELECT q.position FROM events.parked_event q
                WHERE q.consumer = of_consumer AND q.key_hash = k.key_hash
                  AND q.position <> ALL (leaving)
                ORDER BY q.position LIMIT 1) AS next
         WHERE p.consumer = of_consumer AND p.position = next.position
           AND p.next_attempt_at IS NULL AND NOT p.held
        RETURNING 1)
    SELECT count(*) FROM promoted
$$;
COMMENT ON FUNCTION events.promote_parked(text, bigint[], bigint[]) IS
    'The first event of each key, those that leave aside, is due now. In the transaction that '
    'removes the one before it.';

-- ── dead letters ──────────────────────────────────────────────────────────────────────────────

CREATE TABLE events.operation (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text        NOT NULL CHECK (kind IN ('redrive', 'discard', 'release')),
    consumer     text,
    criteria     jsonb       NOT NULL DEFAULT '{}',
    requested_by text        NOT NULL,
    reason       text        NOT NULL DEFAULT '',
    events       bigint      NOT NULL DEFAULT 0,
    failed       bigint      NOT NULL DEFAULT 0,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    ended_as     text        CHECK (ended_as IN ('done', 'stopped', 'interrupted'))
);
COMMENT ON TABLE events.operation IS
    'What operators did to dead letters and parked events: who, when, why, to how many.';

CREATE TABLE events.operation_event (
    operation_id bigint NOT NULL REFERENCES events.operation ON DELETE CASCADE,
    consumer     text   NOT NULL,
    event_uuid   uuid   NOT NULL,
    position     bigint NOT NULL,
    PRIMARY KEY (operation_id, event_uuid, consumer)
);
COMMENT ON TABLE events.operation_event IS 'Which events an operation touched.';
CREATE INDEX operation_event_uuid ON events.operation_event (event_uuid);

ALTER TABLE events.dead_letter
    ADD COLUMN operation_id bigint,
    ADD COLUMN redrives     integer NOT NULL DEFAULT 0;
COMMENT ON COLUMN events.dead_letter.operation_id IS
    'The last redrive of this letter that failed. It is on its way while it is parked too.';
COMMENT ON COLUMN events.dead_letter.redrives IS 'How often it was redriven in vain.';
COMMENT ON COLUMN events.dead_letter.reason IS
    'Why it was buried: exhausted, fatal, contract, crash or interrupted.';
CREATE INDEX dead_letter_position ON events.dead_letter (consumer, position);
CREATE INDEX dead_letter_operation ON events.dead_letter (operation_id)
    WHERE operation_id IS NOT NULL;

-- ── effects and the inbox ─────────────────────────────────────────────────────────────────────

CREATE TABLE events.effect (
    consumer    text        NOT NULL,
    event_uuid  uuid        NOT NULL,
    effect      text        NOT NULL CHECK (length(effect) BETWEEN 1 AND 200),
    call_id     text,
    is_done     boolean     NOT NULL DEFAULT false,
    result      jsonb,
    calls       integer     NOT NULL DEFAULT 1,
    host        text        NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_at     timestamptz,
    PRIMARY KEY (consumer, event_uuid, effect)
);
COMMENT ON TABLE events.effect IS
    'Calls to the outside by context.once. Begun and not done: nobody knows whether it happened.';
CREATE INDEX effect_age ON events.effect (started_at);

CREATE TABLE events.inbox_event (
    consumer    text        NOT NULL CHECK (length(consumer) BETWEEN 1 AND 200),
    event_id    text        NOT NULL CHECK (length(event_id) BETWEEN 1 AND 500),
    handled_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, event_id)
);
COMMENT ON TABLE events.inbox_event IS
    'What penstock.inbox.claim has seen: webhooks and messages of other buses.';
CREATE INDEX inbox_event_age ON events.inbox_event (handled_at);
