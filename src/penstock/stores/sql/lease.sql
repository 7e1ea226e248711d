-- name: ensure
-- A lease row exists before anybody wants it, so that taking it is always an UPDATE.
-- It looks first: ON CONFLICT alone would wait for whoever is just updating the row.
INSERT INTO events.stream_lease (stream_name, role, checkpoint, epoch, lane)
SELECT %(stream_name)s, %(role)s, %(checkpoint)s, %(epoch)s, %(lane)s
 WHERE NOT EXISTS (SELECT 1 FROM events.stream_lease
                    WHERE stream_name = %(stream_name)s AND role = %(role)s)
ON CONFLICT DO NOTHING

-- name: acquire
-- SKIP LOCKED: whoever is slower tries again later instead of waiting. The clock is the
-- database's, read now: now() is the start of the transaction, which may be long ago. A lease
-- that this process could not give back is its own to take; the new term fences what it left.
WITH free AS (
    SELECT stream_name, role,
           clean OR coalesce(owner_id = ANY(%(abandoned_owner_ids)s::text[]), false) AS clean
      FROM events.stream_lease
     WHERE stream_name = %(stream_name)s AND role = %(role)s
       AND (lease_until < clock_timestamp() OR owner_id = ANY(%(abandoned_owner_ids)s::text[]))
       FOR UPDATE SKIP LOCKED
)
UPDATE events.stream_lease l
   SET owner_id = %(owner_id)s, worker_id = %(worker_id)s, term = l.term + 1, clean = false,
       lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s),
       updated_at = clock_timestamp()
  FROM free
 WHERE l.stream_name = free.stream_name AND l.role = free.role
RETURNING l.term, l.checkpoint, free.clean

-- name: renew
-- All leases of a process in one statement, locked in order, so that nobody waits in a circle.
-- Rows that do not come back are lost; so is one whose checkpoint is behind what its holder knows.
-- What has run out stays so: its holder has let go by its own clock, and a renewal that was long
-- under way would only keep everybody from taking it.
WITH ours AS MATERIALIZED (
    SELECT l.stream_name, l.role
      FROM events.stream_lease l
      JOIN unnest(%(stream_names)s::text[], %(roles)s::text[], %(owner_ids)s::text[],
                  %(terms)s::bigint[]) AS held(stream_name, role, owner_id, term)
        ON l.stream_name = held.stream_name AND l.role = held.role
       AND l.owner_id = held.owner_id AND l.term = held.term
     WHERE l.lease_until >= clock_timestamp()
     ORDER BY l.stream_name, l.role
       FOR UPDATE OF l
)
UPDATE events.stream_lease l
   SET lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s)
  FROM ours
 WHERE l.stream_name = ours.stream_name AND l.role = ours.role
RETURNING l.stream_name, l.role, l.checkpoint

-- name: release
-- Only our own term; a successor's lease is left alone. The next term is larger than any that was
-- seen elsewhere, though this database may have lost it.
UPDATE events.stream_lease
   SET lease_until = '-infinity', owner_id = NULL, worker_id = NULL, clean = true,
       term = greatest(term, %(term_seen)s), updated_at = clock_timestamp()
 WHERE stream_name = %(stream_name)s AND role = %(role)s
   AND owner_id = %(owner_id)s AND term = %(term)s

-- name: release_worker
-- For a process that is known to be dead: its leases are free, its share is the others'. Not
-- clean: its successor must look for leftovers.
WITH gone AS (
    DELETE FROM events.worker WHERE worker_id = %(worker_id)s
)
UPDATE events.stream_lease
   SET lease_until = '-infinity', worker_id = NULL, updated_at = clock_timestamp()
 WHERE worker_id = %(worker_id)s
RETURNING stream_name, role

-- name: read
-- After a lost connection the truth is here, not in the worker's memory.
SELECT owner_id, term, checkpoint
  FROM events.stream_lease
 WHERE stream_name = %(stream_name)s AND role = %(role)s

-- name: end_predecessor
-- A paused holder's open transaction would make us wait on its row locks until it wakes up.
-- It marks itself with the advisory locks of its lane and of its epoch, so that whoever comes
-- after it finds it, with another lane count too; classid and objid are unsigned there.
WITH former(classid, objid) AS (
    SELECT hashtext('penstock lane'), hashtext(%(stream_name)s || ' ' || %(role)s)
    UNION ALL
    SELECT hashtext('penstock epoch'), hashtext(%(stream_name)s || ' ' || epoch_group)
      FROM unnest(%(former_groups)s::text[]) AS epoch_group
)
SELECT pid, pg_terminate_backend(pid)
  FROM (SELECT DISTINCT held.pid
          FROM pg_locks held
          JOIN former ON held.classid = (former.classid::bigint & 4294967295)::oid
                     AND held.objid = (former.objid::bigint & 4294967295)::oid
         WHERE held.locktype = 'advisory' AND held.objsubid = 2
           AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND held.pid <> pg_backend_pid()) AS former_holders
