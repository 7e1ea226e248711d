-- name: variants
-- Every schema that was ever in use under a type and version, the newest first, and whether this
-- producer is known to send it to this stream with the schema that it has now.
SELECT c.schema_hash, CAST(c.json_schema AS text), c.registered_by, c.first_seen_at,
       EXISTS (SELECT 1 FROM events.contract_producer p
                WHERE p.stream_name = %(stream_name)s AND p.event_type = c.event_type
                  AND p.version = c.version AND p.producer = %(producer)s
                  AND p.schema_hash = c.schema_hash) AS is_producer_known
  FROM events.contract c
 WHERE c.event_type = %(event_type)s AND c.version = %(version)s
 ORDER BY c.first_seen_at DESC, c.schema_hash

-- name: record
-- See events.record_contract: it waits for nobody, since this is an application's transaction.
SELECT events.record_contract(
    %(stream_name)s, %(event_type)s, %(version)s, %(schema_hash)s,
    CAST(%(json_schema)s AS jsonb), %(producer)s,
    ARRAY(SELECT jsonb_array_elements_text(CAST(%(compared)s AS jsonb))))

-- name: catalogue
-- What is sent to a stream, or to any: the present schema of each type and version, and by whom.
SELECT p.stream_name,
       (SELECT c.json_schema FROM events.contract c
         WHERE c.event_type = p.event_type AND c.version = p.version
         ORDER BY c.first_seen_at DESC, c.schema_hash LIMIT 1) AS json_schema,
       array_agg(p.producer ORDER BY p.producer) AS producers
  FROM events.contract_producer p
 WHERE %(stream_name)s::text IS NULL OR p.stream_name = %(stream_name)s
 GROUP BY p.stream_name, p.event_type, p.version
 ORDER BY p.stream_name, p.event_type, p.version

-- name: readers
-- Who reads which stream, from this database and from others.
SELECT stream_name, name FROM events.consumer
UNION
SELECT stream_name, name FROM events.remote_consumer
 ORDER BY stream_name, name
