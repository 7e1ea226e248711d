"""`penstock top` in a real terminal: keys act, sizes change, servers go away and come back."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from penstock.stores.migrations import migrate
from penstock.stores.servers import EmbeddedPostgres
from tests.bookkeeper import BILL
from tests.databases import server_folder
from tests.graveyard import Graveyard
from tests.proxy import Proxy
from tests.terminal import Terminal, open_terminal
from tests.waiting import wait_until

SHIP = "shop.ship_order"
MISSING = "127.0.0.1:1"
PID_FILE = "top.pid"
BEFORE, AFTER = "before.stty", "after.stty"

Opener = Callable[..., Terminal]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens terminals that know a database and are closed in the end."""
    terminals: list[Terminal] = []

    def open_one(database_url: str, *, kind: str | None = None, **variables: str) -> Terminal:
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "TMUX"))}
        given = {"PENSTOCK_DATABASE_URL": database_url, "LANG": "C.UTF-8", **variables}
        terminals.append(open_terminal(tmp_path, {**ours, **given}, kind=kind))
        return terminals[-1]

    yield open_one
    for terminal in terminals:
        terminal.close()


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    graveyard = fill(database_url)
    yield graveyard
    graveyard.connection.close()


@pytest.mark.slow
def test_a_person_pauses_resumes_reads_a_letter_resizes_and_leaves(
    graveyard: Graveyard, database_url: str, redis_url: str, opened: Opener, tmp_path: Path
) -> None:
    # A size that was exported once must not outlive the window's.
    size = {"COLUMNS": "120", "LINES": "40"}
    terminal = opened(database_url, PENSTOCK_REDIS_URL=redis_url, **size)
    walk_through(terminal, graveyard, tmp_path)


@pytest.mark.long
def test_the_same_in_an_emulator_and_without_colours(
    graveyard: Graveyard, database_url: str, opened: Opener, tmp_path: Path
) -> None:
    walk_through(opened(database_url, kind="pty", NO_COLOR="1"), graveyard, tmp_path)
    graveyard.connection.execute("UPDATE events.consumer SET paused_at = NULL")
    walk_through(opened(database_url, kind="pty", TERM="vt100", LC_ALL="C"), graveyard, tmp_path)


def walk_through(terminal: Terminal, graveyard: Graveyard, tmp_path: Path) -> None:
    start(terminal)
    # The worst comes first and is selected; what is wrong stands above everything.
    assert re.search(rf"> {BILL} .*running .* 1! 2 +4", terminal.line(f"> {BILL}"))
    assert "healthy" in terminal.lines()
    assert "orders/7 " in terminal.line("KeyError: no order 7")
    terminal.type("j", "p")
    terminal.wait_for_text(f"Pause {SHIP}? y/n")
    terminal.type("n")
    terminal.wait_for_text("Nothing was changed.")
    assert graveyard.row("paused_at", SHIP) is None
    terminal.type("p", "y")
    terminal.wait_for_text(f"{SHIP} is paused.")
    assert graveyard.row("pause_reason", SHIP) == "by hand, in penstock top"
    terminal.wait_for(lambda _: "paused" in terminal.line(f"> {SHIP}"), "the pause")
    terminal.type("r", "y")
    terminal.wait_for_text(f"{SHIP} goes on.")
    assert graveyard.row("paused_at", SHIP) is None
    terminal.type("d")
    terminal.wait_for_text(f"{SHIP} has no dead letter.")
    terminal.type("up", "enter")
    terminal.wait_for_text(f"Dead letter of {BILL}")
    assert "builtins.KeyError: no order 7" in terminal.line("error  ")
    assert terminal.line("place ").endswith("orders/7")
    terminal.resize(70, 12)
    terminal.wait_for(lambda lines: "lines 1-9 of" in lines[0], "the smaller page")
    terminal.type("j")
    terminal.wait_for(lambda lines: "lines 2-10 of" in lines[0], "the next line")
    terminal.type("escape")
    terminal.wait_for(lambda lines: lines[0].startswith("penstock top"), "the overview")
    keys = ("↑↓ select", "?? select")
    terminal.wait_for(
        lambda lines: [each for each in lines if each][-1].startswith(keys), "its keys"
    )
    assert len([line for line in terminal.lines() if line]) <= 12
    terminal.resize(140, 30)
    terminal.wait_for_text("Latest errors")
    assert terminal.is_alternate()
    terminal.type("q")
    expect_restored(terminal, tmp_path)


