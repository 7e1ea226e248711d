"""A range is delivered again: to one consumer only, exactly once, and without a trace."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.app import Pipeline
from penstock.core.options import ConsumerOptions
from penstock.core.replays import CANCELLED
from penstock.errors import ConsumerUnknown, OperationRefused, RegistrationError, UsageError
from penstock.ops import consumers
from penstock.ops.consumers import Consumers
from penstock.ops.replay_planning import ReplayPlanner, ReplayRequest
from penstock.ops.replays import ReplayBooks
from penstock.stores.inbox import Inbox
from penstock.stores.operations import Operation
from penstock.stores.replays import NoStart, Replays
from tests.bench_of_one import Workbench
from tests.replay_app import CONSUMER, TABLES
from tests.test_cli import Done, Penstock
from tests.waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).parent.parent
EVENTS = 40
MANY = 2000
NAME = f"{CONSUMER}@again"
REPLAY = ("--app", "tests.replay_app:pipeline", "replay")
LEASES = "SELECT role, owner_id, term, checkpoint FROM events.stream_lease ORDER BY role"
START = (*REPLAY, "--consumer", "bill", "--stream", "orders", "--name", "again")


class Command(Penstock):
    """Each command imports the application anew, as a process of its own would."""

    def __call__(self, *arguments: str, code: int = 0, stdin: str = "", **variables: str) -> Done:
        with pytest.MonkeyPatch.context() as world:
            world.delitem(sys.modules, "tests.replay_app", raising=False)
            return super().__call__(*arguments, code=code, stdin=stdin, **variables)


class Shop:
    """A stream whose events one consumer has handled, and what a replay of it brings about."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.connection = bench.connection
        self.connection.execute(TABLES.encode())
        bench.send(EVENTS)
        bench.publish()

    def live(self, checkpoint: int = EVENTS) -> None:
        """The live consumer, as its worker leaves it."""
        options = ConsumerOptions(stream_name="orders", name="bill")
        Inbox().register(self.connection, CONSUMER, options, self.ask("SELECT now()")[0][0])
        self.connection.execute(
            "UPDATE events.stream_lease SET checkpoint = %s WHERE role = %s",
            (checkpoint, f"consumer:{CONSUMER}"),
        )
        self.connection.execute(
            "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
            " SELECT %s, event_uuid, position, 'handled' FROM events.outbox_event"
            "  WHERE position <= %s",
            (CONSUMER, checkpoint),
        )

    def ask(self, query: str, *parameters: Any) -> list[Any]:
        return self.connection.execute(query.encode(), parameters).fetchall()

    def handled(self) -> list[int]:
        return [p for (p,) in self.ask("SELECT position FROM effect ORDER BY position")]

    def by_key(self) -> list[list[int]]:
        rows = self.ask("SELECT array_agg(position ORDER BY serial) FROM effect GROUP BY key")
        return [positions for (positions,) in rows]

    def bad(self, *positions: int) -> None:
        for position in positions:
            self.ask("INSERT INTO bad (position) VALUES (%s) RETURNING 1", position)

    def mend(self) -> None:
        self.connection.execute("TRUNCATE bad")

    def rows_of_replays(self) -> int:
        """Everything in the books that has a replay's name."""
        tables = ("processed_event", "parked_event", "dead_letter", "suspect", "worker", "effect")
        counts = [
            self.ask(f"SELECT count(*) FROM events.{table} WHERE consumer LIKE '%%@%%'")[0][0]  # noqa: S608
            for table in tables
        ]
        counts += self.ask("SELECT count(*) FROM events.stream_lease WHERE role LIKE '%%@%%'")[0]
        counts += self.ask("SELECT count(*) FROM events.consumer WHERE name LIKE '%%@%%'")[0]
        return sum(counts)

    def record(self) -> tuple[Any, ...]:
        ((*record,),) = self.ask(
            "SELECT consumer, criteria ->> 'replay', events, failed, ended_as"
            "  FROM events.operation WHERE kind = 'replay'"
        )
        return tuple(record)

    def books(self) -> ReplayBooks:
        return ReplayBooks(self.connection)

    def begin(self, **request: Any) -> str:
        given = {"first": 1, "label": "again", **request}
        planner = ReplayPlanner(self.connection, self.bench.settings)
        plan = planner.begin(ReplayRequest(original=CONSUMER, **given), by="me")
        return plan.replay.name


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    with closing(Workbench(database_url, None)) as bench:
        shop = Shop(bench)
        shop.live()
        yield shop


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    variables = {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": "none",
        "PENSTOCK_LEASE_SECONDS": "1.0",
        "PENSTOCK_LEASE_RENEW_SECONDS": "0.3",
        "PYTHONPATH": str(ROOT),
    }
    return Command(tmp_path, variables, capsys)


