-- name: limit_waiting
-- Whoever changes the books waits for running batches, but not for a hung one.
SELECT set_config('lock_timeout', %(lock_timeout)s, true)

-- name: names
-- Every consumer that this database knows.
SELECT name FROM events.consumer ORDER BY name

-- name: lock_consumer
-- First this row, then its lanes: whoever changes epochs or names takes them in this order.
SELECT stream_name, start_position, lanes, epoch
  FROM events.consumer
 WHERE name = %(consumer)s
   FOR UPDATE

-- name: lock_lanes
-- A statement of its own, after the consumer's row: rows are seen as their last holder left them.
-- A batch that commits now finishes first; from here on no fence of these lanes can pass.
SELECT epoch, checkpoint, owner_id IS NOT NULL AND lease_until > clock_timestamp()
  FROM events.stream_lease
 WHERE stream_name = %(stream_name)s AND split_part(role, '/', 1) = 'consumer:' || %(consumer)s
 ORDER BY role
   FOR UPDATE

-- name: workers_alive
-- A worker that waits for a lane holds none, and would take one a moment later.
SELECT host, pid FROM events.worker
 WHERE consumer = %(consumer)s AND alive_until > clock_timestamp()
 ORDER BY host, pid

-- name: replays
-- They call the handler of a consumer under its name.
SELECT name FROM events.consumer WHERE replay_of = %(consumer)s ORDER BY name

-- name: lanes_held
-- What a pause waits for: lanes that somebody may still work on.
SELECT count(*)
  FROM events.consumer c
  JOIN events.stream_lease l
    ON l.stream_name = c.stream_name AND split_part(l.role, '/', 1) = 'consumer:' || c.name
 WHERE c.name = ANY(%(consumers)s)
   AND l.owner_id IS NOT NULL AND l.lease_until > clock_timestamp()

-- name: pause
-- The first pause stays: who paused it, and why, is not overwritten by a second.
UPDATE events.consumer
   SET paused_at = clock_timestamp(), paused_by = %(by)s, pause_reason = %(reason)s
 WHERE name = ANY(%(consumers)s) AND paused_at IS NULL
RETURNING name

-- name: resume
-- Comes back with those that were paused.
UPDATE events.consumer
   SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
 WHERE name = ANY(%(consumers)s) AND paused_at IS NOT NULL
RETURNING name

-- name: place
-- Where a consumer stands and where it could: its lowest lane, the first event kept, the head; of
-- another service's stream, as its workers saw it last.
SELECT c.stream_name, c.epoch,
       coalesce((SELECT min(l.checkpoint) FROM events.stream_lease l
                  WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
                    AND split_part(l.role, '/', 1) = 'consumer:' || c.name),
                c.start_position - 1),
       coalesce(f.first,
                (SELECT min(o.position) FROM events.outbox_event o
                  WHERE o.stream_name = c.stream_name AND o.position IS NOT NULL),
                s.head + 1, 1),
       coalesce(f.head, s.head, 0), f.stream_name IS NOT NULL
  FROM events.consumer c
  LEFT JOIN events.stream s ON s.name = c.stream_name
  LEFT JOIN events.source f ON f.stream_name = c.stream_name
 WHERE c.name = %(consumer)s

-- name: count_settled
-- Lanes that were ahead have settled some of the positions that a seek passes over.
SELECT count(*) FROM events.processed_event
 WHERE consumer = %(consumer)s AND position > %(after)s AND position <= %(last)s

-- name: unsettle
-- What has no row is handled again. Parked and dead events keep theirs: they wait elsewhere.
DELETE FROM events.processed_event
 WHERE consumer = %(consumer)s AND position > %(checkpoint)s
   AND outcome IN ('handled', 'skipped', 'discarded')

-- name: begin_epoch
-- A worker of the old epoch finds its lease gone and comes back with the new one.
SELECT epoch FROM events.begin_epoch(%(consumer)s, %(lanes)s, %(checkpoint)s)

-- name: start_no_later
-- What was before its start is now its business too, and the books say so.
UPDATE events.consumer
   SET start_position = %(checkpoint)s + 1
 WHERE name = %(consumer)s AND start_position > %(checkpoint)s + 1

-- name: settled_again
-- After events were unsettled, only what is parked or dead is settled beyond the checkpoint.
UPDATE events.consumer c
   SET settled_to = greatest(%(checkpoint)s, (SELECT max(p.position) FROM events.processed_event p
                                               WHERE p.consumer = c.name)),
       given_up_to = least(c.given_up_to, %(checkpoint)s)
 WHERE c.name = %(consumer)s

-- name: delete_suspects_before
-- An event that is passed over is not started again.
DELETE FROM events.suspect WHERE consumer = %(consumer)s AND position <= %(checkpoint)s

-- name: record_seek
-- Who moved it: positions that were passed over are accounted for here.
INSERT INTO events.seek (consumer, old_checkpoint, new_checkpoint, sought_by, reason)
VALUES (%(consumer)s, %(old_checkpoint)s, %(checkpoint)s, %(by)s, %(reason)s)

