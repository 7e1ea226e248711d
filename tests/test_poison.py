"""Poisoned input ends as a dead letter, or is read from elsewhere; it never ends a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy.orm import Session

from penstock.core.events import StreamEvent
from penstock.core.lanes import lane_of
from penstock.core.options import Guarantee
from penstock.core.retry import Retry
from penstock.stores.redis_log import FIELD
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.failing import heard, outcomes
from tests.publishing import log_key
from tests.signing import signed

MEBIBYTE = 1024 * 1024
ONE_TRY = Retry.none()
KEY_OF_LANE_0 = next(key for key in "abcdefgh" if lane_of(key, "", 2) == 0)


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    yield bench
    bench.close()


def typed(event: Placed, cursor: psycopg.Cursor[Any]) -> None: ...


def untyped(event: StreamEvent[Any], session: Session) -> None: ...


def batch(events: list[Placed], session: Session) -> None: ...


async def awaited(event: Placed) -> None: ...


HANDLERS = [typed, untyped, batch, awaited]


def field(number: int, value: bytes) -> Callable[[bytes], bytes]:
    """Changes one line of an entry; the payload is the last."""

    def change(raw: bytes) -> bytes:
        lines = raw.split(b"\n", 12)
        lines[number] = value
        return b"\n".join(lines)

    return change


# An entry whose event can be recognised is handled as far as it goes, or a dead letter.
FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "payload that is no JSON": field(12, b'{"n": '),
    "payload nested too deeply": field(12, b"[" * 100_000),
    "payload that is no text": field(12, b"\xff\xfe"),
    "payload with a NUL": field(12, b'{"n": "\0"}'),
    "metadata that is no JSON": field(11, b"{"),
    "key that is no JSON": field(10, b"k"),
    "key that is no text": field(10, b"7"),
    "time that is no number": field(9, b"yesterday"),
    "version that is no number": field(7, b"nine"),
    "outbox id that is no number": field(4, b"-"),
    "entry cut short": lambda raw: raw[:20],
    "empty entry": lambda _: b"",
}


def forge(bench: Workbench) -> None:
    """Put something else in the place of every entry of the hot log, but the last."""
    assert bench.settings.redis_url is not None
    bodies = bench.rows(
        "SELECT events.entry(o, s.origin) FROM events.outbox_event o"
        " JOIN events.stream s ON s.name = o.stream_name ORDER BY o.position"
    )
    key, changes = log_key("orders"), [*FORGERIES.values(), bytes]
    with closing(redis.Redis.from_url(bench.settings.redis_url)) as client:
        client.delete(key)
        for position, body in enumerate(bodies, start=1):
            raw = changes[position - 1](signed(bench.settings.database_url, position, body))
            client.xadd(key, {FIELD: raw}, id=f"{position}-0")


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_poisoned_entry_of_the_hot_log_ends_nobody(
    bench: Workbench, handler: Any, lanes: int
) -> None:
    count = len(FORGERIES) + 1
    bench.connection.execute(
        "SELECT events.send('orders', 'placed', jsonb_build_object('n', n), key => %s)"
        "  FROM generate_series(1, %s) AS n",
        (KEY_OF_LANE_0, count),
    )
    bench.publish()
    forge(bench)
    run_until_idle(bench.consumer(handler, retry=ONE_TRY, lanes=lanes))
    found = outcomes(bench)
    # What is no entry at all is read from the outbox instead; what is one may be a dead letter.
    assert sorted(found["handled"] + found.get("dead", [])) == list(range(1, count + 1))
    assert set(found.get("dead", [])) <= {1, 2, 5}
    assert set(bench.rows("SELECT reason FROM events.dead_letter")) <= {"contract"}


PAYLOADS = {
    "wrong type": '{"n": "seven"}',
    "null": "null",
    "list": '[{"n": 1}]',
    "a mebibyte of text": '{"n": "' + "x" * MEBIBYTE + '"}',
    "deep nesting": '{"n": ' + "[" * 900 + "]" * 900 + "}",
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_poisoned_payload_is_a_dead_letter_and_the_next_is_handled(
    bench: Workbench, handler: Any
) -> None:
    for payload in PAYLOADS.values():
        bench.connection.execute("SELECT events.send('orders', 'placed', %s::jsonb)", (payload,))
    bench.send(1)
    bench.publish()
    run_until_idle(bench.consumer(handler, retry=ONE_TRY))
    poisoned = list(range(1, len(PAYLOADS) + 1))
    if handler is untyped:
        assert outcomes(bench) == {"handled": [*poisoned, len(PAYLOADS) + 1]}
    else:
        assert outcomes(bench) == {"dead": poisoned, "handled": [len(PAYLOADS) + 1]}
        assert set(bench.rows("SELECT reason FROM events.dead_letter")) == {"contract"}
        assert max(bench.rows("SELECT length(error_message) FROM events.dead_letter")) <= 2000


class Nasty(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class Endless(Exception):
    __cause__: Any

    def __init__(self) -> None:
        super().__init__("again")
        self.__cause__ = self


ERRORS: dict[str, BaseException] = {
    "its text fails": Nasty(),
    "is its own cause": Endless(),
    "ten mebibytes of text": ValueError("x" * 10 * MEBIBYTE),
    "text that cannot be stored": ValueError("a\0b\ud800c"),
    "a group": ExceptionGroup("many", [ValueError("a"), KeyError("b")]),
    "recursion": RecursionError("deep"),
    "memory": MemoryError(),
    "stop iteration": StopIteration(3),
    "exit": SystemExit(3),
    "cancelled": asyncio.CancelledError(),
    "generator exit": GeneratorExit(),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("shape", ["plain", "list", "async", "at_least_once", "at_most_once"])
def test_whatever_a_handler_raises_is_a_dead_letter(bench: Workbench, shape: str) -> None:
    errors = list(ERRORS.values())

    def fail(n: int) -> None:
        if n <= len(errors):
            raise errors[n - 1]

    def plain(event: Placed) -> None:
        fail(event.n)

    def many(events: list[Placed]) -> None:
        for event in events:
            fail(event.n)

    async def later(event: Placed) -> None:
        fail(event.n)

    handlers: dict[str, Any] = {"list": many, "async": later}
    guarantee = Guarantee(shape if shape.startswith("at_") else "exactly_once")
    bench.connection.execute(
        "SELECT events.send('orders', 'placed', jsonb_build_object('n', n))"
        "  FROM generate_series(1, %s) AS n",
        (len(errors) + 1,),
    )
    bench.publish()
    lane = bench.consumer(handlers.get(shape, plain), retry=ONE_TRY, guarantee=guarantee)
    with heard(signals.EventFailed) as failures:
        run_until_idle(lane)
    assert [failure.position for failure in failures] == list(range(1, len(errors) + 1))
    assert outcomes(bench) == {
        "dead": list(range(1, len(errors) + 1)),
        "handled": [len(errors) + 1],
    }


def test_a_handler_that_recurses_without_end_is_survived(bench: Workbench) -> None:
    def handler(event: Placed) -> None:
        if event.n == 1:
            handler(event)

    bench.send(2)
    bench.publish()
    run_until_idle(bench.consumer(handler, retry=ONE_TRY))
    assert outcomes(bench) == {"dead": [1], "handled": [2]}
