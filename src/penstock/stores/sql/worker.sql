-- name: has_suspect
-- A start that was recorded and never finished: the event, not the worker, is to blame.
SELECT EXISTS (SELECT 1 FROM events.suspect WHERE worker_id = %(worker_id)s)

-- name: is_server_read_only
-- What a handler has set for its session is its own doing, and has its own source.
SELECT pg_is_in_recovery()
    OR EXISTS (SELECT 1 FROM pg_settings
                WHERE name = 'default_transaction_read_only' AND setting = 'on'
                  AND source <> 'session')

-- name: read_clock
-- Deployments are ordered by the one clock that all hosts share.
SELECT clock_timestamp()