# ── the whole way ──────────────────────────────────────────────────────────────────────────────


def test_a_range_is_delivered_again_and_leaves_nothing_but_a_record(
    shop: Shop, penstock: Penstock
) -> None:
    before = shop.ask(LEASES)
    # It ends within a batch.
    done = penstock(*START, "--from", "11", "--to", "28")
    assert f"{NAME} is finished: 18 handled, 0 skipped, 0 parked, 0 dead" in done.stdout
    assert shop.handled() == list(range(11, 29))
    assert shop.ask("SELECT DISTINCT is_replay FROM effect") == [(True,)]
    assert all(positions == sorted(positions) for positions in shop.by_key())
    assert shop.ask(LEASES) == before
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, 18, 0, "done")
    assert json.loads(penstock(*REPLAY, "list", "--json").stdout) == []


def test_several_lanes_share_a_replay(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAY_LANES", "3")
    shop.connection.execute(
        "SELECT events.begin_epoch(%s, 3)", (CONSUMER,), prepare=False
    ).fetchall()
    done = penstock(*START, "--from", "1", "--json")
    assert json.loads(done.stdout)["handled"] == EVENTS
    assert shop.handled() == list(range(1, EVENTS + 1))
    assert all(positions == sorted(positions) for positions in shop.by_key())
    assert shop.rows_of_replays() == 0


def test_calls_to_the_outside_are_those_of_the_original(
    shop: Shop, penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    monkeypatch.setenv("REPLAY_OUTSIDE", str(outside))
    # What the live consumer has called is on record under its own name.
    shop.connection.execute(
        "INSERT INTO events.effect (consumer, event_uuid, effect, is_done, result, host)"
        " SELECT %s, event_uuid, 'charge', true, '7', 'live' FROM events.outbox_event"
        "  WHERE position <= 3",
        (CONSUMER,),
    )
    penstock(*START, "--from", "2", "--to", "5")
    assert outside.read_text().split() == ["4", "5"]
    assert shop.ask("SELECT DISTINCT consumer FROM events.effect") == [(CONSUMER,)]
    penstock(*REPLAY, "--consumer", "bill", "--from", "2", "--to", "5")
    assert outside.read_text().split() == ["4", "5"]
    assert shop.ask("SELECT count(DISTINCT idempotency_key) FROM effect") == [(4,)]


def test_dead_letters_stay_until_they_are_redriven_and_the_replay_is_resumed(
    shop: Shop, penstock: Penstock
) -> None:
    shop.bad(4, 9)
    done = penstock(*START, "--from", "1", "--to", "12", code=1)
    assert "10 handled, 0 skipped, 0 parked, 2 dead" in done.stdout
    assert f"dead-letters list --consumer {NAME}" in done.stderr
    assert shop.record() == (CONSUMER, NAME, 12, 2, "done")
    (progress,) = shop.books().all()
    assert (progress.state, progress.dead) == ("finished", 2)
    # It needs nothing of the outbox any more.
    assert shop.ask("SELECT name FROM events.reader WHERE name LIKE '%%@%%'") == []
    shop.mend()
    redrive_all(shop, 2)
    resumed = penstock(*REPLAY, "--resume", "again")
    assert "is finished: 12 handled" in resumed.stdout
    assert shop.handled() == list(range(1, 13))
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, 12, 0, "done")


def redrive_all(shop: Shop, count: int) -> None:
    """As `dead-letters redrive` marks them; the replay's own lanes handle them."""
    operation = Operation(shop.connection, "redrive", {}, consumer=NAME, by="me", reason="")
    ids = [number for (number,) in shop.ask("SELECT id FROM events.dead_letter")]
    assert operation.move(ids) == count
    operation.end("done")


def test_a_redrive_and_the_resumed_replay_beside_it_both_come_to_their_end(
    shop: Shop, penstock: Penstock
) -> None:
    """The redrive moves its letters in several goes, and between them there is nothing to do."""
    shop.bad(*range(1, 16))
    done = penstock(*START, "--from", "1", code=1)
    shop.mend()
    redrive = penstock.start("dlq", "redrive", "--consumer", NAME, "--rate", "10/s", "--yes")
    try:
        wait_until(lambda: bool(shop.ask("SELECT 1 FROM events.parked_event")), what="letters wait")
        resumed = penstock(*REPLAY, "--resume", "again")
        stdout, stderr = redrive.communicate(timeout=SOON_SECONDS)
    finally:
        redrive.kill()
    assert f"is finished: {EVENTS} handled, 0 skipped, 0 parked, 0 dead" in resumed.stdout
    assert "15 handled, 0 failed, 0 in flight" in stdout
    assert redrive.returncode == 0, stderr
    beside = f"`penstock replay --resume {NAME}` beside it"
    assert f"`penstock dead-letters redrive --consumer {NAME}` with {beside}" in done.stderr
    assert f"{NAME} is a replay: run `penstock replay --resume {NAME}` beside this" in stderr
    assert shop.handled() == list(range(1, EVENTS + 1))
    assert shop.rows_of_replays() == 0
    # The record of the redrive outlives the replay's rows.
    assert shop.ask(
        "SELECT consumer, criteria ->> 'replay', events, ended_as"
        "  FROM events.operation WHERE kind = 'redrive'"
    ) == [(CONSUMER, NAME, 15, "done")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("", True),
        ("consumer = NULL", True),
        ("consumer = 'shop.ship'", False),
        ("ended_at = now()", False),
        ("started_at = now() - interval '1 hour'", False),
        (
            "started_at = now() - interval '1 hour', outcomes = jsonb_build_object('at', now())",
            True,
        ),
        ("outcomes = jsonb_build_object('at', now() - interval '1 hour')", False),
    ],
)
def test_a_replay_awaits_a_redrive_that_is_alive(
    shop: Shop, penstock: Penstock, change: str, expected: bool
) -> None:
    shop.bad(4)
    penstock(*START, "--from", "1", "--to", "12", code=1)
    assert not shop.books().look(NAME).has_work
    Operation(shop.connection, "redrive", {}, consumer=NAME, by="me", reason="")
    if change:
        shop.connection.execute(
            f"UPDATE events.operation SET {change} WHERE kind = 'redrive'".encode()  # noqa: S608
        )
    assert shop.books().look(NAME).has_work is expected


