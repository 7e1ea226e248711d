"""The checker is itself checked: correct histories pass, and every damage is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.books import (
    Anomaly,
    Books,
    ConsumerHistory,
    Effect,
    History,
    SentRow,
    SettledRow,
    audit,
)
from penstock.core.lanes import lane_of

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
            ),
        ),
    )


@st.composite
def correct_histories(draw: st.DrawFn, *, size_min: int = 0) -> History:
    keys = draw(st.lists(st.sampled_from("abc"), min_size=size_min, max_size=40))
    unnumbered = draw(st.integers(0, max(0, len(keys) - size_min)))
    head = len(keys) - unnumbered
    lanes = draw(st.sampled_from([1, 2, 3, 16]))
    reached = st.integers(min(size_min, head), head)
    return correct_history(
        keys,
        checkpoints=tuple(draw(st.lists(reached, min_size=lanes, max_size=lanes))),
        unnumbered=unnumbered,
        outcomes=draw(
            st.dictionaries(st.integers(3, 40), st.sampled_from(["skipped", "dead"]), max_size=5)
        ),
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
    assert consumer.handled + consumer.passed + consumer.pending == consumer.due == books.sent


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


def test_books_are_readable_and_have_a_plain_form() -> None:
    books = audit(correct_history(["a", "b"], checkpoint=1))
    assert "handled 1, passed 0, pending 1 of 2" in str(books)
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
    assert (consumer.handled, consumer.passed, consumer.dead, consumer.pending) == (2, 1, 1, 0)
    assert "1 of those passed are dead" in str(books)
    assert books.as_plain()["consumers"]["billing"]["dead"] == 1


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
