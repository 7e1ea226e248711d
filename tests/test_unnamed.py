"""What a handler names no more passes by if nobody has tried it; what failed before does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.core.options import Guarantee
from penstock.core.retry import Retry
from penstock.core.wire import decode_body
from penstock.ops.verify import Verify
from penstock.pipeline.lane import Lane
from penstock.stores.operations import Operation
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Cancelled, Placed
from tests.failing import LATER, drive, look_now, outcomes, parked

NO_RETRY: dict[str, Any] = {"retry": Retry.none()}
GUARANTEES = [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE]


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    yield bench
    bench.close()


class Shop:
    """An application before and after it gave up a type of events."""

    def __init__(self) -> None:
        self.is_mended = False
        self.seen: list[tuple[str, int]] = []

    def both(self, event: Placed | Cancelled) -> None:
        if isinstance(event, Cancelled) and not self.is_mended:
            raise ValueError("not yet")
        self.seen.append((event.__event_type__, event.n))

    def placed_alone(self, event: Placed) -> None:
        self.seen.append((event.__event_type__, event.n))

    def list_of_placed(self, events: list[Placed]) -> None:
        self.seen += [(event.__event_type__, event.n) for event in events]


def send(bench: Workbench, *types: str, key: str = "k") -> None:
    """Events 1, 2, 3 … of one key."""
    for n, event_type in enumerate(types, 1):
        bench.connection.execute(
            "SELECT events.send('orders', %s, jsonb_build_object('n', %s::int), key => %s)",
            (event_type, n, key),
        )
    bench.publish()


def deployed(bench: Workbench, handler: Any, **options: Any) -> Lane:
    lane = bench.consumer(handler, **options)
    run_until_idle(lane)
    return lane


def redriven(bench: Workbench, lane: Lane) -> tuple[int, int]:
    """Redrive all letters to the end; how many are on their way, and have failed."""
    operation = Operation(bench.connection, "redrive", {}, consumer=None, by="me", reason="")
    operation.move(bench.rows("SELECT id FROM events.dead_letter ORDER BY id"))
    look_now(lane)
    drive(lane, lambda: operation.tally()[0] == 0)
    return operation.tally()


def letters(bench: Workbench) -> list[tuple[Any, ...]]:
    return bench.connection.execute(
        "SELECT position, reason FROM events.dead_letter ORDER BY position"
    ).fetchall()


def make_due(bench: Workbench, lane: Lane) -> None:
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp()"
        " WHERE next_attempt_at IS NOT NULL"
    )
    look_now(lane)


def assert_balance(bench: Workbench) -> None:
    assert Verify(bench.connection, bench.settings).run().findings == ()


# ── redriven ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("order", ["key", "stream", "none"])
def test_a_redriven_event_that_is_not_named_goes_back_to_the_dead_letters(
    bench: Workbench, guarantee: Guarantee, order: str
) -> None:
    options: dict[str, Any] = {**NO_RETRY, "guarantee": guarantee, "order": order}
    shop = Shop()
    send(bench, "placed", "cancelled", "placed")
    deployed(bench, shop.both, **options).close()
    assert outcomes(bench) == {"handled": [1, 3], "dead": [2]}

    lane = deployed(bench, shop.placed_alone, **options)
    assert redriven(bench, lane) == (0, 1)
    assert letters(bench) == [(2, "contract")]
    assert outcomes(bench) == {"handled": [1, 3], "dead": [2]}
    (message,) = bench.rows("SELECT error_message FROM events.dead_letter")
    assert "cancelled at orders/2" in message
    assert "deploy a handler that names it" in message
    assert "discard" in message
    assert_balance(bench)
    lane.close()

    shop.is_mended = True
    assert redriven(bench, deployed(bench, shop.both, **options)) == (0, 0)
    assert shop.seen[-1] == ("cancelled", 2)
    assert outcomes(bench) == {"handled": [1, 2, 3]}
    assert_balance(bench)


@pytest.mark.parametrize("shape", ["placed_alone", "list_of_placed"])
def test_redriven_events_that_are_named_are_handled_beside_those_that_are_not(
    bench: Workbench, shape: str
) -> None:
    send(bench, "cancelled", "placed", "cancelled", "placed")

    def refuse(event: Placed | Cancelled) -> None:
        raise ValueError("not yet")

    deployed(bench, refuse, **NO_RETRY).close()
    shop = Shop()
    assert redriven(bench, deployed(bench, getattr(shop, shape), **NO_RETRY)) == (0, 2)
    assert shop.seen == [("placed", 2), ("placed", 4)]
    assert letters(bench) == [(1, "contract"), (3, "contract")]
    assert_balance(bench)


def test_a_held_event_that_is_redriven_and_not_named_is_held_again(bench: Workbench) -> None:
    options: dict[str, Any] = {**NO_RETRY, "on_exhausted": "hold"}
    send(bench, "cancelled", "placed")
    deployed(bench, Shop().both, **options).close()
    shop = Shop()
    assert redriven(bench, deployed(bench, shop.placed_alone, **options)) == (0, 1)
    assert letters(bench) == [(1, "contract")]
    assert parked(bench) == [1, 2]
    assert shop.seen == []
    assert_balance(bench)


def test_a_rehearsal_of_an_event_that_is_not_named_would_fail(database_url: str) -> None:
    pipeline = Pipeline("shop", database_url=database_url)

    @pipeline.consumer("orders", name="bill", start="earliest")
    def bill(event: Placed, session: Session) -> None:
        raise AssertionError

    event = "0191d6e0-0000-7000-8000-000000000001"
    body = f"event\n{event}\n1\n1\n{event}\ncancelled\n1\n\n1767225600000000\nnull\n{{}}\n"
    entry = decode_body("orders", 1, (body + '{"n": 1}').encode())
    found = pipeline.rehearse("shop.bill", entry)
    assert found.outcome == "would fail"
    assert "deploy a handler that names it" in found.detail
    pipeline.engine.dispose()


# ── parked ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("guarantee", GUARANTEES[:2])
def test_a_parked_event_that_failed_and_is_not_named_any_more_becomes_a_dead_letter(
    bench: Workbench, guarantee: Guarantee
) -> None:
    options: dict[str, Any] = {"retry": LATER, "guarantee": guarantee}
    send(bench, "cancelled", "placed", "cancelled")
    deployed(bench, Shop().both, **options).close()
    assert outcomes(bench) == {"parked": [1, 2, 3]}

    shop = Shop()
    lane = deployed(bench, shop.placed_alone, **options)
    make_due(bench, lane)
    drive(lane, lambda: not parked(bench))
    assert letters(bench) == [(1, "contract")]
    # Nobody has ever tried the third: it passes by as if it came out of the stream.
    assert outcomes(bench) == {"dead": [1], "handled": [2], "skipped": [3]}
    assert shop.seen == [("placed", 2)]
    assert_balance(bench)


def test_a_parked_event_that_failed_and_is_not_named_any_more_is_held_if_asked_to(
    bench: Workbench,
) -> None:
    options: dict[str, Any] = {"retry": LATER, "on_exhausted": "hold"}
    send(bench, "cancelled", "placed")
    deployed(bench, Shop().both, **options).close()
    lane = deployed(bench, Shop().placed_alone, **options)
    make_due(bench, lane)
    drive(lane, lambda: letters(bench) == [(1, "contract")])
    assert bench.rows("SELECT held FROM events.parked_event ORDER BY position") == [True, False]
    assert_balance(bench)


def test_an_event_that_waited_for_its_version_does_not_pass_by_either(bench: Workbench) -> None:
    bench.connection.execute(
        "SELECT events.send('orders', 'cancelled', '{\"n\": 1}', key => 'k', version => 9)"
    )
    bench.publish()
    options: dict[str, Any] = {"retry": LATER, "on_unknown_version": "park"}
    deployed(bench, Shop().both, **options).close()
    lane = deployed(bench, Shop().placed_alone, **options)
    make_due(bench, lane)
    drive(lane, lambda: not parked(bench))
    assert letters(bench) == [(1, "contract")]
    assert_balance(bench)