def test_a_replay_that_has_work_again_goes_on(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.bad(4)
    penstock(*START, "--from", "1", "--to", "12", code=1)
    shop.mend()
    work = Pipeline.run_replay

    def rest_first(*arguments: Any, **named: Any) -> None:
        """A redrive moves its letters right after the replay came to rest."""
        monkeypatch.setattr(Pipeline, "run_replay", work)
        redrive_all(shop, 1)

    monkeypatch.setattr(Pipeline, "run_replay", rest_first)
    assert "is finished: 12 handled" in penstock(*REPLAY, "--resume", "again").stdout


def test_letters_on_their_way_are_no_matter_for_an_operator(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.bad(4)
    penstock(*START, "--from", "1", "--to", "12", code=1)
    redrive_all(shop, 1)

    def pause(*_: Any, **__: Any) -> None:
        shop.books().pause(NAME, by="me")

    monkeypatch.setattr(Pipeline, "run_replay", pause)
    said = penstock(*REPLAY, "--resume", "again", code=130)
    assert "1 parked, 0 dead" in said.stdout
    assert f"`penstock replay --resume {NAME}` continues it." in said.stderr
    assert "dead-letters" not in said.stderr


# ── asking first ───────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_says_how_many_from_where_and_changes_nothing(
    shop: Shop, penstock: Penstock
) -> None:
    shop.connection.execute(
        "INSERT INTO events.hole (stream_name, first, last, reason) VALUES ('orders', 5, 6, 't')"
    )
    said = penstock(*START, "--from", "3", "--to", "12", "--dry-run").stdout
    assert "8 events of orders, 3..12, would be delivered again to shop.bill" in said
    assert "3..12 from the outbox" in said
    plan = json.loads(penstock(*START, "--since", "1h", "--dry-run", "--json").stdout)
    assert (plan["replay"]["first"], plan["replay"]["last"]) == (1, EVENTS)
    assert shop.rows_of_replays() == 0
    assert shop.ask("SELECT count(*) FROM events.operation") == [(0,)]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"first": 1, "last": 41}, OperationRefused, "write --to 40"),
        ({"first": 12, "last": 11}, OperationRefused, "the range is empty"),
        ({"first": 2, "last": 20}, OperationRefused, "can be delivered again is 5"),
        ({"first": 5, "stream_name": "parcels"}, UsageError, "reads orders, not parcels"),
        ({"first": 5, "label": "a b"}, UsageError, "cannot name a replay"),
        ({}, UsageError, "either --from, or --since"),
    ],
)
def test_what_cannot_be_delivered_again_is_refused(
    shop: Shop, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    shop.connection.execute("DELETE FROM events.outbox_event WHERE position < 5")
    with pytest.raises(error, match=words):
        shop.begin(**{"first": None, **given})
    assert shop.rows_of_replays() == 0
    assert shop.ask("SELECT count(*) FROM events.operation") == [(0,)]


def test_names_are_dates_with_numbers_and_never_used_twice(shop: Shop) -> None:
    first, second = shop.begin(label=None), shop.begin(label=None)
    assert first.startswith(f"{CONSUMER}@20")
    assert (first[-2:], second[-2:]) == ("-1", "-2")
    shop.books().cancel(second)
    assert shop.begin(label=None).endswith("-3")
    shop.begin()
    with pytest.raises(OperationRefused, match=r"--resume shop\.bill@again"):
        shop.begin()


# ── pause, resume, cancel ──────────────────────────────────────────────────────────────────────


def test_a_cancelled_replay_is_gone_and_never_becomes_an_endless_consumer(shop: Shop) -> None:
    name = shop.begin()
    shop.books().cancel(name)
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, 0, 0, "cancelled")
    options = ConsumerOptions(stream_name="orders", name="bill")
    now = shop.ask("SELECT now()")[0][0]
    with pytest.raises(ConsumerUnknown, match="somebody finished or cancelled it"):
        Inbox(starts=NoStart()).register(shop.connection, name, options, now)
    assert shop.rows_of_replays() == 0


