-- name: slot
-- The channel on which the stream's senders tell that they have sent something. NULL where the role
-- may not lock a stream's row, and so could not wait for a numbering.
SELECT hashtext(%(stream_name)s) & 255 WHERE has_table_privilege('events.stream', 'UPDATE')

-- name: claim_early
-- See events.claim_early: the claim of what will follow a position that is the last one.
SELECT events.claim_early(%(seal_id)s, %(consumer)s, %(stream_name)s, %(role)s, %(epoch_group)s,
                          %(after)s)

-- name: require_numbered
-- See events.require_numbered: what was foreseen has come to pass.
SELECT events.require_numbered(%(stream_name)s, %(position)s, %(event_uuid)s)