@pytest.mark.long
def test_it_says_that_postgresql_is_away_and_goes_on(
    graveyard: Graveyard, database_url: str, opened: Opener, tmp_path: Path
) -> None:
    with Proxy.to(database_url) as proxy:
        terminal = opened(proxy.url(database_url), PENSTOCK_REDIS_URL=f"redis://{MISSING}/0")
        start(terminal, "--stream", "orders")
        terminal.wait_for_text("Redis is away")
        with proxy.refusing():
            terminal.wait_for_text("PostgreSQL is away")
            terminal.type("p", "y")
            terminal.wait_for_text("That did not work")
            assert BILL in terminal.line(f"> {BILL}")
        terminal.wait_for(lambda lines: "PostgreSQL is away" not in "".join(lines), "its return")
        graveyard.quarantine(SHIP)
        terminal.wait_for_text("1 problem")
        # Ctrl-C is a way out like any other.
        terminal.type("\x03")
        expect_restored(terminal, tmp_path)


@pytest.mark.long
def test_it_outlives_a_server_that_is_killed(opened: Opener) -> None:
    with server_folder() as folder:
        postgres = EmbeddedPostgres(folder / "postgres", durable=True)
        with postgres:
            migrate(postgres.url)
            with closing(fill(postgres.url).connection):
                terminal = opened(postgres.url)
                start(terminal)
            os.kill(postgres.pid, signal.SIGKILL)
            terminal.wait_for_text("PostgreSQL is away")
            terminal.wait_for_text("What is shown is")
            # Keys are obeyed while nobody answers.
            terminal.type("?")
            terminal.wait_for_text("pause it, on all hosts")
            terminal.type("b")
            postgres.crash()
            postgres.start()
            terminal.wait_for(lambda lines: "away" not in "".join(lines), "the server is back")
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("UPDATE events.stream SET head = 4242 WHERE name = 'orders'")
            terminal.wait_for_text("4,242")
            terminal.type("q")


@pytest.mark.long
@pytest.mark.usefixtures("graveyard")
def test_a_signal_leaves_the_terminal_as_it_was(
    database_url: str, opened: Opener, tmp_path: Path
) -> None:
    terminal = opened(database_url)
    start(terminal)
    os.kill(int((tmp_path / PID_FILE).read_text()), signal.SIGTERM)
    expect_restored(terminal, tmp_path)


# ── the words used above ───────────────────────────────────────────────────────────────────────


def fill(database_url: str) -> Graveyard:
    """One consumer with failures of all kinds, and one that is fine."""
    graveyard = Graveyard(database_url)
    graveyard.stream(30)
    for name in (BILL, SHIP):
        graveyard.consumer(name, checkpoints=(30,))
        graveyard.hold(name)
    graveyard.bury([3, 4, 5])
    graveyard.bury([7], held=True, age="1 minute")
    graveyard.park(20, "k20", due="1 hour")
    return graveyard


def start(terminal: Terminal, *options: str) -> None:
    """Run it between two looks at the terminal's settings, which a shell would mend unseen."""
    command = [sys.executable, "-m", "penstock", "top", "--interval", "0.2", *options]
    noting = shlex.join(["sh", "-c", f"echo $$ > {PID_FILE}; exec {shlex.join(command)}"])
    # Ctrl-C goes to the script, too, which has something left to do.
    script = (
        f"trap : INT; stty -g > {BEFORE}; {noting}; stty -g > {AFTER}.new; mv {AFTER}.new {AFTER}"
    )
    terminal.command("sh", "-c", script)
    terminal.wait_for_text("Latest errors")


def expect_restored(terminal: Terminal, folder: Path) -> None:
    """It has ended and left nothing behind: neither a screen nor settings."""
    after = folder / AFTER
    wait_until(after.exists, what=lambda: "\n".join(["it has ended:", *terminal.lines()]))
    assert not terminal.is_alternate()
    assert after.read_text() == (folder / BEFORE).read_text() != ""
    after.unlink()
