-- name: lock
-- One migration at a time, whoever starts it.
SELECT pg_advisory_xact_lock(hashtext('penstock migrate'), 0)

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
