-- name: parameters
-- What the server was told that the promises depend on, as connections of this role begin.
SELECT name, reset_val FROM pg_settings
 WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'autovacuum',
                'default_transaction_isolation', 'default_transaction_read_only',
                'statement_timeout', 'idle_in_transaction_session_timeout',
                'transaction_timeout', 'idle_session_timeout', 'lock_timeout',
                'max_connections', 'superuser_reserved_connections', 'server_encoding')

-- name: surroundings
-- Its version, its clock, whether it only follows another server, and how full it is.
SELECT current_setting('server_version'), clock_timestamp(), pg_is_in_recovery(),
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')

-- name: privileges
-- What a worker needs and this role lacks.
SELECT needed.name || ' ' || right_name
  FROM unnest(ARRAY['outbox_event', 'stream', 'stream_lease', 'consumer', 'processed_event',
                    'parked_event', 'dead_letter', 'timer', 'seal', 'worker']) AS needed(name)
 CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_name
 WHERE NOT has_table_privilege(format('%%I.%%I', %(schema)s::text, needed.name), right_name)
 ORDER BY 1

-- name: indexes
-- The indexes that are there; one that was left invalid by a broken CREATE INDEX CONCURRENTLY is
-- not used.
SELECT c.relname, i.indisvalid
  FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s

-- name: long_transactions
-- They hold back vacuum, the numbering of what they sent, and the id floor.
SELECT pid, coalesce(application_name, ''), state,
       extract(epoch FROM clock_timestamp() - xact_start)::float8
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND xact_start < clock_timestamp() - make_interval(secs => %(seconds)s)
 ORDER BY xact_start
 LIMIT 20

-- name: prepared_transactions
-- A transaction that was prepared and forgotten holds its locks for ever.
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8
  FROM pg_prepared_xacts
 WHERE database = current_database()
   AND prepared < clock_timestamp() - make_interval(secs => %(seconds)s)
 LIMIT 20

-- name: abandoned
-- Consumers that nobody serves and that are behind, of this database and of others: the outbox is
-- not pruned ahead of them.
SELECT c.name, s.head - place.checkpoint,
       extract(epoch FROM clock_timestamp() - place.updated_at)::float8, false
  FROM events.consumer c
  JOIN events.stream s ON s.name = c.stream_name
 CROSS JOIN LATERAL (
       SELECT min(l.checkpoint) AS checkpoint, max(l.updated_at) AS updated_at
         FROM events.stream_lease l
        WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
          AND split_part(l.role, '/', 1) = 'consumer:' || c.name) AS place
 WHERE c.paused_at IS NULL AND place.checkpoint < s.head
   AND place.updated_at < clock_timestamp() - make_interval(secs => %(seconds)s)
   AND NOT EXISTS (SELECT 1 FROM events.worker w
                    WHERE w.consumer = c.name AND w.alive_until > clock_timestamp())
 UNION ALL
SELECT r.name, s.head - r.checkpoint,
       extract(epoch FROM clock_timestamp() - r.seen_at)::float8, true
  FROM events.remote_consumer r
  JOIN events.stream s ON s.name = r.stream_name
 WHERE r.checkpoint < s.head
   AND r.seen_at < clock_timestamp() - make_interval(secs => %(seconds)s)
 ORDER BY 1
