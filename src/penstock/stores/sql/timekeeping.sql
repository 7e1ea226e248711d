-- name: fire
-- Everything happens in this one statement, so that a scheduler that dies or hangs in the middle
-- keeps neither a lock nor half a firing.
SELECT moment, fired, met_special, left_due, busy_slots, wait_seconds, late_seconds
  FROM events.fire_timers(%(batch_size)s, %(busy)s::bigint[], %(without)s::text[],
                          coalesce(%(since)s::timestamptz, '-infinity'))

-- name: read_due
-- Read without a lock, because preparing may take a KMS; what is fired is compared by generation.
SELECT timer_id, generation, stream_name, event_type, version, key, key_id, payload, metadata,
       due_at, schedule::text, moment
  FROM events.due_timers(%(batch_size)s, %(busy)s::bigint[], %(without)s::text[],
                         %(passed_by)s::text[])

-- name: fire_prepared
-- The other half of read_due, again in one statement.
SELECT fired, busy_slots FROM events.fire_prepared(%(batch)s::jsonb)

-- name: hold
-- Only as it was read, and without waiting: whoever is changing it may be mending it.
UPDATE events.timer t SET held_at = clock_timestamp(), held_reason = %(reason)s
 WHERE t.timer_id IN (
       SELECT s.timer_id FROM events.timer s
        WHERE s.timer_id = %(timer_id)s AND s.generation = %(generation)s AND s.held_at IS NULL
          FOR UPDATE SKIP LOCKED)

-- name: listen
-- Whoever schedules notifies here, with an empty payload, and only while somebody sleeps.
LISTEN events_timer

-- name: notify
-- A connection hears itself and others alike; a transaction pooler hears nothing.
SELECT pg_notify('events_timer', '')

-- name: try_be_first
-- For the session: the first scheduler wakes when a timer is due, the others a little later.
SELECT pg_try_advisory_lock(hashtext('penstock timers'), 2)

-- name: try_hold
-- The sleeper's half of the agreement in events.wake_for_timer. Where it cannot be had, a shared
-- one tells why: it fails too behind another sleeper, and not behind an undecided transaction.
SELECT CASE WHEN pg_try_advisory_lock(hashtext('penstock timers'), 1) THEN 'held'
            WHEN pg_try_advisory_lock_shared(hashtext('penstock timers'), 1) THEN 'undecided'
            ELSE 'taken' END

-- name: let_go
-- Whoever schedules need not notify any more.
SELECT pg_advisory_unlock(hashtext('penstock timers'), 1)

-- name: let_go_shared
-- The shared one was only asked for to learn something.
SELECT pg_advisory_unlock_shared(hashtext('penstock timers'), 1)
