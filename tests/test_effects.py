"""Calls to the outside: once if their result is on record, and never by a guess."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from penstock import Context, Event
from penstock.core.effects import EFFECT_LENGTH_MAX, idempotency_key
from penstock.core.wire import Entry
from penstock.errors import EffectUnknown, UsageError
from penstock.pipeline.effects import EffectReached, Effects
from penstock.stores.servers import Servers
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import EffectInterrupted
from penstock.testing import deliver
from tests.databases import new_database
from tests.effect_child import CONSUMER, EFFECT, outside_calls
from tests.effects_at_work import EffectBench, Outside, heard
from tests.waiting import wait_until

RIVALS = 8


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """One for all tests of this file: each has an event of its own."""
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def bench(database_url: str) -> Iterator[EffectBench]:
    made = EffectBench(database_url)
    yield made
    made.close()


# ── on record ──────────────────────────────────────────────────────────────────────────────────


def test_a_result_on_record_is_returned_instead_of_calling_again(bench: EffectBench) -> None:
    outside = Outside("first", "second")
    with heard() as signals:
        assert bench.process().once(bench.event, "receipt", outside) == "first"
    assert signals == ["Started", "Called", "Recorded"]
    with heard() as signals:
        assert bench.process().once(bench.event, "receipt", outside) == "first"
        assert bench.process().once(bench.event, "receipt", outside, interrupted="bury") == "first"
    assert signals == []
    assert outside.calls == 1
    assert bench.rows() == [("receipt", True, 1)]


def test_each_effect_of_each_event_for_each_consumer_is_a_call_of_its_own(
    bench: EffectBench,
) -> None:
    outside = Outside(1, 2, 3, 4)
    other_event = str(uuid4())
    assert bench.process("shop.a").once(bench.event, "receipt", outside) == 1
    assert bench.process("shop.b").once(bench.event, "receipt", outside) == 2
    assert bench.process("shop.a").once(other_event, "receipt", outside) == 3
    assert bench.process("shop.a").once(bench.event, "label", outside) == 4


def test_the_record_is_committed_before_the_call_and_after_it(bench: EffectBench) -> None:
    during = bench.process().once(bench.event, "receipt", bench.rows)
    assert during == [["receipt", False, 1]]
    assert bench.rows() == [("receipt", True, 1)]


# ── unknown ────────────────────────────────────────────────────────────────────────────────────


def test_an_interrupted_call_is_made_again_where_that_is_asked_for(bench: EffectBench) -> None:
    bench.die_in_call()
    assert bench.rows() == [("receipt", False, 1)]
    outside = Outside("sent")
    with heard() as signals:
        assert bench.process().once(bench.event, "receipt", outside) == "sent"
    assert signals == ["Interrupted", "Started", "Called", "Recorded"]
    assert outside.calls == 1
    assert bench.rows() == [("receipt", True, 2)]


def test_an_interrupted_call_is_left_to_people_where_that_is_asked_for(bench: EffectBench) -> None:
    bench.die_in_call(host="web07")
    outside = Outside("sent")
    with heard() as signals, pytest.raises(EffectUnknown) as unknown:
        bench.process().once(bench.event, "receipt", outside, interrupted="bury")
    assert signals == ["Interrupted"]
    assert outside.calls == 0
    assert bench.rows() == [("receipt", False, 1)]
    key = idempotency_key("shop.mail", bench.event, "receipt")
    for part in ("web07", bench.event, key, "not called again", "docs/EFFECTS.md"):
        assert part in str(unknown.value)


def test_what_ends_the_attempt_leaves_the_outcome_unknown(bench: EffectBench) -> None:
    outside = Outside(KeyboardInterrupt(), "again")
    process = bench.process()
    with pytest.raises(KeyboardInterrupt):
        process.once(bench.event, "receipt", outside)
    with pytest.raises(EffectUnknown):
        process.once(bench.event, "receipt", outside, interrupted="bury")
    assert outside.calls == 1


def test_a_call_may_say_itself_that_its_outcome_is_unknown(bench: EffectBench) -> None:
    outside = Outside(EffectUnknown("the answer never came"), "again")
    for _ in range(2):
        with pytest.raises(EffectUnknown):
            bench.process().once(bench.event, "receipt", outside, interrupted="bury")
    assert outside.calls == 1
    assert bench.rows() == [("receipt", False, 1)]


# ── failed by its own account ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interrupted", ["retry", "bury"])
def test_a_call_that_failed_by_its_own_account_is_made_again(
    bench: EffectBench, interrupted: Any
) -> None:
    outside = Outside(ConnectionRefusedError("closed"), "sent")
    with heard() as signals, pytest.raises(ConnectionRefusedError):
        bench.process().once(bench.event, "receipt", outside, interrupted=interrupted)
    assert signals == ["Started"]
    assert bench.rows() == []
    with heard() as signals:
        sent = bench.process().once(bench.event, "receipt", outside, interrupted=interrupted)
    assert sent == "sent"
    assert "Interrupted" not in signals


def test_stop_iteration_is_a_failure_like_any_other(bench: EffectBench) -> None:
    outside = Outside(StopIteration("sent"), "sent later")
    with pytest.raises(RuntimeError):
        bench.process().once(bench.event, "receipt", outside)
    assert bench.rows() == []


# ── rivals ─────────────────────────────────────────────────────────────────────────────────────


def test_the_first_result_on_record_wins(bench: EffectBench) -> None:
    def overtaken() -> str:
        rival = bench.process().once(bench.event, "receipt", Outside("rival's"))
        assert rival == "rival's"
        return "late"

    assert bench.process().once(bench.event, "receipt", overtaken) == "rival's"
    assert bench.process().once(bench.event, "receipt", Outside("never")) == "rival's"


def test_a_rival_that_is_done_just_before_a_second_call_prevents_it(bench: EffectBench) -> None:
    bench.die_in_call()
    recording = bench.process()
    outside = Outside("late")

    def record(_interrupted: EffectInterrupted) -> None:
        unsubscribe(record)
        recording.once(bench.event, "receipt", Outside("rival's"))

    subscribe(EffectInterrupted, record)
    assert bench.process().once(bench.event, "receipt", outside) == "rival's"
    assert outside.calls == 0
    assert bench.rows() == [("receipt", True, 2)]


def test_a_result_is_recorded_even_where_the_call_was_taken_off_the_record(
    bench: EffectBench,
) -> None:
    def send() -> str:
        bench.ask("DELETE FROM events.effect WHERE event_uuid = %s", bench.event)
        return "sent"

    assert bench.process().once(bench.event, "receipt", send) == "sent"
    assert bench.process().once(bench.event, "receipt", Outside("no")) == "sent"


def test_a_failed_call_takes_back_its_own_record_and_no_rivals(bench: EffectBench) -> None:
    def outlived() -> None:
        # A rival begins after this one and is killed: that call remains unknown.
        bench.die_in_call()
        raise ConnectionResetError("failed, by its own account")

    with pytest.raises(ConnectionResetError):
        bench.process().once(bench.event, "receipt", outlived)
    with pytest.raises(EffectUnknown):
        bench.process().once(bench.event, "receipt", Outside("no"), interrupted="bury")


def test_of_many_rivals_one_calls_where_unknown_means_bury(bench: EffectBench) -> None:
    outside = Outside("sent")
    start = threading.Barrier(RIVALS)
    processes = [bench.process() for _ in range(RIVALS)]

    def race(process: Effects) -> str:
        start.wait()
        try:
            return str(process.once(bench.event, "receipt", outside, interrupted="bury"))
        except EffectUnknown:
            return "unknown"

    with ThreadPoolExecutor(RIVALS) as pool:
        seen = list(pool.map(race, processes))
    assert outside.calls == 1
    assert set(seen) <= {"sent", "unknown"}
    assert "sent" in seen


def test_a_call_that_another_process_is_in_is_unknown_too(
    bench: EffectBench, database_url: str, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.effect_child"),
            *(database_url, str(tmp_path), bench.event, "bury", "wait"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        wait_until(lambda: len(outside_calls(tmp_path)) == 1, what="the child is in its call")
        here = bench.process(CONSUMER)
        with pytest.raises(EffectUnknown, match="has not returned"):
            here.once(bench.event, EFFECT, Outside("here"), interrupted="bury")
        assert here.once(bench.event, EFFECT, Outside("here"), interrupted="retry") == "here"
        (tmp_path / "go").touch()
        printed, _ = child.communicate()
    # The child's own call returned something else, and later.
    assert json.loads(printed) == {"result": "here"}


# ── what cannot be asked ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("effect", "fn", "options", "says"),
    [
        ("", print, {}, "1 to 200 characters"),
        ("x" * (EFFECT_LENGTH_MAX + 1), print, {}, "1 to 200 characters"),
        (7, print, {}, "1 to 200 characters"),
        ("a\0b", print, {}, "NUL"),
        ("receipt", "print", {}, "a str instead of a function"),
        ("receipt", print, {"interrupted": "guess"}, 'interrupted="retry" or'),
        ("receipt", print, {"returns": 7}, "names no type"),
        ("receipt", print, {"returns": "NotDefinedAnywhere"}, "names no type"),
        ("receipt", print, {"returns": object()}, "names no type"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_call(
    bench: EffectBench, effect: Any, fn: Any, options: dict[str, Any], says: str
) -> None:
    process = bench.process()
    with pytest.raises(UsageError, match=says):
        process.once(bench.event, effect, fn, **options)
    with pytest.raises(UsageError, match=says):
        asyncio.run(process.once_async(bench.event, effect, fn, **options))
    assert bench.rows() == []


def test_the_longest_name_fits(bench: EffectBench) -> None:
    name = "ä" * EFFECT_LENGTH_MAX
    assert bench.process().once(bench.event, name, Outside(1)) == 1
    assert bench.rows() == [(name, True, 1)]


# ── rehearsals ─────────────────────────────────────────────────────────────────────────────────


def test_a_rehearsal_calls_nothing_and_writes_nothing(bench: EffectBench) -> None:
    outside = Outside("sent")
    process = bench.process()
    with pytest.raises(EffectReached) as reached:
        process.once(bench.event, "receipt", outside, is_dry_run=True)
    assert reached.value.effect == "receipt"
    assert not isinstance(reached.value, Exception)
    assert bench.rows() == []
    bench.die_in_call()
    with pytest.raises(EffectReached):
        process.once(bench.event, "receipt", outside, is_dry_run=True)
    assert outside.calls == 0
    assert bench.rows() == [("receipt", False, 1)]
    process.once(bench.event, "receipt", outside)
    assert process.once(bench.event, "receipt", Outside("no"), is_dry_run=True) == "sent"


# ── async def ──────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_call_is_unknown(bench: EffectBench) -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def endless() -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(bench.process().once_async(bench.event, "receipt", endless))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert bench.rows() == [("receipt", False, 1)]


def test_a_failed_async_call_is_made_again(bench: EffectBench) -> None:
    outside = Outside(ConnectionRefusedError("closed"), "sent")

    async def send() -> Any:
        return outside()

    async def scenario() -> str:
        process = bench.process()
        with pytest.raises(ConnectionRefusedError):
            await process.once_async(bench.event, "receipt", send, interrupted="bury")
        return str(await process.once_async(bench.event, "receipt", send, interrupted="bury"))

    assert asyncio.run(scenario()) == "sent"
    assert outside.calls == 2


def test_the_loop_goes_on_while_a_call_is_recorded(bench: EffectBench, database_url: str) -> None:
    async def scenario() -> None:
        async def send() -> str:
            return "sent"

        with psycopg.connect(database_url) as blocker:
            blocker.execute("LOCK TABLE events.effect")
            task = asyncio.create_task(bench.process().once_async(bench.event, "receipt", send))
            turns = 0
            while turns < 100 and not task.done():
                await asyncio.sleep(0.001)
                turns += 1
            assert turns == 100
        assert await task == "sent"

    asyncio.run(scenario())


# ── Context ────────────────────────────────────────────────────────────────────────────────────


class Placed(Event, type="effects.placed", version=1):
    """An order."""

    number: int


def context(bench: EffectBench, **more: Any) -> Context:
    entry = Entry("orders", 1, "", bench.event, "effects.placed", 1, (b"",) * 6, b"{}")
    return Context("shop.mail", entry, effects=bench.process(), **more)


def test_a_context_passes_arguments_on_whatever_they_are_called(bench: EffectBench) -> None:
    def send(*args: Any, **kwargs: Any) -> Any:
        return [args, kwargs]

    asked = context(bench).once("receipt", send, 1, effect="e", fn="f", self="s")
    assert asked == [[1], {"effect": "e", "fn": "f", "self": "s"}]
    with pytest.raises(EffectReached):
        context(bench, is_dry_run=True).once("label", send)


def test_a_context_gives_something_to_await_for_whatever_is_async(bench: EffectBench) -> None:
    async def send(name: str) -> str:
        return name

    class Sender:
        async def __call__(self, name: str) -> str:
            return name

        async def method(self, name: str) -> str:
            return name

    sender = Sender()
    asked = context(bench)

    async def scenario() -> list[Any]:
        return [
            await asked.once("a", send, "function"),
            await asked.once("b", functools.partial(functools.partial(send), "partial")),
            await asked.once("c", sender, "callable"),
            await asked.once("d", sender.method, "method"),
            await asked.once("f", functools.partial(sender, "both")),
            # A plain function inside of an async handler is called there and then.
            asked.once("e", str, "plain"),
            await asked.once("a", send, "never"),
        ]

    seen = asyncio.run(scenario())
    assert seen == ["function", "partial", "callable", "method", "both", "plain", "function"]


def test_a_lambda_that_only_makes_a_coroutine_is_refused(bench: EffectBench) -> None:
    ran = Outside(1)

    async def send(_address: str) -> None:
        ran()

    with pytest.raises(UsageError, match="pass the async function itself"):
        context(bench).once("receipt", lambda: send("a@example.com"))
    assert ran.calls == 0
    assert bench.rows() == []


def test_a_context_without_a_place_to_record_refuses(bench: EffectBench) -> None:
    outside = Outside(1)
    with pytest.raises(UsageError, match="nowhere to record"):
        Context("shop.mail", context(bench).entry).once("receipt", outside)
    assert outside.calls == 0


# ── penstock.testing ───────────────────────────────────────────────────────────────────────────


def test_a_delivered_event_calls_and_remembers_without_servers() -> None:
    outside = Outside((1, 2), (3, 4))

    def handler(event: Placed, context: Context) -> Any:
        first = context.once("receipt", outside, returns=tuple[int, int])
        return [first, context.once("receipt", outside), context.once("label", str, event.number)]

    assert deliver(handler, Placed(number=7)) == [(1, 2), [1, 2], "7"]
    assert outside.calls == 1
    # Another delivery is another event.
    deliver(handler, Placed(number=7))
    assert outside.calls == 2


def test_a_delivered_event_refuses_what_production_refuses() -> None:
    def wrong_name(event: Placed, context: Context) -> None:
        context.once("", print)

    async def unkeepable(event: Placed, context: Context) -> None:
        async def send() -> object:
            return object()

        await context.once("receipt", send)

    with pytest.raises(UsageError):
        deliver(wrong_name, Placed(number=1))
    with pytest.raises(Exception, match="could not be kept"):
        asyncio.run(deliver(unkeepable, Placed(number=1)))
