"""Triggers that sound an alarm at what must never happen, however soon it is mended again.

Looking ten times a second misses a checkpoint that goes back for a moment; a trigger does not.
"""

from __future__ import annotations

from typing import Any

import psycopg

TRIPWIRES = """
CREATE TABLE alarm (
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    what    text        NOT NULL,
    details text        NOT NULL
);

CREATE FUNCTION sound_alarm() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO alarm (what, details) VALUES (TG_ARGV[0], format('%s became %s', OLD, NEW));
    RETURN NULL;
END $$;

CREATE TRIGGER checkpoint_goes_back AFTER UPDATE ON events.stream_lease FOR EACH ROW
    WHEN (NEW.checkpoint < OLD.checkpoint)
    EXECUTE FUNCTION sound_alarm('a checkpoint went back');
CREATE TRIGGER term_goes_back AFTER UPDATE ON events.stream_lease FOR EACH ROW
    WHEN (NEW.term < OLD.term)
    EXECUTE FUNCTION sound_alarm('a term went back');
CREATE TRIGGER term_changes_hands AFTER UPDATE ON events.stream_lease FOR EACH ROW
    WHEN (NEW.term = OLD.term AND NEW.owner_id <> OLD.owner_id)
    EXECUTE FUNCTION sound_alarm('a term changed hands');
CREATE TRIGGER checkpoint_moves_without_a_lease AFTER UPDATE ON events.stream_lease FOR EACH ROW
    WHEN (NEW.checkpoint <> OLD.checkpoint
          AND NEW.role LIKE 'consumer:%'
          AND OLD.lease_until < clock_timestamp() - interval '1 second')
    EXECUTE FUNCTION sound_alarm('a checkpoint moved under a lease that was over');
CREATE TRIGGER head_goes_back AFTER UPDATE ON events.stream FOR EACH ROW
    WHEN (NEW.head < OLD.head)
    EXECUTE FUNCTION sound_alarm('a head went back');
CREATE TRIGGER position_changes AFTER UPDATE ON events.outbox_event FOR EACH ROW
    WHEN (OLD.position IS NOT NULL AND NEW.position IS DISTINCT FROM OLD.position)
    EXECUTE FUNCTION sound_alarm('an event got another position');
CREATE TRIGGER settled_for_good AFTER UPDATE ON events.processed_event FOR EACH ROW
    WHEN (OLD.outcome IN ('handled', 'skipped') AND NEW.outcome <> OLD.outcome)
    EXECUTE FUNCTION sound_alarm('a handled event was settled again');

-- When the transaction ends: the letter may come behind the entry in the books, but not later.
CREATE FUNCTION look_for_letter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM events.processed_event p
                WHERE p.consumer = NEW.consumer AND p.event_uuid = NEW.event_uuid
                  AND p.outcome = 'dead')
       AND NOT EXISTS (SELECT 1 FROM events.dead_letter d
                        WHERE d.consumer = NEW.consumer AND d.event_uuid = NEW.event_uuid) THEN
        INSERT INTO alarm (what, details) VALUES (TG_ARGV[0], NEW::text);
    END IF;
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER dead_with_a_letter AFTER INSERT OR UPDATE ON events.processed_event
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.outcome = 'dead')
    EXECUTE FUNCTION look_for_letter('an event was dead without a letter');
"""
ALARMS = "SELECT what, details FROM alarm ORDER BY at"


def lay_tripwires(database_url: str) -> None:
    """Into a database that has been migrated."""
    with psycopg.connect(database_url) as connection:
        connection.execute(TRIPWIRES)


def alarms(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """What has happened: which rule was broken, and by which change."""
    return [(what, details) for what, details in connection.execute(ALARMS)]
