-- name: read
-- Of one stream or, for NULL, of all: a row each, members and all, for whatever driver asks.
SELECT p.stream_name, p.security_level, p.encryption_alg, p.kms_key_id, p.dek_rotation_days,
       p.active_key_version,
       CAST((SELECT jsonb_agg(jsonb_build_array(m.kind, m.name, m.role_name) ORDER BY m.name)
               FROM events.policy_member m WHERE m.stream_name = p.stream_name) AS text)
  FROM events.stream_policy p
 WHERE CAST(%(stream_name)s AS text) IS NULL OR p.stream_name = %(stream_name)s
 ORDER BY p.stream_name

-- name: lock
-- One change at a time: the second sees the first one's, and enforces both.
SELECT pg_advisory_xact_lock(hashtext('penstock policy'), 0)

-- name: limit_waiting
-- Whoever waits for the outbox's lock makes all senders behind it wait too.
SELECT set_config('lock_timeout', %(milliseconds)s::text, true)

-- name: write
-- Without the active key: whoever makes keys sets it.
INSERT INTO events.stream_policy
       (stream_name, security_level, encryption_alg, kms_key_id, dek_rotation_days)
VALUES (%(stream_name)s, %(security_level)s, %(encryption_alg)s, %(kms_key_id)s,
        %(dek_rotation_days)s)
ON CONFLICT (stream_name) DO UPDATE
   SET security_level = excluded.security_level, encryption_alg = excluded.encryption_alg,
       kms_key_id = excluded.kms_key_id, dek_rotation_days = excluded.dek_rotation_days,
       updated_at = clock_timestamp()

-- name: remove_members
-- All; those who stay are written again.
DELETE FROM events.policy_member WHERE stream_name = %(stream_name)s

-- name: add_member
-- One row for each name; its role, if any, is one that exists.
INSERT INTO events.policy_member (stream_name, kind, name, role_name)
VALUES (%(stream_name)s, %(kind)s, %(name)s, %(role_name)s)

-- name: apply
-- Triggers and row-level security, from the tables. See events.apply_policies.
SELECT events.apply_policies()

-- name: set_wrapping_key
-- Whoever makes the next data key asks this one.
UPDATE events.stream_policy SET kms_key_id = %(kms_key_id)s, updated_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s

-- name: unknown_roles
-- Of these, those that the server does not have.
SELECT name FROM unnest(%(names)s::text[]) AS name
 WHERE NOT EXISTS (SELECT 1 FROM pg_roles r WHERE r.rolname = name) ORDER BY name

-- name: passing_roles
-- Roles of which no policy keeps anything: they may number events, or bypass row-level security.
SELECT r.rolname FROM pg_roles r
 WHERE (has_table_privilege(r.oid, 'events.stream', 'UPDATE') OR r.rolbypassrls)
   AND NOT r.rolsuper AND r.rolname !~ '^pg_'
 ORDER BY r.rolname

-- name: administrators
-- Roles besides the owner's that could change what the policies say.
SELECT r.rolname FROM pg_roles r
 WHERE (has_table_privilege(r.oid, 'events.policy_member', 'INSERT, UPDATE, DELETE, TRUNCATE')
        OR has_table_privilege(r.oid, 'events.stream_policy', 'INSERT, UPDATE, DELETE, TRUNCATE'))
   AND NOT r.rolsuper AND r.rolname !~ '^pg_'
   AND r.oid <> (SELECT c.relowner FROM pg_class c
                  WHERE c.oid = 'events.policy_member'::regclass)
 ORDER BY r.rolname

-- name: record
-- In the transaction of the change itself, wherever there is one.
INSERT INTO events.policy_change (stream_name, change, changed_by)
VALUES (%(stream_name)s, %(change)s, %(changed_by)s)

-- name: changes
-- The latest first.
SELECT change, changed_by, role_name, changed_at FROM events.policy_change
 WHERE stream_name = %(stream_name)s ORDER BY id DESC LIMIT %(count)s

