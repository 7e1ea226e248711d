-- The archive: which objects hold which positions, planned before they are written.

CREATE TABLE events.archive_object (
    stream_name    text        NOT NULL,
    first          bigint      NOT NULL CHECK (first > 0),
    last           bigint      NOT NULL CHECK (last >= first),
    events         bigint      NOT NULL CHECK (events >= 0),
    raw_bytes      bigint      NOT NULL CHECK (raw_bytes > 0),
    content_sha256 text        NOT NULL,
    newest_us      bigint      NOT NULL,
    stored_bytes   bigint,
    sha256         text,
    planned_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    archived_at    timestamptz,
    PRIMARY KEY (stream_name, first),
    CHECK ((archived_at IS NULL) = (stored_bytes IS NULL)
           AND (archived_at IS NULL) = (sha256 IS NULL))
);
COMMENT ON TABLE events.archive_object IS
    'Every object of the archive. It is entered before it is written, so that whoever finishes it '
    'after a crash writes the same one: objects neither overlap nor leave anything out.';
COMMENT ON COLUMN events.archive_object.content_sha256 IS
    'Of the lines, whatever a compressor makes of them.';
COMMENT ON COLUMN events.archive_object.newest_us IS
    'When its latest event was sent, in microseconds since 1970; 0 where it holds only holes.';
COMMENT ON COLUMN events.archive_object.sha256 IS 'Of what is stored.';
COMMENT ON COLUMN events.archive_object.archived_at IS 'NULL: planned, perhaps not stored yet.';
CREATE INDEX archive_object_last ON events.archive_object (stream_name, last);
-- One object at a time: what comes behind an unfinished one cannot be planned.
CREATE UNIQUE INDEX archive_object_unfinished
    ON events.archive_object (stream_name) WHERE archived_at IS NULL;

CREATE FUNCTION events.ensure_archiver(of_stream text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    begins bigint;
BEGIN
    PERFORM 1 FROM events.stream_lease WHERE stream_name = of_stream AND role = 'archiver';
    IF FOUND THEN
        RETURN false;
    END IF;
    -- The pruning that is going on ends first; the next one sees this row. See hold_pruning.
    PERFORM pg_advisory_xact_lock_shared(hashtext('penstock prune'), hashtext(of_stream));
    -- Behind what was pruned, and behind what was archived before the archiver was forgotten.
    SELECT greatest(
               coalesce((SELECT min(o.position) FROM events.outbox_event o
                          WHERE o.stream_name = s.name AND o.position IS NOT NULL), s.head + 1),
               (SELECT max(a.last) + 1 FROM events.archive_object a WHERE a.stream_name = s.name))
      INTO begins FROM events.stream s WHERE s.name = of_stream;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO events.stream_lease (stream_name, role, checkpoint)
    VALUES (of_stream, 'archiver', begins - 1)
    ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION events.ensure_archiver(text) IS
    'Enters the archiver as a reader of a stream, behind what was pruned before: from now on nothing '
    'is pruned ahead of it. True: it is new.';

CREATE FUNCTION events.require_archiver(
    of_stream text, owner text, held_term bigint, held_checkpoint bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- What is written to a store must not be planned anew after a crash, with another range.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- By this lock a successor finds and ends us.
    PERFORM pg_advisory_xact_lock_shared(
        hashtext('penstock lane'), hashtext(of_stream || ' archiver'));
    PERFORM 1 FROM events.stream_lease
      WHERE stream_name = of_stream AND role = 'archiver' AND owner_id = owner
        AND term = held_term AND checkpoint = held_checkpoint AND lease_until > clock_timestamp()
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'PS003', MESSAGE =
            format('the lease on %s as archiver is held by another worker', of_stream);
    END IF;
END $$;
COMMENT ON FUNCTION events.require_archiver(text, text, bigint, bigint) IS
    'Raises unless owner, term and checkpoint are those of the lease, which it locks.';

CREATE FUNCTION events.plan_object(
    of_stream text, owner text, held_term bigint, held_checkpoint bigint, last_position bigint,
    event_count bigint, raw bigint, content text, newest bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM events.require_archiver(of_stream, owner, held_term, held_checkpoint);
    PERFORM 1 FROM events.archive_object WHERE stream_name = of_stream AND last > held_checkpoint;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE =
            format('%s is archived beyond %s, the checkpoint of its archiver', of_stream,
                   held_checkpoint);
    END IF;
    INSERT INTO events.archive_object
           (stream_name, first, last, events, raw_bytes, content_sha256, newest_us)
    VALUES (of_stream, held_checkpoint + 1, last_position, event_count, raw, content, newest);
END $$;
COMMENT ON FUNCTION events.plan_object(
    text, text, bigint, bigint, bigint, bigint, bigint, text, bigint) IS
    'Fixes the next object: right behind the checkpoint. Only its holder can, one at a time.';

CREATE FUNCTION events.archive_object(
    of_stream text, owner text, held_term bigint, held_checkpoint bigint, stored bigint, hash text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    reached bigint;
BEGIN
    PERFORM events.require_archiver(of_stream, owner, held_term, held_checkpoint);
    UPDATE events.archive_object
       SET stored_bytes = stored, sha256 = hash, archived_at = clock_timestamp()
     WHERE stream_name = of_stream AND first = held_checkpoint + 1 AND archived_at IS NULL
    RETURNING last INTO STRICT reached;
    UPDATE events.stream_lease SET checkpoint = reached, updated_at = clock_timestamp()
     WHERE stream_name = of_stream AND role = 'archiver';
    RETURN reached;
END $$;
COMMENT ON FUNCTION events.archive_object(text, text, bigint, bigint, bigint, text) IS
    'Records that the planned object is stored, and moves the checkpoint behind it.';
