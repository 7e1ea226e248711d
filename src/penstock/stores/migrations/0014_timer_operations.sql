-- What operators do to timers is on record, like everything else that they take away or move.

ALTER TABLE events.operation
    DROP CONSTRAINT operation_kind_check,
    ADD CONSTRAINT operation_kind_check CHECK (kind IN (
        'redrive', 'discard', 'release', 'replay', 'cancel timer', 'reschedule timer'));
COMMENT ON TABLE events.operation IS
    'What operators did to dead letters, parked events and timers, and what they delivered again: '
    'who, when, why, to how many.';
