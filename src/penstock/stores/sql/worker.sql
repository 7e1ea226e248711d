-- name: has_suspect
-- A start that was recorded and never finished: the event, not the worker, is to blame.
SELECT EXISTS (SELECT 1 FROM events.suspect WHERE worker_id = %(worker_id)s)

-- name: read_clock
-- Deployments are ordered by the one clock that all hosts share.
SELECT clock_timestamp()
