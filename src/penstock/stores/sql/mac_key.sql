-- name: read
-- The latest first: it signs. The others verify what they have signed.
SELECT key_id, secret FROM events.mac_key ORDER BY created_at DESC, key_id

-- name: add
-- See events.add_mac_key.
SELECT events.add_mac_key()

-- name: retire
-- Everything but the latest.
DELETE FROM events.mac_key k
 WHERE EXISTS (SELECT 1 FROM events.mac_key later WHERE later.created_at > k.created_at)
RETURNING k.key_id
