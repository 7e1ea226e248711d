-- name: lock
-- One number and not two: a space of its own, apart from all other locks of Penstock. Whoever does
-- not get it is told at once instead of waiting for a stranger's transaction. Given back when the
-- transaction, or the savepoint that took it, ends.
SELECT pg_try_advisory_xact_lock(%(number)s::bigint)

-- name: insert
-- A statement of its own, after the lock: its snapshot then holds whatever the holder before us has
-- committed. No row comes back where the event is there already. Under an older snapshot
-- (REPEATABLE READ) PostgreSQL refuses instead, so nobody slips through.
INSERT INTO events.inbox_event (consumer, event_id)
VALUES (%(consumer)s, %(event_id)s)
ON CONFLICT DO NOTHING
RETURNING true

-- name: lock_sqlalchemy
-- The same in SQLAlchemy's notation, which every driver understands.
SELECT pg_try_advisory_xact_lock(CAST(:number AS bigint))

-- name: insert_sqlalchemy
-- The same in SQLAlchemy's notation.
INSERT INTO events.inbox_event (consumer, event_id)
VALUES (CAST(:consumer AS text), CAST(:event_id AS text))
ON CONFLICT DO NOTHING
RETURNING true