-- name: effects_of_name
-- Calls to the outside that hang on the name: those that were interrupted, of events that may be
-- tried again, and those whose results are sealed for it.
SELECT count(*) FILTER (WHERE NOT e.is_done AND NOT EXISTS (
                SELECT 1 FROM events.processed_event p
                 WHERE p.consumer = e.consumer AND p.event_uuid = e.event_uuid
                   AND p.outcome IN ('handled', 'skipped', 'discarded'))),
       count(*) FILTER (WHERE jsonb_typeof(e.result) = 'string'
                          AND starts_with(e.result #>> '{}', %(sealed)s))
  FROM events.effect e
 WHERE e.consumer = %(consumer)s

-- name: rename_consumer
-- First of all: a name that is taken stops everything here.
UPDATE events.consumer SET name = %(new)s WHERE name = %(old)s

-- name: rename_lanes
-- The part behind the name, epoch and lane, stays.
UPDATE events.stream_lease
   SET role = 'consumer:' || %(new)s || substr(role, length('consumer:' || %(old)s) + 1)
 WHERE stream_name = %(stream_name)s AND split_part(role, '/', 1) = 'consumer:' || %(old)s

-- name: rename_processed_event
-- Deduplication follows the consumer.
UPDATE events.processed_event SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_parked_event
-- Its parked events wait for the same handler under its new name.
UPDATE events.parked_event SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_dead_letter
-- A redrive finds the consumer by its name.
UPDATE events.dead_letter SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_quarantine
-- A new name is no release.
UPDATE events.quarantine SET name = %(new)s WHERE name = %(old)s

-- name: rename_suspect
-- Strikes count against the event, whatever its consumer is called.
UPDATE events.suspect SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_seek
-- The account of what was passed over goes along.
UPDATE events.seek SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_effect
-- What it has called outside is not called again under another name.
UPDATE events.effect SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_operation
-- Who redrove and discarded what goes along.
UPDATE events.operation SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_operation_event
-- Also where several consumers were meant at once.
UPDATE events.operation_event SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_worker
-- Rows of dead workers, for their supervisors to find.
UPDATE events.worker SET consumer = %(new)s WHERE consumer = %(old)s

-- name: rename_trail
-- What happened to its events goes along.
UPDATE events.trail SET consumer = %(new)s WHERE consumer = %(old)s

-- name: count_rows
-- What a consumer leaves behind.
SELECT (SELECT count(*) FROM events.processed_event WHERE consumer = %(consumer)s),
       (SELECT count(*) FROM events.parked_event WHERE consumer = %(consumer)s),
       (SELECT count(*) FROM events.dead_letter WHERE consumer = %(consumer)s)

-- name: give_up
-- Before the first row goes: nobody takes those that are gone for events that were skipped.
UPDATE events.consumer SET given_up_to = greatest(given_up_to, %(floor)s) WHERE name = %(consumer)s

-- name: delete_settled_batch
-- At or below the floor the checkpoint alone is the deduplication, so a consumer that loses only
-- these rows repeats nothing, should nobody finish the job. In the order of the key and from where
-- the last batch ended, because a fresh scan would step over all the rows just deleted.
DELETE FROM events.processed_event
 WHERE consumer = %(consumer)s AND event_uuid IN (
       SELECT event_uuid FROM events.processed_event
        WHERE consumer = %(consumer)s AND event_uuid > %(after)s AND position <= %(floor)s
          AND outcome IN ('handled', 'skipped', 'discarded')
        ORDER BY event_uuid
        LIMIT %(count)s)
RETURNING event_uuid

-- name: forget_lanes
-- Of any epoch: a late worker's fence finds no lease.
DELETE FROM events.stream_lease
 WHERE stream_name = %(stream_name)s AND split_part(role, '/', 1) = 'consumer:' || %(consumer)s

-- name: forget_processed_event
-- What the batches left: rows ahead of the floor, and those of parked and dead events.
DELETE FROM events.processed_event WHERE consumer = %(consumer)s

-- name: forget_parked_event
-- Only after the operator has said so.
DELETE FROM events.parked_event WHERE consumer = %(consumer)s

-- name: forget_dead_letter
-- Only after the operator has said so.
DELETE FROM events.dead_letter WHERE consumer = %(consumer)s

-- name: forget_quarantine
-- A consumer of this name that comes later has done nothing wrong.
DELETE FROM events.quarantine WHERE name = %(consumer)s

-- name: forget_suspect
-- Nobody will start these events again.
DELETE FROM events.suspect WHERE consumer = %(consumer)s

-- name: forget_seek
-- There is nothing left to account for.
DELETE FROM events.seek WHERE consumer = %(consumer)s

-- name: forget_effect
-- A consumer of this name that comes later has called nobody.
DELETE FROM events.effect WHERE consumer = %(consumer)s

-- name: forget_operation_event
-- Before the operations: those for several consumers lose only these.
DELETE FROM events.operation_event WHERE consumer = %(consumer)s

-- name: forget_operation
-- There is nothing left that they were done to. What was done to a replay stays on record with the
-- consumer that it was for, as the replay itself does.
WITH replay AS (
    SELECT c.name, c.replay_of FROM events.consumer c
     WHERE c.name = %(consumer)s AND c.replay_of IS NOT NULL
), kept AS (
    UPDATE events.operation o
       SET consumer = replay.replay_of,
           criteria = o.criteria || jsonb_build_object('replay', replay.name)
      FROM replay
     WHERE o.consumer = replay.name
)
DELETE FROM events.operation
 WHERE consumer = %(consumer)s AND NOT EXISTS (SELECT 1 FROM replay)

-- name: forget_worker
-- Rows of dead workers.
DELETE FROM events.worker WHERE consumer = %(consumer)s

-- name: forget_trail
-- There is nobody left whom it could tell about.
DELETE FROM events.trail WHERE consumer = %(consumer)s

-- name: forget_consumer
-- Last, so that its row's lock covers everything above.
DELETE FROM events.consumer WHERE name = %(consumer)s

-- name: forget_source
-- With its last consumer a stream of another service is forgotten too, and its name is free.
DELETE FROM events.source f
 WHERE f.stream_name = %(stream_name)s
   AND NOT EXISTS (SELECT 1 FROM events.consumer c WHERE c.stream_name = f.stream_name)
