"""Redis timers in tests: armed on a real server, handled by a worker in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock import Pipeline
from penstock.core.timer_envelope import encode_message, pack
from penstock.core.timer_options import timer_role
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.stores.timer_queue import RedisTimers
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from tests.waiting import wait_until


@contextmanager
def working(pipeline: Pipeline, *topics: str) -> Iterator[None]:
    """The stages of these topics, each in its loop; whatever ends one comes out."""
    stop = threading.Event()
    errors: list[BaseException] = []
    keeper = LeaseKeeper(pipeline.settings)
    workers = pipeline._workers()

    def work(role: str) -> None:
        try:
            Loop(role, lambda: workers.open_stage(role, keeper), stop).run()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(timer_role(topic),)) for topic in topics]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        keeper.close()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


@contextmanager
def heard() -> Iterator[list[Any]]:
    """All signals meanwhile."""
    found: list[Any] = []
    # A list's own method is equal to itself only by value, and lists of signals may be equal.
    tell = found.append
    subscribe_to_all(tell)
    try:
        yield found
    finally:
        unsubscribe(tell)


def envelope(message: Any = None, **headers: str) -> bytes:
    """The bytes of a timer."""
    body, content_type = encode_message(message)
    if content_type is not None:
        headers["content-type"] = content_type
    return pack(body, headers)


def arm(
    store: RedisTimers,
    topic: str,
    timer_id: str,
    message: Any = None,
    *,
    delay_seconds: float = 0.0,
    **headers: str,
) -> None:
    """Publish a timer; `correlation_id` and `reply_to` are headers."""
    payload = envelope(message, **headers)
    store.publish(topic, timer_id, payload, delay_seconds=delay_seconds)


def wait_for(signals: list[Any], kind: type, count: int = 1) -> list[Any]:
    """Wait until so many signals of a kind were heard."""
    wait_until(
        lambda: sum(isinstance(signal, kind) for signal in signals) >= count,
        what=lambda: f"{count} {kind.__name__} are heard; so far: {signals}",
    )
    return [signal for signal in signals if isinstance(signal, kind)]


def wait_until_empty(store: RedisTimers, topic: str) -> None:
    """Wait until no timer of a topic is left, dead ones excepted."""
    wait_until(lambda: store.counts(topic)[0] == 0, what=f"no timer of {topic} is left")
