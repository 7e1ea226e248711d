-- name: read
-- All versions of a stream. As text: drivers disagree about what bytea is.
SELECT version, key_id, encode(wrapped_key, 'hex'), kms_key_id
  FROM events.data_key
 WHERE stream_name = %(stream_name)s
 ORDER BY version

-- name: read_for_sending
-- The secret that keys are hashed with, and the key that seals from now on.
SELECT version, key_id, encode(wrapped_key, 'hex'), kms_key_id
  FROM events.data_key
 WHERE stream_name = %(stream_name)s AND version IN (0, %(version)s)
 ORDER BY version

-- name: read_all
-- What is to be copied beside the streams of this database.
SELECT stream_name, version, key_id, encode(wrapped_key, 'hex'), kms_key_id
  FROM events.data_key
 ORDER BY stream_name, version

-- name: insert
-- Somebody else may have made this version first; then that one holds.
INSERT INTO events.data_key
       (key_id, stream_name, version, wrapped_key, kms_key_id, head_at_creation)
VALUES (%(key_id)s, %(stream_name)s, %(version)s, %(wrapped)s, %(kms_key_id)s,
        coalesce((SELECT head FROM events.stream WHERE name = %(stream_name)s), 0))
ON CONFLICT (stream_name, version) DO NOTHING
RETURNING version

-- name: lock_policy
-- Those who rotate, one after another. Senders only read, and do not wait.
SELECT kms_key_id, active_key_version
  FROM events.stream_policy
 WHERE stream_name = %(stream_name)s AND security_level = 'confidential'
   FOR UPDATE

-- name: activate
-- From now on this version seals. Never back to an older one, which may be shredded tomorrow.
UPDATE events.stream_policy
   SET active_key_version = %(version)s, updated_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s
   AND coalesce(active_key_version, 0) < %(version)s

-- name: rewrap
-- Only what is as it was read: a key that was shredded meanwhile does not come back.
UPDATE events.data_key
   SET wrapped_key = %(wrapped)s, kms_key_id = %(kms_key_id)s
 WHERE key_id = %(key_id)s AND wrapped_key = %(former)s
RETURNING version

-- name: await_senders
-- Whoever has stored an event under this key holds its lock until COMMIT, and is waited for here:
-- afterwards nobody's event is sealed with a key that is gone. See events.refuse_dead_key.
SELECT pg_advisory_xact_lock(hashtext('penstock data key'), hashtext(%(key_id)s))

-- name: shred
-- The row stays: without it, a shredded key could not be told from one that has not arrived yet.
UPDATE events.data_key
   SET wrapped_key = NULL, shredded_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s AND version = %(version)s AND wrapped_key IS NOT NULL
RETURNING key_id

-- name: due_for_rotation
-- Confidential streams whose key has served its time, or too many events: each random nonce makes
-- it a little likelier that two are equal, which AES-GCM does not forgive.
SELECT p.stream_name
  FROM events.stream_policy p
  JOIN events.data_key k ON k.stream_name = p.stream_name AND k.version = p.active_key_version
  LEFT JOIN events.stream s ON s.name = p.stream_name
 WHERE p.security_level = 'confidential'
   AND (k.created_at < clock_timestamp() - make_interval(days => p.dek_rotation_days)
        OR coalesce(s.head, 0) - k.head_at_creation >= %(events_max)s)
 ORDER BY p.stream_name
