"""The checker is itself checked: correct histories pass, and every damage is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.audit import audit
from penstock.core.books import Anomaly, Books
from penstock.core.history import (
    ConsumerHistory,
    Effect,
    History,
    HoleRow,
    ParkedRow,
    Seek,
    SentRow,
    SettledRow,
)
from penstock.core.lanes import key_hash, lane_of

Damage = Callable[[History, random.Random], History]


def correct_history(
    keys: list[str],
    *,
    checkpoint: int = 0,
    checkpoints: tuple[int, ...] = (),
    unnumbered: int = 0,
    outcomes: Mapping[int, str] = MappingProxyType({}),
) -> History:
    """Event i has position i + 1, except for the last few, which nobody has numbered yet."""
    checkpoints = checkpoints or (checkpoint,)
    counts: dict[str, int] = {}
    rows = []
    head = len(keys) - unnumbered
    for index, key in enumerate(keys):
        counts[key] = counts.get(key, 0) + 1
        position = index + 1 if index < head else None
        rows.append(SentRow(f"event-{index:04}", key, counts[key], position))
    passed = [
        (row, outcomes.get(row.position, "handled"))
        for row in rows
        if row.position is not None
        and row.position <= checkpoints[lane_of(row.key, row.event_uuid, len(checkpoints))]
    ]
    settled = tuple(
        SettledRow(row.event_uuid, row.position or 0, outcome) for row, outcome in passed
    )
    effects = tuple(
        Effect(row.event_uuid, row.key, row.key_sequence)
        for row, outcome in passed
        if outcome == "handled"
    )
    return History(
        acknowledged=frozenset(row.event_uuid for row in rows),
        refused=frozenset({"rolled-back"}),
        outbox=tuple(rows),
        head=head,
        consumers=(
            ConsumerHistory(
                name="billing",
                effects=effects,
                settled=settled,
                checkpoints=tuple(min(reached, head) for reached in checkpoints),
                parked=tuple(_parked_rows(passed)),
                dead=frozenset(row.event_uuid for row, outcome in passed if outcome == "dead"),
            ),
        ),
    )


def _parked_rows(passed: list[tuple[SentRow, str]]) -> Iterator[ParkedRow]:
    """The first of each key has a time, the others wait behind it."""
    keys: set[int] = set()
    for row, outcome in passed:
        if outcome == "parked":
            hashed = key_hash(row.key, row.event_uuid)
            yield ParkedRow(row.event_uuid, row.position or 0, hashed, is_due=hashed not in keys)
            keys.add(hashed)


@st.composite
def correct_histories(draw: st.DrawFn, *, size_min: int = 0) -> History:
    keys = draw(st.lists(st.sampled_from("abc"), min_size=size_min, max_size=40))
    unnumbered = draw(st.integers(0, max(0, len(keys) - size_min)))
    head = len(keys) - unnumbered
    lanes = draw(st.sampled_from([1, 2, 3, 16]))
    reached = st.integers(min(size_min, head), head)
    outcomes = st.sampled_from(["skipped", "dead", "discarded"])
    aside = draw(st.dictionaries(st.integers(3, 40), outcomes, max_size=5))
    # A key that is parked from some position on: whatever comes behind waits.
    parked_key, parked_from = draw(st.sampled_from("abc-")), draw(st.integers(1, 40))
    for position, key in enumerate(keys, 1):
        if key == parked_key and position >= parked_from:
            aside[position] = "parked"
    return correct_history(
        keys,
        checkpoints=tuple(draw(st.lists(reached, min_size=lanes, max_size=lanes))),
        unnumbered=unnumbered,
        outcomes=aside,
    )


def found(books: Books) -> set[Anomaly]:
    return {finding.anomaly for finding in books.findings}


def with_consumer(history: History, **changes: object) -> History:
    (consumer,) = history.consumers
    return replace(history, consumers=(replace(consumer, **changes),))  # type: ignore[arg-type]


# ── correct histories ──────────────────────────────────────────────────────────────────────────


@given(correct_histories())
def test_a_correct_history_has_no_anomaly(history: History) -> None:
    books = audit(history)
    assert books.balance, str(books)
    (consumer,) = books.consumers
    assert sum(consumer.as_plain().values()) == consumer.due == books.sent


def test_an_unknown_outcome_may_be_either() -> None:
    history = correct_history(["a", "a"], checkpoint=2)
    sent = history.outbox[1].event_uuid
    history = replace(
        history, acknowledged=history.acknowledged - {sent}, unknown=frozenset({sent, "never"})
    )
    assert audit(history).balance


def test_events_before_a_consumers_start_are_not_its_business() -> None:
    history = correct_history(["a", "b", "a"], checkpoint=3)
    (consumer,) = history.consumers
    history = with_consumer(
        history, start_position=3, effects=consumer.effects[2:], settled=consumer.settled[2:]
    )
    books = audit(history)
    assert books.balance
    assert books.consumers[0].due == 1


def test_a_consumer_may_start_where_the_stream_has_not_come_yet() -> None:
    history = correct_history(["a", "b"])
    early = {"start_position": 8, "checkpoints": (7,), "settled_to": 7}
    assert audit(with_consumer(history, **early)).balance
    for beyond in ("checkpoints", "settled_to"):
        damaged = {**early, beyond: (8,) if beyond == "checkpoints" else 8}
        assert found(audit(with_consumer(history, **damaged))) == {Anomaly.UNACCOUNTED}


def test_books_are_readable_and_have_a_plain_form() -> None:
    books = audit(correct_history(["a", "b"], checkpoint=1))
    assert "handled 1, passed 0, parked 0, dead 0, pending 1 of 2" in str(books)
    assert "the books balance" in str(books)
    assert books.as_plain()["anomalies"] == {anomaly.name.lower(): 0 for anomaly in Anomaly}
    assert all(anomaly.meaning for anomaly in Anomaly)


# ── lanes ──────────────────────────────────────────────────────────────────────────────────────


def apart() -> tuple[str, str]:
    """Two keys in different lanes of two, the first in lane 0."""
    keys = [f"key-{number}" for number in range(100)]
    return (
        next(key for key in keys if lane_of(key, "", 2) == 0),
        next(key for key in keys if lane_of(key, "", 2) == 1),
    )


def test_a_lane_that_is_behind_leaves_its_events_pending_and_no_others() -> None:
    slow, fast = apart()
    books = audit(correct_history([slow, fast] * 5, checkpoints=(2, 10)))
    assert books.balance, str(books)
    assert (books.consumers[0].handled, books.pending) == (6, 4)


def test_another_lanes_checkpoint_does_not_excuse_a_skipped_event() -> None:
    slow, fast = apart()
    history = correct_history([slow, fast] * 5, checkpoints=(2, 10))
    # The slow lane's checkpoint says that it has passed four more events, and it has not.
    books = audit(with_consumer(history, checkpoints=(10, 10)))
    assert books.count(Anomaly.SKIPPED) == books.count(Anomaly.LOST) == 4
    # The fast lane has settled them all; were it at the slow one's place, it would be ahead.
    books = audit(with_consumer(history, checkpoints=(2, 2)))
    assert books.count(Anomaly.UNACCOUNTED) == 4


def test_lanes_of_an_earlier_count_may_have_been_ahead_and_not_further_than_they_were() -> None:
    slow, fast = apart()
    history = correct_history([slow, fast] * 5, checkpoints=(2, 8))
    relaned = with_consumer(history, checkpoints=(2, 2, 2), settled_to=8)
    assert audit(relaned).balance, str(audit(relaned))
    assert audit(relaned).pending == audit(history).pending
    assert found(audit(with_consumer(relaned, settled_to=7))) == {Anomaly.UNACCOUNTED}


def test_a_dead_event_is_neither_lost_nor_pending_and_is_counted() -> None:
    books = audit(correct_history(["a"] * 3, checkpoint=3, outcomes={2: "dead"}))
    assert books.balance, str(books)
    (consumer,) = books.consumers
    assert (consumer.handled, consumer.passed, consumer.dead, consumer.pending) == (2, 0, 1, 0)
    assert "passed 0, parked 0, dead 1, pending 0 of 3" in str(books)
    assert books.as_plain()["consumers"]["billing"]["dead"] == books.dead == 1


# ── parked, dead, redriven, passed over ────────────────────────────────────────────────────────


def parked_history() -> History:
    """Of one key: handled, parked, waiting behind it, dead; and another key that went on."""
    return correct_history(
        ["a", "a", "b", "a", "b", "b"], checkpoint=6, outcomes={2: "parked", 4: "parked", 5: "dead"}
    )


def with_parked(history: History, index: int, **changes: object) -> History:
    parked = list(history.consumers[0].parked)
    parked[index] = replace(parked[index], **changes)  # type: ignore[arg-type]
    return with_consumer(history, parked=tuple(parked))


def with_settled(history: History, position: int, outcome: str | None) -> History:
    """Another outcome for a position; None: no settled row."""
    rows = {row.position: row for row in history.consumers[0].settled}
    if outcome is None:
        del rows[position]
    else:
        rows[position] = replace(rows[position], outcome=outcome)
    return with_consumer(history, settled=tuple(rows.values()))


def with_effect(history: History, position: int) -> History:
    """One more effect, after all others."""
    row = history.outbox[position - 1]
    effect = Effect(row.event_uuid, row.key, row.key_sequence)
    return with_consumer(history, effects=(*history.consumers[0].effects, effect))


def test_parked_events_are_counted_and_not_wrong() -> None:
    books = audit(parked_history())
    assert books.balance, str(books)
    (consumer,) = books.consumers
    assert (consumer.handled, consumer.parked, consumer.dead) == (3, 2, 1)
    assert "parked 2, dead 1" in str(books)
    assert books.as_plain()["consumers"]["billing"]["parked"] == books.parked == 2


@pytest.mark.parametrize("outcome", ["parked", "handled", "dead", "skipped", "discarded"])
def test_the_outcome_and_the_tables_agree(outcome: str) -> None:
    """Each event of the history with every outcome that is not its own."""
    history = parked_history()
    for position, own in enumerate(["handled", "parked", "handled", "parked", "dead"], 1):
        books = audit(with_settled(history, position, outcome))
        assert books.balance is (outcome == own), f"{position}: {books}"


def test_a_parked_event_whose_row_is_gone_is_noticed() -> None:
    history = parked_history()
    for gone in (0, 1):
        parked = list(history.consumers[0].parked)
        parked.pop(gone)
        # Not as a key that nobody tries: its first row has a time.
        damaged = with_consumer(history, parked=(replace(parked[0], is_due=True),))
        (finding,) = audit(damaged).findings
        assert finding.anomaly is Anomaly.UNACCOUNTED
        assert "parked and not among the parked events" in str(finding)


def test_a_dead_event_whose_letter_is_gone_is_noticed() -> None:
    (finding,) = audit(with_consumer(parked_history(), dead=frozenset())).findings
    assert finding.anomaly is Anomaly.UNACCOUNTED
    assert "is dead and has no letter" in str(finding)


@pytest.mark.parametrize("position", [1, 2, 4])
def test_a_letter_of_an_event_that_is_not_dead_is_noticed(position: int) -> None:
    history = parked_history()
    letters = history.consumers[0].dead | {history.outbox[position - 1].event_uuid}
    (finding,) = audit(with_consumer(history, dead=letters)).findings
    assert finding.anomaly is Anomaly.UNACCOUNTED
    assert "has a letter" in str(finding)


@pytest.mark.parametrize("state", ["is_held", "is_redriven"])
def test_a_held_or_redriven_event_is_parked_and_has_its_letter(state: str) -> None:
    history = with_parked(parked_history(), 0, **{state: True})
    assert found(audit(history)) == {Anomaly.UNACCOUNTED}
    letters = history.consumers[0].dead | {history.outbox[1].event_uuid}
    assert audit(with_consumer(history, dead=letters)).balance


@pytest.mark.parametrize("position", [2, 4, 5])
def test_an_effect_of_a_parked_or_dead_event_is_noticed(position: int) -> None:
    books = audit(with_effect(parked_history(), position))
    assert Anomaly.UNACCOUNTED in found(books)


def test_an_unsettled_event_is_neither_parked_nor_dead() -> None:
    for position in (2, 5):
        books = audit(with_settled(parked_history(), position, None))
        assert "was set aside and is not settled" in str(books)


def test_a_parked_row_of_an_event_that_was_never_sent_is_a_phantom() -> None:
    history = parked_history()
    row = ParkedRow("invented", 2, 0, is_due=True)
    parked = (*history.consumers[0].parked, row)
    assert Anomaly.PHANTOM in found(audit(with_consumer(history, parked=parked)))
    assert Anomaly.PHANTOM in found(audit(with_consumer(history, dead=frozenset({"invented"}))))


def test_a_parked_row_has_the_events_own_position_and_key() -> None:
    books = audit(with_parked(parked_history(), 0, position=3))
    assert "stands at 2 and is parked at 3" in str(books)
    books = audit(with_parked(parked_history(), 0, key_hash=0))
    assert "is parked under another key" in str(books)


@pytest.mark.parametrize("is_second_due", [False, True])
def test_a_parked_key_that_nobody_will_ever_try_is_noticed(is_second_due: bool) -> None:
    """A time of the second is no help: only the first of a key is tried."""
    history = with_parked(with_parked(parked_history(), 0, is_due=False), 1, is_due=is_second_due)
    (finding,) = audit(history).findings
    assert finding.anomaly is Anomaly.UNACCOUNTED
    assert "nobody will ever try it" in str(finding)
    letters = history.consumers[0].dead | {history.outbox[1].event_uuid}
    held = with_consumer(with_parked(history, 0, is_held=True), dead=letters)
    assert audit(held).balance, str(audit(held))


def test_a_successor_that_is_handled_before_the_parked_one_is_reordered() -> None:
    history = correct_history(["a"] * 3, checkpoint=3, outcomes={2: "parked"})
    assert found(audit(history)) == {Anomaly.REORDERED}
    # And so it stays when the parked one is handled at last.
    later = with_effect(with_settled(with_consumer(history, parked=()), 2, "handled"), 2)
    assert found(audit(later)) == {Anomaly.REORDERED}


def test_a_redriven_event_comes_late_and_is_excused_and_no_other_is() -> None:
    history = correct_history(["a"] * 5, checkpoint=5, outcomes={2: "dead"})
    redriven = frozenset({history.outbox[1].event_uuid})
    late = with_effect(with_settled(with_consumer(history, dead=frozenset()), 2, "handled"), 2)
    assert found(audit(late)) == {Anomaly.REORDERED}
    excused = with_consumer(late, redriven=redriven)
    assert audit(excused).balance, str(audit(excused))
    effects = list(excused.consumers[0].effects)
    effects[1], effects[2] = effects[2], effects[1]
    assert found(audit(with_consumer(excused, effects=tuple(effects)))) == {Anomaly.REORDERED}


def test_a_redriven_event_on_its_way_may_have_been_passed_by_its_successors() -> None:
    history = correct_history(["a"] * 3, checkpoint=3, outcomes={2: "parked"})
    uuid = history.outbox[1].event_uuid
    on_its_way = with_consumer(
        with_parked(history, 0, is_redriven=True),
        dead=frozenset({uuid}),
        redriven=frozenset({uuid}),
    )
    assert audit(on_its_way).balance, str(audit(on_its_way))


def sought(history: History, *seeks: tuple[int, int]) -> History:
    return with_consumer(history, seeks=tuple(Seek(*seek) for seek in seeks))


def without(history: History, *positions: int) -> History:
    """As if nobody had handled these."""
    (consumer,) = history.consumers
    uuids = {history.outbox[position - 1].event_uuid for position in positions}
    return with_consumer(
        history,
        settled=tuple(row for row in consumer.settled if row.event_uuid not in uuids),
        effects=tuple(effect for effect in consumer.effects if effect.event_uuid not in uuids),
    )


def test_what_an_operator_passed_over_is_accounted_for_and_nothing_else() -> None:
    history = without(correct_history(["a", "b"] * 4, checkpoint=8), 3, 4, 5)
    books = audit(sought(history, (2, 5)))
    assert books.balance, str(books)
    assert (books.consumers[0].handled, books.consumers[0].passed, books.pending) == (5, 3, 0)
    for narrower in ((3, 5), (2, 4)):
        books = audit(sought(history, narrower))
        assert books.count(Anomaly.SKIPPED) == books.count(Anomaly.LOST) == 1, str(books)


def test_what_an_operator_moved_back_to_is_the_consumers_business_again() -> None:
    history = without(correct_history(["a", "b"] * 4, checkpoint=8), 3, 4, 5)
    books = audit(sought(history, (2, 5), (7, 3)))
    assert books.count(Anomaly.SKIPPED) == 2, str(books)
    assert audit(sought(history, (2, 5), (7, 3), (3, 5))).balance


def test_an_effect_of_what_was_passed_over_or_before_the_start_is_noticed() -> None:
    history = without(correct_history(["a", "b"] * 2, checkpoint=4), 1, 2)
    for made in (sought(history, (0, 2)), with_consumer(history, start_position=3)):
        assert audit(made).balance, str(audit(made))
        assert Anomaly.UNACCOUNTED in found(audit(with_effect(made, 2)))


def test_nothing_is_settled_before_the_start() -> None:
    history = without_effects(correct_history(["a"] * 2, checkpoint=2), 1)
    (finding,) = audit(with_consumer(history, start_position=2)).findings
    assert finding.anomaly is Anomaly.UNACCOUNTED
    assert "is handled and before its start" in str(finding)


def test_an_outcome_that_nobody_knows_is_noticed() -> None:
    history = with_settled(without_effects(parked_history(), 1), 1, "forgotten")
    assert found(audit(history)) == {Anomaly.UNACCOUNTED}


def without_effects(history: History, position: int) -> History:
    uuid = history.outbox[position - 1].event_uuid
    effects = tuple(e for e in history.consumers[0].effects if e.event_uuid != uuid)
    return with_consumer(history, effects=effects)


# ── holes, and what is not known any more ──────────────────────────────────────────────────────


def with_hole(history: History, first: int, size: int) -> History:
    """The same, with so many positions left out before the one that was the first of these."""

    def moved(position: int) -> int:
        return position + size if position >= first else position

    (consumer,) = history.consumers
    history = with_consumer(
        history,
        settled=tuple(replace(row, position=moved(row.position)) for row in consumer.settled),
        parked=tuple(replace(row, position=moved(row.position)) for row in consumer.parked),
        checkpoints=tuple(map(moved, consumer.checkpoints)),
    )
    rows = tuple(
        replace(row, position=None if row.position is None else moved(row.position))
        for row in history.outbox
    )
    head = max(history.head, first - 1) + size
    return replace(history, outbox=rows, head=head, holes=(HoleRow(first, first + size - 1),))


@given(correct_histories(), st.integers(1, 10**15), st.data())
def test_positions_in_a_hole_are_neither_missing_nor_anybodys(
    history: History, size: int, data: st.DataObject
) -> None:
    before = audit(history).consumers[0]
    holed = with_hole(history, data.draw(st.integers(1, history.head + 1)), size)
    books = audit(holed)
    assert books.balance, str(books)
    assert books.consumers[0] == replace(before, holes=size)
    assert found(audit(replace(holed, holes=()))) == {Anomaly.UNACCOUNTED}


@pytest.mark.parametrize(
    ("holes", "text"),
    [
        (((3, 5),), "position 3 has a row and lies in the hole 3..5"),
        (((3, 5),), "is handled at 3, in the hole 3..5"),
        (((3, 5),), "is in effect at 3, in the hole 3..5"),
        (((3, 5),), "is set aside at 4, in the hole 3..5"),
        (((7, 9),), "the hole 7..9 goes beyond the head 6"),
        (((7, 8), (8, 9)), "the hole 8..9 overlaps one that ends at 8"),
    ],
)
def test_nothing_is_in_a_hole(holes: tuple[tuple[int, int], ...], text: str) -> None:
    history = replace(parked_history(), holes=tuple(HoleRow(*hole) for hole in holes))
    books = audit(history)
    assert found(books) == {Anomaly.UNACCOUNTED}
    with pytest.MonkeyPatch.context() as world:
        world.setattr("penstock.core.books.EXAMPLES_MAX", 100)
        assert text in str(audit(history))


def test_only_a_stretch_of_positions_may_be_looked_at() -> None:
    history = correct_history(["a", "b"] * 4, checkpoint=8)
    part = replace(history, outbox=history.outbox[2:5], first=3, last=5)
    (consumer,) = part.consumers
    part = with_consumer(part, effects=consumer.effects[2:5], settled=consumer.settled[2:5])
    part = replace(part, acknowledged=frozenset(row.event_uuid for row in part.outbox))
    assert audit(part).balance, str(audit(part))
    assert "positions 6..8 have no row" in str(audit(replace(part, last=None)))
    assert "positions 1..2 have no row" in str(audit(replace(part, first=1)))


def test_effects_that_nobody_counted_are_not_missed_and_everything_else_is() -> None:
    history = with_consumer(
        correct_history(["a", "b"] * 4, checkpoint=8), effects=(), knows_effects=False
    )
    assert audit(history).balance
    assert found(audit(with_settled(history, 3, None))) == {Anomaly.SKIPPED}


def test_a_settled_row_may_be_pruned_if_it_is_old_and_every_lane_has_passed_it() -> None:
    slow, fast = apart()
    history = with_consumer(
        correct_history([slow, fast] * 5, checkpoints=(2, 10)), effects=(), knows_effects=False
    )
    old = replace(history, outbox=tuple(replace(row, is_old=True) for row in history.outbox))
    books = audit(with_settled(old, 2, None))
    assert books.balance, str(books)
    assert (books.consumers[0].pruned, books.consumers[0].handled) == (1, 5)
    assert found(audit(with_settled(history, 2, None))) == {Anomaly.SKIPPED}
    # The slow lane is not there yet: nobody has pruned this one.
    assert found(audit(with_settled(old, 4, None))) == {Anomaly.SKIPPED}


# ── every damage has a name ────────────────────────────────────────────────────────────────────


def lose_an_effect(history: History, chance: random.Random) -> History:
    effects = list(history.consumers[0].effects)
    effects.pop(chance.randrange(len(effects)))
    return with_consumer(history, effects=tuple(effects))


def lose_an_acknowledged_row(history: History, chance: random.Random) -> History:
    rows = list(history.outbox)
    rows.pop(chance.randrange(len(rows)))
    return replace(history, outbox=tuple(rows))


def repeat_an_effect(history: History, chance: random.Random) -> History:
    effects = history.consumers[0].effects
    return with_consumer(history, effects=(*effects, chance.choice(effects)))


def swap_two_effects_of_a_key(history: History, chance: random.Random) -> History:
    del chance
    effects = list(history.consumers[0].effects)
    # Events 1 and 2 of every history in these tests share a key.
    effects[0], effects[1] = effects[1], effects[0]
    return with_consumer(history, effects=tuple(effects))


def swap_two_positions_of_a_key(history: History, chance: random.Random) -> History:
    del chance
    one, two, *rest = history.outbox
    rows = (replace(one, position=two.position), replace(two, position=one.position), *rest)
    return replace(history, outbox=rows)


def forget_a_settled_row(history: History, chance: random.Random) -> History:
    settled = list(history.consumers[0].settled)
    settled.pop(chance.randrange(len(settled)))
    return with_consumer(history, settled=tuple(settled))


def invent_an_effect(history: History, chance: random.Random) -> History:
    del chance
    effects = history.consumers[0].effects
    return with_consumer(history, effects=(*effects, Effect("invented", None, 1)))


def keep_a_rolled_back_event(history: History, chance: random.Random) -> History:
    del chance
    row = SentRow("rolled-back", None, 1, None)
    return replace(history, outbox=(*history.outbox, row))


def leave_a_gap(history: History, chance: random.Random) -> History:
    del chance
    return replace(history, head=history.head + 1)


def give_a_position_twice(history: History, chance: random.Random) -> History:
    row = SentRow("rolled-back", None, 1, chance.randint(1, history.head))
    return replace(history, outbox=(*history.outbox, row), refused=frozenset())


def send_behind_the_senders_back(history: History, chance: random.Random) -> History:
    del chance
    return replace(history, outbox=(*history.outbox, SentRow("unheard-of", None, 1, None)))


def settle_ahead_of_the_checkpoint(history: History, chance: random.Random) -> History:
    del chance
    row, checkpoints = history.outbox[-1], list(history.consumers[0].checkpoints)
    checkpoints[lane_of(row.key, row.event_uuid, len(checkpoints))] -= 1
    return with_consumer(history, checkpoints=tuple(checkpoints))


def settle_at_another_position(history: History, chance: random.Random) -> History:
    settled = list(history.consumers[0].settled)
    index = chance.randrange(len(settled))
    settled[index] = replace(settled[index], position=settled[index].position + 1)
    return with_consumer(history, settled=tuple(settled))


def move_the_checkpoint_beyond_the_head(history: History, chance: random.Random) -> History:
    checkpoints = list(history.consumers[0].checkpoints)
    checkpoints[chance.randrange(len(checkpoints))] = history.head + chance.randint(1, 9)
    return with_consumer(history, checkpoints=tuple(checkpoints))


def bury_an_event_that_has_an_effect(history: History, chance: random.Random) -> History:
    settled = list(history.consumers[0].settled)
    index = chance.randrange(len(settled))
    settled[index] = replace(settled[index], outcome="dead")
    return with_consumer(history, settled=tuple(settled))


def move_an_event_into_another_lane(history: History, chance: random.Random) -> History:
    """As if workers did not agree on which lane has a key: its own lane left it behind."""
    del chance
    (consumer,) = history.consumers
    row = history.outbox[-1]
    mine = lane_of(row.key, row.event_uuid, len(consumer.checkpoints))
    checkpoints = [0] * len(consumer.checkpoints)
    checkpoints[mine] = history.head
    settled = tuple(s for s in consumer.settled if s.event_uuid != row.event_uuid)
    effects = tuple(e for e in consumer.effects if e.event_uuid != row.event_uuid)
    return with_consumer(history, checkpoints=tuple(checkpoints), settled=settled, effects=effects)


DAMAGES: list[tuple[Damage, Anomaly]] = [
    (lose_an_effect, Anomaly.LOST),
    (lose_an_acknowledged_row, Anomaly.LOST),
    (repeat_an_effect, Anomaly.REPEATED),
    (swap_two_effects_of_a_key, Anomaly.REORDERED),
    (swap_two_positions_of_a_key, Anomaly.REORDERED),
    (forget_a_settled_row, Anomaly.SKIPPED),
    (invent_an_effect, Anomaly.PHANTOM),
    (keep_a_rolled_back_event, Anomaly.PHANTOM),
    (leave_a_gap, Anomaly.UNACCOUNTED),
    (give_a_position_twice, Anomaly.UNACCOUNTED),
    (send_behind_the_senders_back, Anomaly.UNACCOUNTED),
    (settle_ahead_of_the_checkpoint, Anomaly.UNACCOUNTED),
    (settle_at_another_position, Anomaly.UNACCOUNTED),
    (move_the_checkpoint_beyond_the_head, Anomaly.UNACCOUNTED),
    (bury_an_event_that_has_an_effect, Anomaly.UNACCOUNTED),
    (move_an_event_into_another_lane, Anomaly.SKIPPED),
    (move_an_event_into_another_lane, Anomaly.LOST),
]


@pytest.mark.parametrize(
    ("damage", "anomaly"),
    DAMAGES,
    ids=[f"{damage.__name__}-{anomaly.name}" for damage, anomaly in DAMAGES],
)
@settings(max_examples=40)
@given(
    lanes=st.sampled_from([1, 3, 16]),
    keys=st.lists(st.sampled_from("abc"), max_size=30),
    chance=st.randoms(use_true_random=False),
)
def test_every_damage_is_named(
    damage: Damage, anomaly: Anomaly, lanes: int, keys: list[str], chance: random.Random
) -> None:
    history = correct_history(["a", "a", *keys], checkpoints=(2 + len(keys),) * lanes)
    books = audit(damage(history, chance))
    assert anomaly in found(books), str(books)
    assert books.count(anomaly) >= 1
    assert not books.balance


def test_every_anomaly_has_a_damage_that_shows_it() -> None:
    assert {anomaly for _, anomaly in DAMAGES} == set(Anomaly)


def test_a_skipped_event_without_effect_is_also_lost() -> None:
    history = correct_history(["a", "b", "c"], checkpoint=3)
    (consumer,) = history.consumers
    history = with_consumer(history, effects=consumer.effects[:2], settled=consumer.settled[:2])
    assert found(audit(history)) == {Anomaly.SKIPPED, Anomaly.LOST}


def test_an_effect_committed_without_its_settled_row_is_noticed_while_pending() -> None:
    history = correct_history(["a", "b"], checkpoint=1)
    (consumer,) = history.consumers
    early = Effect(history.outbox[1].event_uuid, "b", 1)
    history = with_consumer(history, effects=(*consumer.effects, early))
    assert found(audit(history)) == {Anomaly.UNACCOUNTED}


def test_a_repeated_effect_is_not_called_reordered_as_well() -> None:
    history = correct_history(["a", "a", "a"], checkpoint=3)
    (consumer,) = history.consumers
    history = with_consumer(history, effects=(*consumer.effects, consumer.effects[0]))
    assert found(audit(history)) == {Anomaly.REPEATED}


def test_findings_keep_few_examples_and_count_all() -> None:
    history = correct_history(["a"] * 50, checkpoint=50)
    (finding,) = audit(with_consumer(history, effects=())).findings
    assert finding.count == 50
    assert len(finding.examples) == 3