def test_a_cancelled_replay_ends_the_process_that_works_on_it(
    shop: Shop, penstock: Penstock
) -> None:
    shop.bad(1)
    shop.begin()
    shop.connection.execute("DELETE FROM events.consumer WHERE name = %s", (NAME,))
    said = penstock(*REPLAY, "--resume", "again", code=1).stderr
    assert "There is no replay 'again'" in said


def test_replays_are_listed_paused_and_protected(shop: Shop, penstock: Penstock) -> None:
    shop.begin(last=10)
    (listed,) = json.loads(penstock(*REPLAY, "list", "--json").stdout)
    assert (listed["name"], listed["state"], listed["total"]) == (NAME, "interrupted", 10)
    assert NAME in penstock(*REPLAY, "list").stdout
    assert "is paused" in penstock(*REPLAY, "pause", "again").stdout
    assert "paused already" in penstock(*REPLAY, "pause", NAME).stdout
    assert shop.books().look(NAME).state == "paused"
    for refused in (
        ("consumers", "seek", NAME, "--to", "3", "--yes"),
        ("consumers", "rename", NAME, "shop.other", "--yes"),
        ("consumers", "forget", NAME, "--yes"),
    ):
        with pytest.raises(AssertionError):
            penstock(*refused)
    with pytest.raises(OperationRefused, match=r"while there are replays of it: shop\.bill@again"):
        Consumers(shop.connection).forget(CONSUMER)
    with pytest.raises(RegistrationError):
        ConsumerOptions(stream_name="orders", name="bill@again")
    assert "is cancelled" in penstock(*REPLAY, "cancel", "again").stdout
    assert shop.rows_of_replays() == 0


