"""Timers in Redis on the command line: listed, shown, cancelled, redriven, and their processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import Pipeline
from penstock.cli.invocation import Invocation
from penstock.cli.running import choose_roles
from penstock.cli.supervision import Supervision, process_specs
from penstock.errors import RegistrationError, SettingsError
from penstock.ops.redis_timers import BODY_SHOWN_MAX, content_of
from penstock.stores.servers import Servers
from penstock.stores.timer_queue import RedisTimers
from tests.test_cli import Penstock
from tests.timers_at_work import arm, envelope

TOPIC = "reminders"
TOPICS = ["a", "b"]


@pytest.fixture
def penstock(tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    # Not a word about PostgreSQL: timers in Redis have to do without it.
    return Penstock(tmp_path, {"PENSTOCK_REDIS_URL": redis_url}, capsys)


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisTimers]:
    """Two timers that wait, one that failed, and a dead one."""
    with closing(RedisTimers(redis_url)) as store:
        for timer_id in ("failed", "dead"):
            arm(store, TOPIC, timer_id, {"order": 7})
        for timer in store.claim(TOPIC, count=9, lease_seconds=9).timers:
            if timer.timer_id == "failed":
                store.retry(timer, delay_seconds=300)
            else:
                store.bury(timer, error_type="ValueError", error_message="no \x1b[2J order")
        arm(store, TOPIC, "soon", {"order": 8}, delay_seconds=60, correlation_id="c-1")
        arm(store, TOPIC, "late", "text", delay_seconds=86_400)
        yield store


def answer(penstock: Penstock, *arguments: str) -> Any:
    return json.loads(penstock("timers", *arguments, "--topic", TOPIC, "--json").stdout)


def test_timers_of_a_topic_are_listed_the_next_one_first(
    penstock: Penstock, store: RedisTimers
) -> None:
    listed = answer(penstock, "list")
    assert [each["timer_id"] for each in listed["timers"]] == ["soon", "failed", "late"]
    assert [each["state"] for each in listed["timers"]] == ["pending", "retrying", "pending"]
    assert [each["attempts"] for each in listed["timers"]] == [0, 1, 0]
    assert answer(penstock, "list", "--limit", "1")["has_more"]
    before = answer(penstock, "list", "--before", "1h")
    assert [each["timer_id"] for each in before["timers"]] == ["soon", "failed"]
    table = penstock("timers", "list", "--topic", TOPIC).stdout
    assert "retrying" in table
    (dead,) = answer(penstock, "list", "--dead")["dead"]
    assert (dead["timer_id"], dead["error_type"], dead["attempts"]) == ("dead", "ValueError", 1)
    shown = penstock("timers", "list", "--topic", TOPIC, "--dead").stdout
    assert "ValueError" in shown
    assert "\x1b" not in shown


def test_a_timer_is_shown_with_what_it_carries(penstock: Penstock, store: RedisTimers) -> None:
    shown = answer(penstock, "show", "soon")
    assert shown["body"] == '{"order":8}'
    assert shown["headers"]["correlation_id"] == "c-1"
    assert "c-1" in penstock("timers", "show", "soon", "--topic", TOPIC).stdout
    assert answer(penstock, "show", "dead", "--dead")["error_message"] == "no \x1b[2J order"
    text = penstock("timers", "show", "dead", "--dead", "--topic", TOPIC).stdout
    assert '{"order":7}' in text
    assert "\x1b" not in text


def test_timers_are_cancelled_redriven_and_discarded(
    penstock: Penstock, store: RedisTimers
) -> None:
    assert answer(penstock, "cancel", "soon")["cancelled"]
    assert "is redriven" in penstock("timers", "redrive", "dead", "--topic", TOPIC).stdout
    assert store.counts(TOPIC) == (3, 0)
    (again,) = store.claim(TOPIC, count=9, lease_seconds=9).timers
    assert (again.timer_id, again.attempt) == ("dead", 1)
    store.bury(again, error_type="E", error_message="")
    assert answer(penstock, "discard", "dead")["discarded"] == ["dead"]
    assert store.counts(TOPIC) == (2, 0)


def test_only_timers_in_redis_do_without_postgresql(
    penstock: Penstock, store: RedisTimers, redis_url: str
) -> None:
    elsewhere = replace(penstock, variables={"PENSTOCK_TIMER_REDIS_URL": redis_url})
    assert "soon" in elsewhere("timers", "list", "--topic", TOPIC).stdout
    for command in (["list"], ["show", "soon"], ["cancel", "soon"]):
        assert "where PostgreSQL is" in penstock("timers", *command, code=2).stderr


def test_what_is_not_there_is_said_with_exit_code_1(penstock: Penstock, store: RedisTimers) -> None:
    for command in ("show", "cancel", "redrive", "discard"):
        told = penstock("timers", command, "nobody", "--topic", TOPIC, code=1).stderr
        assert "'nobody'" in told
        assert "Nothing was changed" in told
    arm(store, TOPIC, "dead")
    told = penstock("timers", "redrive", "dead", "--topic", TOPIC, code=1).stderr
    assert "armed since" in told


def test_a_wrong_question_is_refused(penstock: Penstock, store: RedisTimers) -> None:
    for wrong in (["--stream", "s"], ["--held"], ["--before", "soon"], ["--limit", "0"]):
        penstock("timers", "list", "--topic", TOPIC, *wrong, code=2)
    penstock("timers", "list", "--topic", "", code=2)
    penstock("timers", "redrive", "dead", code=2)
    told = penstock("timers", "list", "--topic", TOPIC, code=2, REDIS_URL="none").stderr
    assert "PENSTOCK_TIMER_REDIS_URL" in told


def test_contents_are_shown_within_bounds_and_never_fail() -> None:
    long = content_of(envelope("x" * (BODY_SHOWN_MAX + 1)))
    assert len(long.body) == BODY_SHOWN_MAX + 1
    assert content_of(envelope(b"\xff\xfe")).body == "(2 bytes that are no text)"
    assert content_of(b"\x89BIN\r\n\x1a\n").problem is not None


# ── processes ──────────────────────────────────────────────────────────────────────────────────

APP = """
from penstock import Pipeline
pipeline = Pipeline("shop")

