-- name: agree
-- The books win over the code, unless a later deploy asks for another count. Whoever lets nothing
-- pass a failing event needs the only lane there is, whenever it was deployed: it takes the word
-- of those who want several as of now, and one lane suits them too.
SELECT stream_name, start_position, lanes, epoch, settled_to
  FROM events.agree_on_lanes(%(consumer)s, %(lanes)s, (
       SELECT CASE WHEN %(needs_one_lane)s AND c.lanes > 1
                   THEN greatest(clock_timestamp(), c.deployed_at + interval '1 microsecond')
                   ELSE %(deployed_at)s END
         FROM events.consumer c WHERE c.name = %(consumer)s))

-- name: watch
-- Everything that decides on which lanes a worker holds, at one moment, without a lock.
SELECT c.lanes, c.epoch, c.paused_at IS NOT NULL,
       ARRAY(SELECT w.worker_id FROM events.worker w
              WHERE w.consumer = c.name AND w.alive_until > clock_timestamp()),
       ARRAY(SELECT CASE WHEN l.lease_until > clock_timestamp() THEN l.worker_id END
               FROM events.stream_lease l
              WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
                AND split_part(l.role, '/', 1) = 'consumer:' || c.name
              ORDER BY l.lane),
       (SELECT extract(epoch FROM min(l.lease_until) - clock_timestamp())::float8
          FROM events.stream_lease l
         WHERE l.stream_name = c.stream_name AND l.epoch = c.epoch
           AND split_part(l.role, '/', 1) = 'consumer:' || c.name
           AND l.lease_until > clock_timestamp() AND l.worker_id <> %(worker_id)s)
  FROM events.consumer c
 WHERE c.name = %(consumer)s

-- name: join
-- From now on this worker has a share of the lanes.
INSERT INTO events.worker (consumer, worker_id, host, pid, alive_until)
VALUES (%(consumer)s, %(worker_id)s, %(host)s, %(pid)s,
        clock_timestamp() + make_interval(secs => %(lease_seconds)s))
ON CONFLICT (consumer, worker_id) DO UPDATE SET alive_until = excluded.alive_until

-- name: stay
-- All consumers of a process in one statement.
UPDATE events.worker
   SET alive_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
 WHERE worker_id = %(worker_id)s

-- name: leave
-- The others share this worker's lanes at once.
DELETE FROM events.worker WHERE consumer = %(consumer)s AND worker_id = %(worker_id)s

-- name: forget_expired
-- Whoever comes tidies up after those whose host died.
DELETE FROM events.worker
 WHERE consumer = %(consumer)s AND alive_until < clock_timestamp() - interval '1 hour'

-- name: advance
-- A lane that has met only other lanes' events moves on, under the same fence as a batch.
UPDATE events.stream_lease
   SET checkpoint = %(new_checkpoint)s, updated_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s AND role = %(role)s AND owner_id = %(owner_id)s
   AND term = %(term)s AND checkpoint = %(old_checkpoint)s AND lease_until > clock_timestamp()