def test_the_books_know_where_a_replay_ends(shop: Shop, penstock: Penstock) -> None:
    shop.begin(first=5, last=10)
    report = json.loads(penstock("verify", "--json").stdout)
    assert report["balance"]
    (books,) = [b for s in report["streams"] for b in s["consumers"] if b["name"] == NAME]
    assert (books["due"], books["pending"], books["before"], books["behind"]) == (6, 6, 4, 30)
    status = json.loads(penstock("status", "--json").stdout)
    lags = {c["name"]: (c["lag_events"], c["replay_of"]) for c in status["consumers"]}
    assert lags == {CONSUMER: (0, None), NAME: (6, CONSUMER)}
    assert "penstock replay --resume" in penstock("status", "--check", code=1).stdout
    penstock(*REPLAY, "resume", "again")
    assert json.loads(penstock("verify", "--json").stdout)["balance"]


def test_the_numbers_of_an_end_that_was_interrupted_stay(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "FORGET_BATCH", 5)
    with monkeypatch.context() as world:
        world.setattr(ReplayBooks, "finish", lambda books, name, **_: books.tally(name))
        penstock(*START, "--from", "1", "--to", "18")
    with pytest.raises(KeyboardInterrupt):
        shop.books().finish(NAME, on_progress=_interrupt)
    assert json.loads(penstock("verify", "--json").stdout)["balance"]
    assert "is finished: 18 handled" in penstock(*REPLAY, "--resume", "again").stdout
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, 18, 0, "done")


def test_a_cancel_that_was_interrupted_can_only_be_finished(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "FORGET_BATCH", 5)
    shop.bad(1)
    penstock(*START, "--from", "1", "--to", "18", code=1)
    with pytest.raises(KeyboardInterrupt):
        shop.books().cancel(NAME, on_progress=_interrupt)
    said = penstock(*REPLAY, "--resume", "again", code=1).stderr
    assert "penstock replay cancel" in said
    penstock(*REPLAY, "cancel", "again", "--yes")
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, 18, 1, "cancelled")


