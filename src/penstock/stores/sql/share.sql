-- name: origin
-- Asked by another service: who numbers this stream, and whether anybody does. Before its first
-- event, who would.
SELECT coalesce(s.origin, o.id)::text, s.name IS NOT NULL
  FROM events.origin o LEFT JOIN events.stream s ON s.name = %(stream_name)s

-- name: record
-- See events.record_remote_checkpoint: the one thing that a reader of another service may write.
SELECT events.record_remote_checkpoint(%(consumer)s, %(stream_name)s, %(checkpoint)s,
                                       %(generation)s)

-- name: grants
-- Printed for an administrator, never executed here. The server quotes the names.
SELECT format(statement, %(schema)s::text, %(role)s::text, current_database())
  FROM unnest(ARRAY[
       'GRANT CONNECT ON DATABASE %%3$I TO %%2$I;',
       'GRANT USAGE ON SCHEMA %%1$I TO %%2$I;',
       'GRANT SELECT ON %%1$I.outbox_event, %%1$I.stream, %%1$I.hole, %%1$I.origin, '
       '%%1$I.mac_key, %%1$I.data_key TO %%2$I;',
       'GRANT EXECUTE ON FUNCTION %%1$I.entry(%%1$I.outbox_event, uuid), '
       '%%1$I.hole_entry(%%1$I.hole, uuid), '
       '%%1$I.read_entries(text, bigint, integer) TO %%2$I;',
       'GRANT EXECUTE ON FUNCTION '
       '%%1$I.record_remote_checkpoint(text, text, bigint, bigint) TO %%2$I;']) AS statement

-- name: streams
-- Own streams and those of other services, each with how far it is.
SELECT s.name, false, s.origin::text, s.head, s.published, NULL::timestamptz
  FROM events.stream s
UNION ALL
SELECT f.stream_name, true,
       (SELECT min(c.origin::text) FROM events.consumer c WHERE c.stream_name = f.stream_name),
       f.head, f.head, f.seen_at
  FROM events.source f
 ORDER BY 1

-- name: readers
-- Who reads them, here and elsewhere.
SELECT r.stream_name, r.name, r.kind, r.position, remote.seen_at
  FROM events.reader r
  LEFT JOIN events.remote_consumer remote
    ON r.kind = 'remote consumer' AND remote.name = r.name AND remote.stream_name = r.stream_name
 WHERE r.kind IN ('consumer', 'remote consumer')
 ORDER BY r.stream_name, r.kind, r.name

-- name: remote_consumers
-- By name; one may read several streams.
SELECT name, stream_name, checkpoint, seen_at,
       extract(epoch FROM clock_timestamp() - seen_at)::float8
  FROM events.remote_consumer ORDER BY name, stream_name

-- name: forget_remote
-- Pruning waits for it no longer. One that lives enters itself again.
DELETE FROM events.remote_consumer WHERE name = %(consumer)s
