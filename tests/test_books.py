"""The checker is itself checked: correct histories pass, and every damage is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
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

Damage = Callable[[History, random.Random], History]


def correct_history(
    keys: list[str], *, checkpoint: int, unnumbered: int = 0, skipped: frozenset[int] = frozenset()
) -> History:
    """Event i has position i + 1, except for the last few, which nobody has numbered yet."""
    counts: dict[str, int] = {}
    rows = []
    head = len(keys) - unnumbered
    for index, key in enumerate(keys):
        counts[key] = counts.get(key, 0) + 1
        position = index + 1 if index < head else None
        rows.append(SentRow(f"event-{index:04}", key, counts[key], position))
    passed = [row for row in rows if row.position is not None and row.position <= checkpoint]
    settled = tuple(
        SettledRow(
            row.event_uuid, row.position or 0, "skipped" if row.position in skipped else "handled"
        )
        for row in passed
    )
    effects = tuple(
        Effect(row.event_uuid, row.key, row.key_sequence)
        for row in passed
        if row.position not in skipped
    )
    return History(
        acknowledged=frozenset(row.event_uuid for row in rows),
        refused=frozenset({"rolled-back"}),
        outbox=tuple(rows),
        head=head,
        consumers=(
            ConsumerHistory(
                name="billing", effects=effects, settled=settled, checkpoint=min(checkpoint, head)
            ),
        ),
    )


@st.composite
def correct_histories(draw: st.DrawFn, *, size_min: int = 0) -> History:
    keys = draw(st.lists(st.sampled_from("abc"), min_size=size_min, max_size=40))
    unnumbered = draw(st.integers(0, max(0, len(keys) - size_min)))
    head = len(keys) - unnumbered
    checkpoint = draw(st.integers(min(size_min, head), head))
    skipped = draw(st.frozensets(st.integers(3, 40), max_size=5))
    return correct_history(keys, checkpoint=checkpoint, unnumbered=unnumbered, skipped=skipped)


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
    return with_consumer(history, checkpoint=history.consumers[0].checkpoint - 1)


def settle_at_another_position(history: History, chance: random.Random) -> History:
    settled = list(history.consumers[0].settled)
    index = chance.randrange(len(settled))
    settled[index] = replace(settled[index], position=settled[index].position + 1)
    return with_consumer(history, settled=tuple(settled))


def move_the_checkpoint_beyond_the_head(history: History, chance: random.Random) -> History:
    return with_consumer(history, checkpoint=history.head + chance.randint(1, 9))


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
]


@pytest.mark.parametrize(
    ("damage", "anomaly"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
@given(keys=st.lists(st.sampled_from("abc"), max_size=30), chance=st.randoms(use_true_random=False))
def test_every_damage_is_named(
    damage: Damage, anomaly: Anomaly, keys: list[str], chance: random.Random
) -> None:
    history = correct_history(["a", "a", *keys], checkpoint=2 + len(keys))
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
