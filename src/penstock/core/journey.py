"""An event's journey: what is known of it, put in order and into words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

UUID_VERSION_WITH_TIME = 7


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened to an event."""

    at: datetime | None
    """By the database's clock; None where only the order is known."""
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """An event as it was sent."""

    stream_name: str
    position: int | None
    event_uuid: str
    event_type: str
    version: int
    key: str | None
    is_sealed: bool
    timer_id: str | None
    """The timer that it comes from."""
    causation_id: str | None
    """The event whose handler sent it."""
    created_at: datetime
    numbered_at: datetime | None = None
    """None where only the archive has the event, which does not say."""


@dataclass(frozen=True, slots=True)
class Way:
    """How far a stream is, seen from one place in it."""

    head: int
    published: int
    hole: tuple[int, int, str] | None = None
    archived_in: tuple[int, int, datetime | None] | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """What a consumer's books say of an event."""

    name: str
    start_position: int
    end_position: int | None
    is_paused: bool
    checkpoint: int
    outcome: str | None
    settled_at: datetime | None
    next_attempt_at: datetime | None
    is_held: bool | None
    attempts: int | None
    letter_id: int | None


@dataclass(frozen=True, slots=True)
class Trail:
    """One line of an event's trail."""

    consumer: str
    step: str
    attempt: int | None
    error: str | None
    due_at: datetime | None
    operation_id: int | None
    noted_at: datetime


@dataclass(frozen=True, slots=True)
class Touch:
    """What an operator did to an event."""

    consumer: str
    operation_id: int
    kind: str
    by: str
    reason: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler called outside, once."""

    consumer: str
    effect: str
    is_done: bool
    calls: int
    started_at: datetime
    done_at: datetime | None


@dataclass(frozen=True, slots=True)
class Remote:
    """A consumer of another service, as far as it has told."""

    name: str
    checkpoint: int
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the database knows of one event."""

    event_uuid: str | None
    stream_name: str | None
    position: int | None
    sent: Sent | None = None
    found_in: str | None = None
    """outbox or archive: where the event itself was read."""
    way: Way | None = None
    books: Sequence[Books] = ()
    trail: Sequence[Trail] = ()
    touches: Sequence[Touch] = ()
    calls: Sequence[Call] = ()
    remotes: Sequence[Remote] = ()


@dataclass(frozen=True, slots=True)
class Chapter:
    """An event's journey through one consumer."""

    consumer: str
    state: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Journey:
    """Everything known about an event, and what cannot be seen."""

    event_uuid: str | None
    stream_name: str | None
    position: int | None
    event_type: str | None = None
    version: int | None = None
    key: str | None = None
    found_in: str | None = None
    summary: str = ""
    steps: tuple[Step, ...] = ()
    consumers: tuple[Chapter, ...] = ()
    unseen: tuple[str, ...] = field(default=())


def tell(facts: Facts, retention_days: float, now: datetime) -> Journey:
    """Put what is known into order. `retention_days`: for how long settled rows are kept."""
    sent = facts.sent
    chapters = tuple(_chapter(books, facts) for books in facts.books)
    remotes = tuple(_remote_chapter(remote, facts.position) for remote in facts.remotes)
    return Journey(
        event_uuid=facts.event_uuid,
        stream_name=facts.stream_name,
        position=facts.position,
        event_type=None if sent is None else sent.event_type,
        version=None if sent is None else sent.version,
        key=None if sent is None or sent.is_sealed else sent.key,
        found_in=facts.found_in,
        summary=_summary(facts, chapters, retention_days, now),
        steps=tuple(_own_steps(facts)),
        consumers=(*chapters, *remotes),
        unseen=tuple(_unseen(facts)),
    )


# ── the event itself ───────────────────────────────────────────────────────────────────────────


def _own_steps(facts: Facts) -> Iterable[Step]:
    sent, way, position = facts.sent, facts.way, facts.position
    if sent is not None:
        yield Step(sent.created_at, "sent", _sent_by(sent))
        if sent.numbered_at is not None:
            yield Step(sent.numbered_at, "numbered", f"{sent.stream_name}/{position}")
    if way is None or position is None or way.hole is not None:
        return
    if position <= way.published:
        yield Step(None, "appended", "confirmed on the hot log")
    elif sent is not None and sent.position is not None:
        yield Step(None, "not appended yet", f"the hot log is confirmed up to {way.published}")
    if way.archived_in is not None:
        first, last, archived_at = way.archived_in
        what = "archived" if archived_at is not None else "being archived"
        yield Step(archived_at, what, f"in the object of positions {first} to {last}")


def _sent_by(sent: Sent) -> str:
    if sent.timer_id is not None:
        return f"by the timer {sent.timer_id}"
    if sent.causation_id is not None:
        return f"by a handler of event {sent.causation_id}"
    return "its payload is sealed" if sent.is_sealed else ""


def _unseen(facts: Facts) -> Iterable[str]:
    if facts.sent is not None:
        yield (
            "When its transaction committed: after it was sent and before it was numbered; "
            "PostgreSQL keeps no other time."
        )
        if facts.sent.timer_id is None and facts.sent.causation_id is None:
            yield "Which process sent it: events carry only what their sender put into metadata."
    if facts.remotes:
        yield (
            "What consumers of other services made of it: they tell how far they are; ask "
            "`penstock journey` over there."
        )


