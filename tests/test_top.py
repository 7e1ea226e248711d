"""What `penstock top` shows and does, decided without a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from penstock.cli.top_keys import KeyReader
from penstock.core.top import (
    ASCII_BARS,
    BARS,
    HISTORY_MAX,
    Action,
    Page,
    Tracks,
    Trouble,
    Verb,
    View,
    by_trouble,
    compact,
    press,
    share,
    sparkline,
    trouble_of,
    window,
)
from tests.test_cli import Penstock

NAMES = ["shop.a", "shop.b", "shop.c"]
FINE = {
    "is_quarantined": False,
    "is_paused": False,
    "is_served": True,
    "lag_events": 0,
    "lag_ms": 0,
    "held_keys": 0,
    "parked_keys": 0,
    "dead_letters": 0,
}


# ── numbers over time ──────────────────────────────────────────────────────────────────────────


def test_a_rate_is_the_growth_per_second_between_two_looks() -> None:
    tracks = Tracks()
    tracks.observe(10.0, {"orders": 100})
    assert tracks.rate("orders") is None
    tracks.observe(12.0, {"orders": 150})
    assert tracks.rate("orders") == 25.0
    assert tracks.history("orders") == (100, 150)


def test_a_number_that_fell_has_no_rate() -> None:
    tracks = Tracks()
    tracks.observe(1.0, {"bill": 100})
    tracks.observe(2.0, {"bill": 40})
    assert tracks.rate("bill") is None


def test_what_is_gone_is_forgotten_and_histories_are_bounded() -> None:
    tracks = Tracks()
    for second in range(HISTORY_MAX * 2):
        tracks.observe(float(second), {"bill": second, "ship": second})
    assert len(tracks.history("bill")) == HISTORY_MAX
    tracks.observe(1e6, {"bill": 1})
    assert tracks.history("ship") == ()


def test_a_sparkline_ends_with_the_newest_and_shows_every_lag() -> None:
    assert sparkline([0, 1, 50, 100], 4) == " ▁▄█"
    assert sparkline([9, 9, 0, 3], 2) == " █"
    assert sparkline([0, 0], 5) == ""
    assert sparkline([], 5) == ""


@given(some.lists(some.integers(0, 10**12), max_size=200), some.integers(1, 40))
def test_a_sparkline_never_hides_a_lag(values: list[int], width: int) -> None:
    for bars in (BARS, ASCII_BARS):
        line = sparkline(values, width, bars)
        assert len(line) in {0, min(width, len(values))}
        shown = values[-width:]
        assert [bar != " " for bar in line] == [value > 0 for value in shown][: len(line)]


@given(some.floats(0, 1e15))
def test_a_compact_number_has_at_most_six_characters(number: float) -> None:
    assert len(compact(number)) <= 6


# ── what comes first ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Trouble.NONE),
        ({"lag_events": 5, "is_served": False}, Trouble.UNSERVED),
        ({"is_served": False}, Trouble.NONE),
        ({"lag_events": 5, "is_served": False, "is_paused": True}, Trouble.PAUSED),
        ({"lag_events": 5, "lag_ms": 60_001}, Trouble.LATE),
        ({"lag_events": 5, "lag_ms": 60_001, "is_paused": True}, Trouble.PAUSED),
        ({"is_quarantined": True, "is_paused": True}, Trouble.QUARANTINED),
        ({"held_keys": 1, "parked_keys": 3, "dead_letters": 9}, Trouble.HELD),
        ({"parked_keys": 3, "dead_letters": 9}, Trouble.PARKED),
        ({"dead_letters": 9}, Trouble.DEAD),
    ],
)
def test_the_worst_counts(changed: dict[str, int], expected: Trouble) -> None:
    assert trouble_of(**{**FINE, **changed}) is expected  # type: ignore[arg-type]


def test_trouble_comes_first_and_the_rest_keeps_its_place() -> None:
    named = [(Trouble.NONE, "c"), (Trouble.HELD, "b"), (Trouble.NONE, "a")]
    assert by_trouble(named) == ["b", "a", "c"]


def test_rows_go_to_those_that_need_them() -> None:
    # All want more than their least; what is left goes to the first.
    assert share(30, (100, 100, 100, 100), (4, 2, 2, 2), overhead=2) == [16, 2, 2, 2]
    assert share(30, (3, 100, 0, 1), (4, 2, 2, 2), overhead=2) == [3, 20, 0, 1]
    # Too few for all: the last ones go without, and their headings too.
    assert share(14, (4, 2, 2, 4), (4, 2, 2, 2), overhead=2) == [4, 2, 2, 0]
    assert share(4, (10, 5, 5, 5), (4, 2, 2, 2), overhead=2) == [2, 0, 0, 0]


@given(
    some.integers(-5, 80),
    some.lists(some.integers(0, 100), min_size=4, max_size=4),
)
def test_a_screen_is_never_overfull(rows: int, wanted: list[int]) -> None:
    shared = share(rows, wanted, (4, 2, 2, 2), overhead=2)
    assert all(0 <= got <= want for got, want in zip(shared, wanted, strict=True))
    assert sum(got + 2 for got in shared if got) <= max(rows, 0)


@given(some.integers(1, 300), some.integers(1, 50), some.data())
def test_the_selected_row_is_always_seen(count: int, height: int, data: some.DataObject) -> None:
    selected = data.draw(some.integers(0, count - 1))
    seen = window(count, height, selected)
    assert selected in seen
    assert len(seen) == min(count, height)


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


def test_arrows_move_the_selection_and_stop_at_the_ends() -> None:
    view = View()
    for key, expected in (("down", "shop.b"), ("j", "shop.c"), ("down", "shop.c"), ("k", "shop.b")):
        view, action = press(view, key, NAMES)
        assert (view.selected, action) == (expected, None)


def test_the_selection_follows_the_consumer_and_not_the_row() -> None:
    view, _ = press(View(selected="shop.b"), "down", ["shop.b", "shop.c", "shop.a"])
    assert view.selected == "shop.c"
    # One that is gone leaves the selection to the first.
    view, _ = press(View(selected="shop.gone"), "p", NAMES)
    assert view.asking == Action(Verb.PAUSE, "shop.a")


@pytest.mark.parametrize(("key", "verb"), [("p", Verb.PAUSE), ("r", Verb.RESUME)])
def test_nothing_is_paused_or_resumed_without_a_yes(key: str, verb: Verb) -> None:
    asked, action = press(View(selected="shop.b"), key, NAMES)
    assert action is None
    # Meanwhile it may have moved, or be sorted elsewhere.
    assert press(asked, "y", ["shop.z"])[1] == Action(verb, "shop.b")
    for other in ("n", "enter", "q", "p", "r", "escape"):
        view, action = press(asked, other, NAMES)
        assert (view.asking, action, view.said) == (None, None, "Nothing was changed.")


def test_a_letter_is_opened_scrolled_and_left() -> None:
    for key in ("enter", "d"):
        assert press(View(), key, NAMES)[1] == Action(Verb.OPEN, "shop.a")
    view = View(page=Page.LETTER)
    for key, scroll in (("down", 1), ("page down", 11), ("k", 10), ("page up", 0), ("up", 0)):
        view, action = press(view, key, NAMES)
        assert (view.scroll, action) == (scroll, None)
    # Nothing is paused from a page that does not show who it would be.
    assert press(view, "p", NAMES) == (view, None)
    for key in ("b", "escape"):
        assert press(view, key, NAMES)[0].page is Page.OVERVIEW


def test_q_leaves_from_everywhere_but_a_question() -> None:
    for page in Page:
        assert press(View(page=page), "q", NAMES)[1] == Action(Verb.QUIT)


def test_help_comes_and_goes_and_without_consumers_no_key_hurts() -> None:
    view, _ = press(View(), "?", [])
    assert view.page is Page.HELP
    assert press(view, "?", [])[0].page is Page.OVERVIEW
    for key in ("up", "down", "p", "r", "enter", "x"):
        assert press(View(), key, []) == (View(), None)


def test_sequences_of_a_terminal_are_keys_also_in_pieces() -> None:
    reader = KeyReader()
    assert reader.feed(b"j\x1b[A\x1bOB\r\x1b[5~q") == ["j", "up", "down", "enter", "page up", "q"]
    assert reader.feed(b"\x1b[") == []
    assert reader.is_within_sequence
    assert reader.feed(b"Bk") == ["down", "k"]
    # What is not known here is no key, and above all not its last letter.
    assert reader.feed(b"\x1b[1;5p\x1b[15~x") == ["x"]


def test_an_escape_is_a_key_only_when_nothing_follows() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.settle() == ["escape"]
    assert reader.settle() == []
    assert reader.feed(b"\x1b") == []
    assert reader.feed(b"q") == ["escape", "q"]


# ── where there is no terminal ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [(), ("--stream", "orders")])
def test_without_a_terminal_it_names_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    refused = Penstock(tmp_path, {}, capsys)("top", *options, code=2)
    assert "penstock status --json" in refused.stderr
    assert refused.stdout == ""


def test_the_readme_shows_what_was_captured() -> None:
    root = Path(__file__).parent.parent
    assert (root / "docs" / "top.txt").read_text() in (root / "README.md").read_text()