def test_a_replay_that_is_being_cancelled_is_not_called_paused(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.begin(last=10)

    def cancel(*_: Any, **__: Any) -> None:
        """What the worker meets: whoever cancels a replay makes it let go first."""
        shop.books().pause(NAME, by="me", reason=CANCELLED)

    monkeypatch.setattr(Pipeline, "run_replay", cancel)
    said = penstock(*REPLAY, "--resume", "again", code=130)
    assert "is being cancelled: 0 handled" in said.stdout
    assert "--resume" not in said.stderr


def _interrupt(_deleted: int) -> None:
    raise KeyboardInterrupt


# ── crashes and signals, in processes of their own ─────────────────────────────────────────────


@pytest.mark.slow
def test_sigterm_pauses_a_replay_and_resume_completes_it(shop: Shop, penstock: Penstock) -> None:
    # So many that nobody can handle them all before a signal is heeded.
    total = EVENTS + MANY
    shop.bench.send(MANY)
    shop.bench.publish()
    shop.ask(
        "UPDATE events.stream_lease SET checkpoint = %s WHERE role <> 'publisher' RETURNING 1",
        total,
    )
    # A table that nobody may touch holds the replay up in the middle of a batch.
    with psycopg.connect(shop.bench.settings.database_url) as holder:
        holder.execute("LOCK TABLE effect IN ACCESS EXCLUSIVE MODE")
        process = penstock.start(*START, "--from", "1")
        wait_until(lambda: is_waiting(shop), what="the handler waits for the table")
        process.send_signal(signal.SIGTERM)
        holder.rollback()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "is paused" in stdout
    assert f"penstock replay --resume {NAME}" in stderr
    (progress,) = shop.books().all()
    assert 0 < progress.passed < total
    assert (progress.state, progress.workers) == ("paused", 0)
    assert "finished" in penstock(*REPLAY, "--resume", NAME).stdout
    assert shop.handled() == list(range(1, total + 1))
    assert shop.rows_of_replays() == 0


def is_waiting(shop: Shop) -> bool:
    return bool(
        shop.ask(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            "   AND query LIKE '%%INSERT INTO effect%%'"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["BatchClaimed:kill:3", "BatchSealed:kill:2"])
def test_a_killed_replay_continues_exactly_once(
    shop: Shop, penstock: Penstock, moment: str
) -> None:
    assert_survives(shop, penstock, moment)


@pytest.mark.long
@pytest.mark.parametrize(
    "moment",
    [
        "ConsumerRegistered:kill",
        "LeaseAcquired:kill",
        "BatchRead:kill:2",
        "EventHandled:kill:13",
        "BatchCommitted:kill:4",
        "EventParked:kill",
        "ParkedHandled:kill",
        "LeaseReleased:kill",
        "WorkerStopped:kill",
        "ReplayFinished:kill",
    ],
)
def test_a_replay_killed_anywhere_continues_exactly_once(
    shop: Shop, penstock: Penstock, moment: str
) -> None:
    assert_survives(shop, penstock, moment)


@pytest.mark.long
def test_a_replay_ends_though_its_killed_worker_is_not_forgotten_yet(
    shop: Shop, penstock: Penstock
) -> None:
    process = penstock.start(*START, "--from", "1", FAILPOINT="BatchCommitted:kill")
    process.communicate(timeout=60)
    shop.ask(
        "UPDATE events.worker SET alive_until = clock_timestamp() + interval '6 s' RETURNING 1"
    )
    penstock(*REPLAY, "--resume", "again", LEASE_SECONDS="10")
    assert shop.rows_of_replays() == 0


def test_a_replay_ends_though_only_a_lease_tells_of_its_killed_worker(
    shop: Shop, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be forgotten before its lease runs out, and while somebody looks."""
    end_for_real = Replays.end

    def end(replays: Replays, *arguments: Any) -> Any:
        assert shop.ask(
            "UPDATE events.stream_lease SET owner_id = 'killed', lease_until = clock_timestamp()"
            " + interval '0.3 s' WHERE role ~ '@again' RETURNING 1"
        )
        monkeypatch.setattr(Replays, "end", end_for_real)
        return end_for_real(replays, *arguments)

    monkeypatch.setattr(Replays, "end", end)
    penstock(*START, "--from", "1")
    assert shop.rows_of_replays() == 0


def assert_survives(shop: Shop, penstock: Penstock, moment: str) -> None:
    if "Parked" in moment:
        # It fails once, and has one more attempt.
        shop.bad(7)
    process = penstock.start(*START, "--from", "1", FAILPOINT=moment)
    if "ParkedHandled" in moment:
        wait_until(
            lambda: bool(shop.ask("SELECT 1 FROM events.parked_event")), what="an event is parked"
        )
        shop.mend()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, stderr
    shop.mend()
    if "ReplayFinished" not in moment:
        penstock(*REPLAY, "--resume", "again")
    assert shop.handled() == list(range(1, EVENTS + 1))
    assert all(positions == sorted(positions) for positions in shop.by_key())
    assert shop.rows_of_replays() == 0
    assert shop.record() == (CONSUMER, NAME, EVENTS, 0, "done")
