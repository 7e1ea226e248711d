-- name: slot
-- The channel on which the stream's senders tell that they have sent something.
SELECT hashtext(%(stream_name)s) & 255

-- name: foresee
-- See events.foresee: what will follow a position that is the last one.
SELECT events.foresee(%(stream_name)s, %(after)s)