-- name: strangers
-- Who is known to send to a stream or to read it; some of them may not be named.
SELECT 'producer', p.producer FROM events.contract_producer p
 WHERE p.stream_name = %(stream_name)s
UNION
SELECT 'consumer', split_part(r.name, '@', 1) FROM events.reader r
 WHERE r.stream_name = %(stream_name)s AND r.kind IN ('consumer', 'remote consumer')
 ORDER BY 1 DESC, 2

-- name: keys
-- Every version, with what has become of it.
SELECT version, key_id, kms_key_id, created_at, shredded_at FROM events.data_key
 WHERE stream_name = %(stream_name)s ORDER BY version

-- name: rewrite_keys
-- An update leaves the former row in the file until something takes its place; this does not.
VACUUM (FULL) events.data_key

-- name: plaintext
-- What of a stream lies here unencrypted. An entry's eighth line is its key id. What is archived
-- was sent before its oldest key was made; objects are not looked into.
SELECT (SELECT count(*) FROM events.outbox_event o
         WHERE o.stream_name = %(stream_name)s AND o.key_id IS NULL),
       (SELECT count(*) FROM events.timer t
         WHERE t.stream_name = %(stream_name)s AND t.key_id IS NULL),
       (SELECT count(*) FROM events.parked_event p
         WHERE p.stream_name = %(stream_name)s AND split_part(p.entry, E'\n', 8) = ''),
       (SELECT count(*) FROM events.dead_letter d
         WHERE d.stream_name = %(stream_name)s AND split_part(d.entry, E'\n', 8) = ''),
       (SELECT coalesce(sum(a.events), 0)::bigint FROM events.archive_object a
         WHERE a.stream_name = %(stream_name)s
           AND a.planned_at < coalesce((SELECT min(k.created_at) FROM events.data_key k
                                         WHERE k.stream_name = a.stream_name),
                                       clock_timestamp()))

-- name: worker_grants
-- Printed for an administrator, never executed here. The server quotes the names.
SELECT format(statement, %(schema)s::text, %(role)s::text, current_database())
  FROM unnest(ARRAY[
       'GRANT CONNECT ON DATABASE %%3$I TO %%2$I;',
       'GRANT USAGE ON SCHEMA %%1$I TO %%2$I;',
       'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %%1$I TO %%2$I;',
       'REVOKE INSERT, UPDATE, DELETE ON %%1$I.stream_policy, %%1$I.policy_member, '
       '%%1$I.policy_change FROM %%2$I;',
       'GRANT UPDATE (active_key_version, updated_at) ON %%1$I.stream_policy TO %%2$I;'
  ]) AS statement

-- name: producer_grants
-- The same for an application that sends.
SELECT format(statement, %(schema)s::text, %(role)s::text, current_database())
  FROM unnest(ARRAY[
       'GRANT CONNECT ON DATABASE %%3$I TO %%2$I;',
       'GRANT USAGE ON SCHEMA %%1$I TO %%2$I;',
       'GRANT SELECT, INSERT ON %%1$I.outbox_event TO %%2$I;',
       'GRANT SELECT, INSERT, UPDATE, DELETE ON %%1$I.timer TO %%2$I;',
       'GRANT SELECT, INSERT, UPDATE ON %%1$I.contract, %%1$I.contract_producer TO %%2$I;',
       -- Commands such as `penstock send` look first whether the schema is their release's.
       'GRANT SELECT ON %%1$I.data_key, %%1$I.migration TO %%2$I;'
  ]) AS statement

-- name: consumer_grants
-- The same for those who look after a consumer: its parked events and dead letters, to read.
SELECT format(statement, %(schema)s::text, %(role)s::text)
  FROM unnest(ARRAY[
       'GRANT SELECT ON %%1$I.parked_event, %%1$I.dead_letter, %%1$I.data_key TO %%2$I;'
  ]) AS statement
