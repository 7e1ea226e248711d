-- name: lock
-- The first statement of a timer's transaction. The number is the inbox's own, so that whoever
-- claims the same event by hand is met here too. Whoever does not get it is told at once: the
-- holder may still roll back, so the timer is not done, and nobody waits for a stranger.
SELECT pg_try_advisory_xact_lock(%(number)s::bigint)

-- name: enter
-- A statement of its own, after the lock: its snapshot holds what the holder before us committed.
-- The seal forbids everybody but the worker to commit this transaction; it comes only with a row.
WITH entered AS (
    INSERT INTO events.inbox_event (consumer, event_id)
    VALUES (%(consumer)s, %(event_id)s)
    ON CONFLICT DO NOTHING
    RETURNING true
), sealed AS (
    INSERT INTO events.seal (id, fresh) SELECT %(seal_id)s, 1 FROM entered
)
SELECT count(*) FROM entered

-- name: unseal
-- The last statement before COMMIT, in one round trip with it. Without its seal the transaction is
-- not the one that claimed the timer (somebody has ended that), and the division by zero fails it.
WITH unsealed AS (
    DELETE FROM events.seal WHERE id = %(seal_id)s RETURNING true
)
SELECT 1 / count(*) FROM unsealed