# ── in one word ────────────────────────────────────────────────────────────────────────────────


def _summary(
    facts: Facts, chapters: Sequence[Chapter], retention_days: float, now: datetime
) -> str:
    way = facts.way
    if way is not None and way.hole is not None:
        first, last, reason = way.hole
        return f"No event will ever be here: positions {first} to {last} are a hole ({reason})."
    if facts.sent is None:
        return _absence(facts, retention_days, now)
    if facts.sent.position is None:
        return "Sent and committed; the publisher has not numbered it yet."
    if not chapters:
        return "Published; no consumer of this database reads its stream."
    states = dict.fromkeys(chapter.state for chapter in chapters)
    return "; ".join(
        f"{state} by {', '.join(c.consumer for c in chapters if c.state == state)}"
        for state in states
    ).capitalize()


def _absence(facts: Facts, retention_days: float, now: datetime) -> str:
    if facts.position is not None:
        if facts.way is not None and facts.position > facts.way.head:
            return f"Nothing has been numbered there: the stream ends at {facts.way.head}."
        if facts.way is None:
            return "This database has no such stream."
        return "The event itself is no longer in the outbox; what is left of it is below."
    made_at = _time_of(facts.event_uuid)
    if made_at is not None and (now - made_at).days < retention_days:
        return (
            f"It never committed, or has not yet: its id was made {made_at:%Y-%m-%d %H:%M:%S} UTC, "
            "and whatever was sent since then is still here."
        )
    return (
        f"Nothing is known of it. It never committed, or it is older than the {retention_days:g} "
        "days that settled events are kept for; archived events are found by STREAM/POSITION."
    )


def _time_of(event_uuid: str | None) -> datetime | None:
    """When an id was made, where the id says so."""
    if event_uuid is None or UUID(event_uuid).version != UUID_VERSION_WITH_TIME:
        return None
    return datetime.fromtimestamp((UUID(event_uuid).int >> 80) / 1000, UTC)


# ── consumers ──────────────────────────────────────────────────────────────────────────────────


def _chapter(books: Books, facts: Facts) -> Chapter:
    steps = [_trail_step(line) for line in facts.trail if line.consumer == books.name]
    steps += [
        Step(touch.started_at, f"{touch.kind} asked for", _touched(touch))
        for touch in facts.touches
        if touch.consumer == books.name
    ]
    for call in facts.calls:
        if call.consumer == books.name:
            done = f"done {call.done_at:%H:%M:%S}" if call.done_at else "outcome unknown"
            steps.append(Step(call.started_at, f"called {call.effect}", done))
    if books.settled_at is not None and books.outcome not in ("parked", "dead", None):
        steps.append(Step(books.settled_at, str(books.outcome)))
    steps.sort(key=lambda step: step.at or datetime.max.replace(tzinfo=UTC))
    return Chapter(books.name, _state(books, facts.position), tuple(steps))


def _state(books: Books, position: int | None) -> str:
    """What the event is to a consumer now."""
    match books.outcome:
        case None:
            return _state_without_row(books, position)
        case "dead":
            return f"buried as letter {books.letter_id}"
        case "parked" if books.is_held:
            return "held"
        case "parked" if books.letter_id is not None:
            return "redriven, waiting"
        case outcome:
            return outcome


def _state_without_row(books: Books, position: int | None) -> str:
    if position is None:
        return "not numbered yet"
    if position < books.start_position:
        return f"before its start at {books.start_position}"
    if books.end_position is not None and position > books.end_position:
        return f"behind its end at {books.end_position}"
    if position <= books.checkpoint:
        return "settled; the details are pruned"
    paused = ", and it is paused" if books.is_paused else ""
    return f"not reached: {position - books.checkpoint} to go{paused}"


def _remote_chapter(remote: Remote, position: int | None) -> Chapter:
    is_past = position is not None and position <= remote.checkpoint
    told = Step(remote.seen_at, "told", f"that it is at {remote.checkpoint}")
    return Chapter(remote.name, "settled there" if is_past else "not settled there yet", (told,))


def _trail_step(line: Trail) -> Step:
    attempt = "" if line.attempt is None else f"attempt {line.attempt}"
    match line.step:
        case "failed":
            due = "" if line.due_at is None else f"; again {line.due_at:%H:%M:%S}"
            return Step(line.noted_at, "failed and parked", f"{attempt}: {line.error}{due}")
        case "held":
            return Step(line.noted_at, "failed and held", f"{attempt}: {line.error}")
        case "waited" if line.error is not None:
            return Step(line.noted_at, "parked", f"no attempt: {line.error}")
        case "waited":
            return Step(line.noted_at, "parked", "behind an earlier event of its key")
        case "redriven":
            return Step(line.noted_at, "redriven", f"operation {line.operation_id}")
        case _:
            return Step(line.noted_at, "buried", f"{attempt}: {line.error}")


def _touched(touch: Touch) -> str:
    why = f": {touch.reason}" if touch.reason else ""
    return f"operation {touch.operation_id} by {touch.by}{why}"
