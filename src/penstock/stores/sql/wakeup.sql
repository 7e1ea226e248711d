-- name: listen
-- Senders notify here, with an empty payload, and only while the publisher sleeps.
LISTEN events_outbox_insert

-- name: notify
-- A connection hears itself and others alike; a transaction pooler hears nothing.
SELECT pg_notify('events_outbox_insert', '')

-- name: try_hold
-- The sleeping publisher's half of the agreement in events.send_many: exclusive, for the session.
-- False where a sender has not decided yet, or another publisher sleeps on the same slot.
SELECT bool_and(pg_try_advisory_lock(hashtext('penstock wake-up'), slots.slot))
  FROM (SELECT DISTINCT hashtext(name) & 255 AS slot
          FROM unnest(%(stream_names)s::text[]) AS name) AS slots

-- name: let_go
-- The connection is the sleeper's own, so every lock of its session is one of ours.
SELECT pg_advisory_unlock_all()

-- name: listen_for_numbers
-- Where there is no hot log, this tells consumers that the outbox has something new for them.
LISTEN events_numbered
