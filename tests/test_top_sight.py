"""What `penstock top` asks the database: a few rows, however many there are, and no secrets."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from rich.console import Console

from penstock.cli.top_screen import Screen
from penstock.cli.top_watch import News, Watcher
from penstock.core.top import Page, View
from penstock.ops import top
from penstock.ops.top import Sight, latest_letter, look
from tests.bookkeeper import BILL
from tests.graveyard import TRACEBACK, Graveyard
from tests.waiting import wait_until

SEALED_LINE = "penstock-sealed:c2VjcmV0"


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    graveyard = Graveyard(database_url)
    graveyard.stream(100)
    graveyard.consumer(checkpoints=(100,))
    graveyard.hold()
    yield graveyard
    graveyard.connection.close()


def test_it_sees_the_newest_letters_and_held_keys_first(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    graveyard.bury(range(1, 31))
    graveyard.park(40, "early", due="1 second")
    graveyard.park(41, "late", due="1 hour")
    graveyard.park(45, "late", due=None)
    graveyard.bury([50], held=True)
    seen = look(graveyard.connection)
    assert [letter.position for letter in seen.letters] == [50, *range(30, 11, -1)]
    assert [(p.position, p.held, p.waiting, p.key) for p in seen.parked] == [
        (50, True, 0, "k50"),
        (40, False, 0, "early"),
        (41, False, 1, "late"),
    ]
    # However many there are, only so many are looked at.
    monkeypatch.setattr(top, "LOOKED_AT_MAX", 2)
    seen = look(graveyard.connection)
    assert (len(seen.letters), len(seen.parked)) == (2, 2)


def test_one_stream_is_seen_without_the_others(graveyard: Graveyard) -> None:
    graveyard.stream(5, name="mails")
    graveyard.consumer("shop.mail", checkpoints=(2,), stream="mails")
    graveyard.bury([3])
    assert [problem.name for problem in look(graveyard.connection).problems] == ["shop.mail"]
    seen = look(graveyard.connection, stream="orders")
    assert [stream.name for stream in seen.status.streams] == ["orders"]
    assert [consumer.name for consumer in seen.status.consumers] == [BILL]
    assert seen.problems == ()
    assert look(graveyard.connection, stream="mails").letters == ()


def test_a_letter_is_opened_without_what_is_sealed_of_it(graveyard: Graveyard) -> None:
    assert latest_letter(graveyard.connection, BILL) is None
    graveyard.bury([3])
    graveyard.bury([4], traceback=f"{TRACEBACK}{SEALED_LINE}\n", key_id="orders/1")
    opened = latest_letter(graveyard.connection, BILL)
    assert opened is not None
    assert opened.full.letter.position == 4
    assert SEALED_LINE not in str(opened.full.traceback)
    screen = screen_of(80, 40)
    screen.letter = opened
    shown = drawn(screen, news_of(look(graveyard.connection)), View(page=Page.LETTER))
    assert "The event is encrypted with key orders/1" in shown
    assert "cents" not in shown
    assert SEALED_LINE not in shown


def test_what_events_say_does_not_steer_the_terminal(graveyard: Graveyard) -> None:
    graveyard.park(40, "\x1b[2J\x07evil\nkey", due="1 hour")
    graveyard.bury([3], error_type="Evil\x1b]0;title\x07")
    shown = drawn(screen_of(140, 40), news_of(look(graveyard.connection)), View())
    assert "evil key" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (200, 60)])
def test_a_page_fills_every_screen_and_never_more(
    size: tuple[int, int], graveyard: Graveyard
) -> None:
    for number in range(40):
        graveyard.consumer(f"shop.c{number:02}", checkpoints=(number,))
    graveyard.bury(range(1, 31), held=True)
    news = news_of(look(graveyard.connection))
    for away in (news, replace(news, postgres_trouble="gone " * 50, redis_trouble="gone")):
        for page in Page:
            columns, rows = size
            lines = drawn(screen_of(columns, rows), away, View(page=page)).splitlines()
            assert len(lines) == rows
            assert max(map(len, lines)) <= columns


def test_a_watcher_tells_what_went_wrong_and_recovers(
    graveyard: Graveyard, database_url: str
) -> None:
    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(database_url, autocommit=True, application_name="watcher")

    watcher = Watcher(
        connect(),
        connect=connect,
        look=look,
        redis_url=None,
        interval_seconds=0.05,
        on_news=lambda: None,
    )
    watcher.start()
    try:
        first = watcher.news.seen_at
        wait_until(lambda: watcher.news.seen_at > first, what="a second look")
        graveyard.connection.execute("ALTER TABLE events.stream_lease RENAME TO away")
        wait_until(lambda: watcher.news.postgres_trouble is not None, what="the trouble is told")
        assert str(watcher.news.postgres_trouble).startswith("PostgreSQL refuses: ")
        # What was seen last stays to be seen.
        assert [consumer.name for consumer in watcher.news.sight.status.consumers] == [BILL]
        graveyard.connection.execute("ALTER TABLE events.away RENAME TO stream_lease")
        wait_until(lambda: watcher.news.postgres_trouble is None, what="it is over")
        graveyard.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'watcher'"
        )
        again = time.monotonic()
        wait_until(lambda: watcher.news.seen_at > again, what="a look on another connection")
    finally:
        watcher.stop()


# ── the words used above ───────────────────────────────────────────────────────────────────────


def news_of(sight: Sight) -> News:
    return News(sight=sight, seen_at=time.monotonic(), seen_clock=datetime.now(UTC))


def screen_of(columns: int, rows: int) -> Screen:
    console = Console(
        width=columns, height=rows, file=io.StringIO(), force_terminal=True, color_system=None
    )
    return Screen(console, "shop", 1.0)


def drawn(screen: Screen, news: News, view: View) -> str:
    """The page as plain text."""
    screen.observe(news)
    lines = screen.console.render_lines(screen.draw(news, view), pad=False)
    return "\n".join("".join(segment.text for segment in line) for line in lines) + "\n"
