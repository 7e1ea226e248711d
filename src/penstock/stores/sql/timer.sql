-- name: clock
-- The database's clock says when a timer recurs first, whatever the sender's host believes.
SELECT clock_timestamp()

-- name: schedule
-- See events.schedule. Times go as text: drivers disagree about intervals, and a day of 24 hours
-- is not a day of the calendar.
SELECT events.schedule(
    timer_id    => CAST(%(timer_id)s AS text),
    stream_name => CAST(%(stream_name)s AS text),
    event_type  => CAST(%(event_type)s AS text),
    payload     => CAST(CAST(%(payload)s AS text) AS jsonb),
    due_at      => CAST(CAST(%(due_at)s AS text) AS timestamptz),
    delay       => CAST(CAST(%(delay)s AS text) AS interval),
    key         => CAST(%(key)s AS text),
    version     => CAST(%(version)s AS integer),
    metadata    => CAST(CAST(%(metadata)s AS text) AS jsonb),
    recurrence  => CAST(CAST(%(recurrence)s AS text) AS jsonb),
    key_id      => CAST(%(key_id)s AS text),
    on_conflict => CAST(%(on_conflict)s AS text))

-- name: reschedule
-- See events.reschedule.
SELECT events.reschedule(
    timer_id => CAST(%(timer_id)s AS text),
    due_at   => CAST(CAST(%(due_at)s AS text) AS timestamptz),
    delay    => CAST(CAST(%(delay)s AS text) AS interval))

-- name: cancel
-- See events.cancel_timer.
SELECT events.cancel_timer(timer_id => CAST(%(timer_id)s AS text))

-- name: record
-- In the transaction that changes the timer. Its key may be confidential, and is not kept.
INSERT INTO events.operation (kind, criteria, requested_by, reason, events, ended_at, ended_as)
VALUES (%(kind)s, CAST(%(criteria)s AS jsonb), %(by)s, %(reason)s, 1, clock_timestamp(), 'done')

-- name: pending
-- Two halves, because each has an index in this order: a million timers cost no more than a few.
-- SQL can say times that other languages cannot read.
(SELECT t.timer_id, t.stream_name, t.event_type, t.version, t.key, t.key_id,
        least(greatest(t.due_at, '0002-01-01 00:00+00'), '9000-01-01 00:00+00') AS due_at,
        CAST(t.schedule AS text) AS recurrence, CAST(NULL AS text) AS held_reason, t.created_at
   FROM events.timer t
  WHERE t.held_at IS NULL AND NOT CAST(%(held_only)s AS boolean)
    AND t.due_at < coalesce(CAST(CAST(%(before)s AS text) AS timestamptz), 'infinity')
    AND (CAST(%(stream_name)s AS text) IS NULL OR t.stream_name = CAST(%(stream_name)s AS text))
  ORDER BY t.due_at, t.timer_id
  LIMIT CAST(%(limit)s AS integer))
UNION ALL
(SELECT t.timer_id, t.stream_name, t.event_type, t.version, t.key, t.key_id,
        least(greatest(t.due_at, '0002-01-01 00:00+00'), '9000-01-01 00:00+00') AS due_at,
        CAST(t.schedule AS text) AS recurrence, coalesce(t.held_reason, '') AS held_reason,
        t.created_at
   FROM events.timer t
  WHERE t.held_at IS NOT NULL
    AND t.due_at < coalesce(CAST(CAST(%(before)s AS text) AS timestamptz), 'infinity')
    AND (CAST(%(stream_name)s AS text) IS NULL OR t.stream_name = CAST(%(stream_name)s AS text))
  ORDER BY t.due_at, t.timer_id
  LIMIT CAST(%(limit)s AS integer))
 ORDER BY due_at, timer_id
 LIMIT CAST(%(limit)s AS integer)

-- name: read
-- One timer with what it will send, for an operator.
SELECT t.timer_id, t.stream_name, t.event_type, t.version, t.key, t.key_id,
       least(greatest(t.due_at, '0002-01-01 00:00+00'), '9000-01-01 00:00+00') AS due_at,
       CAST(t.schedule AS text) AS recurrence,
       CASE WHEN t.held_at IS NOT NULL THEN coalesce(t.held_reason, '') END AS held_reason,
       t.created_at, t.held_at, CAST(t.payload AS text) AS payload,
       CAST(t.metadata AS text) AS metadata
  FROM events.timer t
 WHERE t.timer_id = %(timer_id)s

-- name: use_order
-- Timers come and go, so statistics are stale: whatever they say, walking an index in its order
-- and stopping at the limit is right. For the rest of the transaction.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)

-- name: summary
-- Counted up to a limit and in the order of an index, so that whoever looks does not become the
-- load. The clock is asked in a query of its own: a function that gives another answer every time
-- is no bound for an index.
SELECT (SELECT count(*) FROM (SELECT 1 FROM events.timer t WHERE t.held_at IS NULL
                               ORDER BY t.due_at, t.timer_id
                               LIMIT %(count_max)s + 1) AS capped) AS pending,
       (SELECT count(*) FROM (SELECT 1 FROM events.timer t
                               WHERE t.held_at IS NULL
                                 AND t.due_at < (SELECT clock_timestamp()
                                                        - make_interval(secs => %(late_seconds)s))
                               ORDER BY t.due_at, t.timer_id
                               LIMIT %(count_max)s + 1) AS capped) AS late,
       (SELECT count(*) FROM (SELECT 1 FROM events.timer t WHERE t.held_at IS NOT NULL
                               ORDER BY t.due_at, t.timer_id
                               LIMIT %(count_max)s + 1) AS capped) AS held,
       (SELECT floor(extract(epoch FROM min(t.due_at) - clock_timestamp()) * 1000)::bigint
          FROM events.timer t WHERE t.held_at IS NULL) AS next_due_ms

-- name: due_by
-- For tests of applications, whose time passes as they like.
SELECT t.timer_id, t.stream_name, t.event_type, t.version, t.key, t.key_id,
       least(greatest(t.due_at, '0002-01-01 00:00+00'), '9000-01-01 00:00+00') AS due_at,
       CAST(t.schedule AS text) AS recurrence, CAST(NULL AS text) AS held_reason, t.created_at,
       t.held_at, CAST(t.payload AS text) AS payload, CAST(t.metadata AS text) AS metadata
  FROM events.timer t
 WHERE t.held_at IS NULL AND t.due_at <= CAST(CAST(%(until)s AS text) AS timestamptz)
 ORDER BY t.due_at, t.timer_id

-- name: send
-- What due timers come to, as a timekeeper sends it.
SELECT events.send_many(CAST(CAST(%(batch)s AS text) AS jsonb))
