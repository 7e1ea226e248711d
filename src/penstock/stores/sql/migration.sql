-- name: prepare
-- Whoever comes second waits as long as it takes, whatever its role is set to; but not after it
-- was killed, where the server can see that.
SELECT set_config('lock_timeout', '0', true),
       CASE WHEN version() LIKE '%linux%'
            THEN set_config('client_connection_check_interval', '1s', true) END

-- name: lock
-- One migration at a time, whoever starts it.
SELECT pg_advisory_xact_lock(hashtext('penstock migrate'), 0)

-- name: limit_waiting
-- Everybody else queues behind a table lock that is waited for. Longer than deadlock_timeout, when
-- PostgreSQL sends an autovacuum out of the way.
SET LOCAL lock_timeout = '2s'

-- name: own_pid
-- Behind a pooler every transaction may have another one.
SELECT pg_backend_pid()

-- name: blockers
-- Whom a session waits for: who holds a lock, and who is ahead in the queue. 0 stands for
-- a prepared transaction.
SELECT pid, coalesce(nullif(application_name, ''), 'no name'), coalesce(usename, 'nobody')
  FROM unnest(pg_blocking_pids(%(pid)s)) AS pid LEFT JOIN pg_stat_activity USING (pid)
 ORDER BY pid

-- name: inspect
-- A schema without our history table belongs to somebody else.
SELECT to_regnamespace(%(schema)s) IS NOT NULL,
       to_regclass(%(schema)s || '.migration') IS NOT NULL

-- name: create
-- The history comes first, so that a schema is always recognisable as ours.
CREATE SCHEMA events;
CREATE TABLE events.migration (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: history
-- Checksums tell a file that was changed after it was applied.
SELECT version, checksum FROM events.migration ORDER BY version

-- name: record
-- In the migration's own transaction.
INSERT INTO events.migration (version, name, checksum)
VALUES (%(version)s, %(name)s, %(checksum)s)

-- name: record_literal
-- The same for a printed script; the values come from this release's own files.
INSERT INTO events.migration (version, name, checksum)
VALUES ({version}, '{name}', '{checksum}');