@pipeline.timer("a")
def remind(body: str) -> None: ...

@pipeline.timer("b")
async def remind_b(body: dict) -> None: ...

@pipeline.consumer("orders", name="c")
def consume(event: "StreamEvent") -> None: ...
""".replace("import Pipeline", "import Pipeline, StreamEvent")


def test_a_topic_of_which_nothing_is_known_is_told_from_an_empty_one(
    penstock: Penstock, store: RedisTimers
) -> None:
    (penstock.folder / "timer_topics.py").write_text(APP)
    asked = ("--app", "timer_topics:pipeline", "timers", "list", "--topic")
    told = penstock(*asked, "remindes", code=1).stderr
    assert "no topic 'remindes'" in told
    assert "handlers: a, b" in told
    # Nobody here handles it, but it is there; or nothing is there, and it is handled.
    assert "soon" in penstock(*asked, TOPIC).stdout
    assert penstock(*asked, "a", "--dead").stderr == ""
    # Without an application nobody knows.
    assert "no timers" in penstock("timers", "list", "--topic", "remindes").stderr


def test_topics_are_a_part_of_everything_and_of_the_timers() -> None:
    everything = choose_roles(["c"], publisher=False, globs=(), topics=TOPICS)
    assert everything == ["publisher", "consumer:c", "timer:a", "timer:b"]
    timers = choose_roles(["c"], publisher=False, globs=(), timers=True, topics=TOPICS)
    assert timers == ["timers", "timer:a", "timer:b"]
    assert choose_roles(["c"], publisher=True, globs=(), topics=TOPICS) == ["publisher"]


def test_topics_are_processes_like_consumers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: Servers
) -> None:
    (tmp_path / "timer_shop.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", servers.database_url)
    invocation = Invocation("timer_shop:pipeline")
    roles = ["consumer:c", "timer:a", "timer:b"]
    how = Supervision(environment={}, shutdown_seconds=1, heartbeat_timeout_seconds=1)
    specs = process_specs(invocation, roles, how)
    assert [spec.name for spec in specs] == roles
    assert specs[1].quarantine_as == "shop.timer:a"
    packed = Supervision(
        environment={}, shutdown_seconds=1, heartbeat_timeout_seconds=1, processes=1
    )
    (together,) = process_specs(invocation, roles, packed)
    assert [spec.quarantine_as for spec in together.apart] == [
        "shop.c", "shop.timer:a", "shop.timer:b",
    ]  # fmt: skip


def test_a_role_that_nobody_registered_is_refused() -> None:
    pipeline = Pipeline("shop", database_url="postgresql://127.0.0.1:1/none", redis_url=None)
    for topic in TOPICS:
        pipeline.timer(topic)(lambda: None)
    with pytest.raises(RegistrationError, match=r"no handler of timers 'x'; topics .*: a, b"):
        pipeline.run_worker(["timer:x"], threading.Event())
    with pytest.raises(SettingsError, match="PENSTOCK_TIMER_REDIS_URL"):
        pipeline.check_timers(["timer:a"])
    pipeline.check_timers(["publisher"])
