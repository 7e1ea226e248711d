-- What both sides write, and the tables of the side that works event by event.

CREATE SCHEMA bench;

-- The effect: one row per event.
CREATE TABLE bench.ledger (
    id           bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id      bigint  NOT NULL,
    email        text    NOT NULL,
    amount_cents bigint  NOT NULL
);

CREATE TABLE bench.outbox_event (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid   uuid        NOT NULL UNIQUE,
    event_type   text        NOT NULL,
    payload      jsonb       NOT NULL,
    metadata     jsonb       NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at timestamptz
);
CREATE INDEX outbox_event_unpublished ON bench.outbox_event (id) WHERE published_at IS NULL;

CREATE TABLE bench.processed_event (
    consumer     text        NOT NULL,
    event_uuid   uuid        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, event_uuid)
);

CREATE TABLE bench.checkpoint (
    consumer text PRIMARY KEY,
    entry_id text NOT NULL
);

-- Tells the measuring process that an effect is committed; attached only where latency is measured.
CREATE FUNCTION bench.announce_effect() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NOTIFY bench_effect;
    RETURN NULL;
END $$;
