"""What is kept of an error can be stored, is bounded, and finds its like."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Event, FatalError
from penstock.core.forensics import (
    ERROR_TYPE_LENGTH_MAX,
    MESSAGE_LENGTH_MAX,
    TRACEBACK_LENGTH_MAX,
    Forensics,
    forensics_of,
)
from penstock.core.require import require

HERE = "tests/test_forensics.py"
FINGERPRINT = re.compile("[0-9a-f]{16}")


def raised(function: Callable[[], object]) -> Exception:
    """The error that a function raises, with its traceback."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it did not fail")


def kept(function: Callable[[], object]) -> Forensics:
    return forensics_of(raised(function))


def assert_storable(found: Forensics) -> None:
    for text in (found.error_type, found.error_message, found.traceback, found.fingerprint):
        assert type(text) is str
        assert "\x00" not in text
        text.encode()
    assert len(found.error_type) <= ERROR_TYPE_LENGTH_MAX
    assert len(found.error_message) <= MESSAGE_LENGTH_MAX
    assert len(found.traceback) <= TRACEBACK_LENGTH_MAX
    assert FINGERPRINT.fullmatch(found.fingerprint)


def fail(text: str = "no such customer") -> None:
    raise ValueError(text)


def fail_elsewhere() -> None:
    raise ValueError("no such customer")


# ── type and message ───────────────────────────────────────────────────────────────────────────


class Nameless(Exception):
    __module__ = None  # type: ignore[assignment]


class Outer:
    class Refused(Exception):
        pass


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (ValueError(), "ValueError"),
        (ExceptionGroup("g", [ValueError()]), "ExceptionGroup"),
        (FatalError(), "penstock.errors.FatalError"),
        (psycopg.errors.DeadlockDetected(), "psycopg.errors.DeadlockDetected"),
        (Outer.Refused(), "tests.test_forensics.Outer.Refused"),
        (Nameless(), "Nameless"),
    ],
)
def test_the_type_is_named_with_its_module(error: Exception, error_type: str) -> None:
    assert forensics_of(error).error_type == error_type


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such customer"), "no such customer"),
        (ValueError(), ""),
        (ValueError(1, "two"), "(1, 'two')"),
        (KeyError("x"), "'x'"),
        (ValueError("a\x00b"), "a\ufffdb"),
        (ValueError("a\ud83d"), "a\ufffd"),
        (ValueError("caf\u00e9 \U0001f600"), "caf\u00e9 \U0001f600"),
        (ValueError("x" * 2000), "x" * 2000),
        (ValueError("x" * 2001), "x" * 1999 + "…"),
    ],
)
def test_the_message_is_the_errors_own_as_far_as_it_can_be_stored(
    error: Exception, message: str
) -> None:
    assert forensics_of(error).error_message == message


# ── errors that do not cooperate ───────────────────────────────────────────────────────────────


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


class NotEvenAString(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # noqa: PLE0307


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class NastyNotes(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise RuntimeError("no notes")


LongName = type("L" * 5000, (Exception,), {"__module__": "m\ud800\x00" * 5000})


def with_notes(*notes: Any) -> Exception:
    error = ValueError("noted")
    error.__notes__ = list(notes)
    return error


def in_a_circle() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def long_chain(length: int = 5000) -> Exception:
    error = ValueError("0")
    for number in range(1, length):
        later = ValueError(str(number))
        later.__context__ = error
        error = later
    return error


def bushy_group() -> Exception:
    """Few objects, but more paths to them than anybody can walk."""

    def throw(error: Exception, depth: int) -> None:
        if depth:
            throw(error, depth - 1)
        raise error

    error: Exception = ValueError("leaf")
    for _ in range(12):
        group = ExceptionGroup("level", [error] * 10)
        group.__cause__ = error
        error = raised(partial(throw, group, 90))
    return error


def deep_group() -> Exception:
    error: Exception = ValueError("leaf")
    for _ in range(5000):
        error = ExceptionGroup("level", [error])
    return error


@pytest.mark.parametrize(
    "make",
    [
        NoText,
        NotEvenAString,
        Endless,
        NastyNotes,
        Nameless,
        LongName,
        lambda: ValueError("x" * 10_000_000),
        lambda: ValueError("\x00\ud800" * 100_000),
        lambda: ValueError(NoText()),
        lambda: with_notes("see ticket 7", "\x00\udfff", 3, "n" * 100_000),
        lambda: with_notes(*["again"] * 100_000),
        lambda: ExceptionGroup("g\x00", [NoText(), NotEvenAString(), NastyNotes()]),
        lambda: ExceptionGroup("wide", [ValueError("x" * 5000)] * 10_000),
        in_a_circle,
        long_chain,
        bushy_group,
        deep_group,
        lambda: raised(b"\xff".decode),
        lambda: raised(lambda: compile("a b\x0b", "/srv/secret/place/a.py", "exec")),
    ],
)
def test_no_error_is_too_odd_to_be_kept(make: Callable[[], Exception]) -> None:
    def throw() -> None:
        raise make()

    # Where the work is not bounded, some of these end in the time limit of the tests.
    for found in (forensics_of(make()), kept(throw)):
        assert_storable(found)
        assert found.traceback.strip()


def test_an_error_without_a_text_says_so_and_keeps_its_traceback() -> None:
    def handle() -> None:
        raise NoText

    found = kept(handle)
    assert found.error_message == "(its text cannot be shown)"
    assert found.error_type == "tests.test_forensics.NoText"
    assert "in handle\n    raise NoText\n" in found.traceback


@given(st.text(st.characters(), max_size=3000))
def test_any_text_can_be_stored(text: str) -> None:
    assert_storable(kept(lambda: fail(text)))


# ── the traceback ──────────────────────────────────────────────────────────────────────────────


def test_the_traceback_reads_like_python_s_own() -> None:
    lines = kept(fail).traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(rf'  File "{HERE}", line \d+, in fail', lines[-3])
    assert lines[-2:] == ["    raise ValueError(text)", "ValueError: no such customer"]


def test_no_machine_s_paths_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secret-host-name" / "shop"
    folder.mkdir(parents=True)
    (folder / "billing.py").write_text("def bill():\n    raise ValueError('no')\n")
    module = loaded(folder / "billing.py")
    error = ExceptionGroup("both", [raised(module.bill), raised(module.bill)])
    error.__cause__ = raised(module.bill)
    for found in (forensics_of(error), kept(module.bill)):
        assert 'File "shop/billing.py", line 2, in bill' in found.traceback
        assert "raise ValueError('no')" in found.traceback
        assert "secret-host-name" not in found.traceback
        assert str(Path(__file__).parent.parent) not in found.traceback


def loaded(path: Path, name: str = "billing") -> ModuleType:
    module = ModuleType(name)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)  # noqa: S102
    return module


def test_causes_come_first_and_are_joined_by_python_s_words() -> None:
    def explicitly() -> None:
        try:
            fail("cause")
        except ValueError as error:
            raise KeyError("effect") from error

    def by_accident() -> None:
        try:
            fail("cause")
        except ValueError:
            raise KeyError("effect")  # noqa: B904

    def alone() -> None:
        try:
            fail("cause")
        except ValueError:
            raise KeyError("effect") from None

    for function, word in ((explicitly, "direct cause"), (by_accident, "During handling")):
        text = kept(function).traceback
        places = [text.index(part) for part in ("ValueError: cause", word, "KeyError: 'effect'")]
        assert places == sorted(places)
    assert "cause" not in kept(alone).traceback.replace('raise KeyError("effect")', "")


def test_the_end_of_a_long_chain_is_kept_and_the_cut_is_told() -> None:
    text = forensics_of(long_chain(30)).traceback
    assert text.endswith("ValueError: 29\n")
    assert text.startswith("… (earlier causes are left out)\n")
    assert "ValueError: 20\n" in text
    assert "ValueError: 19\n" not in text
    assert "left out" not in forensics_of(long_chain(10)).traceback


def test_the_end_of_a_long_traceback_is_kept_and_the_cut_is_told() -> None:
    def down(depth: int, text: str) -> None:
        if depth == 0:
            fail(text)
        # Lines that differ are not folded into one.
        elif depth % 2:
            down(depth - 1, text)
        else:
            other(depth - 1, text)

    def other(depth: int, text: str) -> None:
        if depth % 2:
            down(depth - 1, text)
        else:
            other(depth - 1, text)

    def throw() -> None:
        try:
            down(90, "the cause " + "c" * 5000)
        except ValueError:
            down(90, "the effect " + "e" * 5000)

    text = kept(throw).traceback
    assert len(text) == TRACEBACK_LENGTH_MAX
    assert text.startswith("… (the beginning is left out)\n")
    assert "raise ValueError(text)\nValueError: the effect eee" in text


def test_a_huge_message_leaves_room_for_the_frames() -> None:
    assert "in fail\n" in kept(lambda: fail("x" * 1_000_000)).traceback


def test_errors_in_a_circle_are_told_once() -> None:
    text = forensics_of(in_a_circle()).traceback
    assert (text.count("ValueError: first\n"), text.count("ValueError: second\n")) == (1, 1)


def test_deep_groups_are_told_down_to_a_level() -> None:
    text = forensics_of(deep_group()).traceback
    assert text.startswith("ExceptionGroup: level (1 sub-exception)\n")
    assert text.endswith("  … (deeper groups are left out)\n")


@pytest.mark.parametrize("error", [with_notes("see ticket 7", 3), NastyNotes("noted")], ids=repr)
def test_notes_that_are_none_cost_no_frames(error: Exception) -> None:
    def throw() -> None:
        raise error

    text = kept(throw).traceback
    assert "in throw\n" in text
    assert ": noted\n" in text


def test_where_the_source_cannot_be_read_the_message_is_left() -> None:
    class Loader:
        def get_source(self, name: str) -> str:
            raise RuntimeError(name)

    module = ModuleType("sealed")
    module.__dict__["__loader__"] = Loader()
    exec(compile(BILLING, "sealed.py", "exec"), module.__dict__)  # noqa: S102
    assert kept(module.bill).traceback == "ValueError: no\n"


def test_notes_are_kept() -> None:
    error = raised(fail)
    error.add_note("order 17 of customer 4")
    assert forensics_of(error).traceback.endswith(
        "ValueError: no such customer\norder 17 of customer 4\n"
    )


async def two_tasks() -> None:
    async def first() -> None:
        fail("first")

    async def second() -> None:
        fail_elsewhere()

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        group.create_task(second())


def test_a_group_is_kept_with_its_members() -> None:
    text = kept(lambda: asyncio.run(two_tasks())).traceback
    assert "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)\n" in text
    assert "  ---- 1 of 2 ----\n  Traceback (most recent call last):\n" in text
    assert "\n  ValueError: first\n  ---- 2 of 2 ----\n" in text
    assert text.endswith("\n  ValueError: no such customer\n")


def test_a_wide_group_says_how_many_are_left_out() -> None:
    text = forensics_of(ExceptionGroup("wide", [ValueError(str(n)) for n in range(25)])).traceback
    assert "  ---- 10 of 25 ----\n  ValueError: 9\n" in text
    assert "11 of 25" not in text
    assert text.endswith("  … (15 more are left out)\n")


# ── the fingerprint ────────────────────────────────────────────────────────────────────────────


def test_equal_failures_have_equal_fingerprints_whatever_their_texts() -> None:
    prints = {kept(lambda: fail(text)).fingerprint for text in ("customer 1", "customer 2", "")}  # noqa: B023
    assert len(prints) == 1


def test_another_type_or_another_place_is_another_failure() -> None:
    def fail_with_key() -> None:
        raise KeyError("no such customer")

    def through() -> None:
        fail()

    functions = (fail, fail_elsewhere, fail_with_key, through)
    assert len({kept(function).fingerprint for function in functions}) == len(functions)


def test_an_error_that_was_never_raised_has_one_too() -> None:
    assert forensics_of(ValueError(1)).fingerprint == forensics_of(ValueError(2)).fingerprint
    assert forensics_of(ValueError(1)).fingerprint != forensics_of(KeyError(1)).fingerprint


BILLING = "def bill():\n    raise ValueError('no')\n"


@pytest.mark.parametrize(
    ("folder", "name", "source", "is_same"),
    [
        ("elsewhere/on/another/host", "billing.py", BILLING, True),
        ("shop", "billing.py", f"# a comment\n\n\n{BILLING}", True),
        ("shop", "billing.py", BILLING.replace("'no'", "'other text'"), True),
        ("shop", "invoicing.py", BILLING, False),
        ("shop", "billing.py", BILLING.replace("bill()", "bill_again()"), False),
    ],
)
def test_a_fingerprint_knows_files_and_functions_but_no_lines_and_no_folders(
    tmp_path: Path, folder: str, name: str, source: str, is_same: bool
) -> None:
    prints = []
    for place, text in (
        (tmp_path / "shop/billing.py", BILLING),
        (tmp_path / folder / name, source),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        module = loaded(place)
        prints.append(kept(getattr(module, "bill", None) or module.bill_again).fingerprint)
    assert (prints[0] == prints[1]) == is_same


def test_how_deep_a_recursion_went_does_not_matter() -> None:
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        fail()

    prints = {kept(lambda: down(depth)).fingerprint for depth in (1, 2, 50)}  # noqa: B023
    assert len(prints) == 1


def test_the_pipeline_s_own_frames_do_not_count(tmp_path: Path) -> None:
    source = "def call(function):\n    function()\n"
    path = tmp_path / "calling.py"
    path.write_text(source)
    prints = {
        name: kept(lambda: loaded(path, name).call(fail)).fingerprint  # noqa: B023
        for name in ("penstock", "penstock.pipeline.attempt", "penstock_extras", "shop")
    }
    assert prints["penstock"] == prints["penstock.pipeline.attempt"]
    assert prints["penstock_extras"] == prints["shop"] != prints["penstock"]


def test_a_failure_inside_the_pipeline_still_has_its_place_in_the_handler() -> None:
    def one() -> None:
        require(False, "no")

    def two() -> None:
        require(False, "no")

    assert kept(one).fingerprint != kept(two).fingerprint


def test_the_members_of_a_group_count_in_any_order() -> None:
    first, second = raised(fail), raised(fail_elsewhere)

    def grouped(*members: Exception) -> str:
        return forensics_of(ExceptionGroup("tasks", members)).fingerprint

    assert grouped(first, second) == grouped(second, first) == grouped(first, second, first)
    assert len({grouped(first), grouped(second), grouped(first, second)}) == 3


def test_a_fingerprint_does_not_change_between_processes_and_releases(tmp_path: Path) -> None:
    """Written down, because stored letters are compared with later ones."""
    assert forensics_of(ValueError("x")).fingerprint == digest("ValueError")
    kinds = (ValueError, KeyError, OSError, TypeError, IndexError, LookupError)
    group = ExceptionGroup("tasks", [kind() for kind in kinds])
    names = sorted(kind.__name__ for kind in kinds)
    assert forensics_of(group).fingerprint == digest("\n".join(["ExceptionGroup", *names]))
    (tmp_path / "billing.py").write_text(BILLING)
    error = raised(loaded(tmp_path / "billing.py").bill)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert forensics_of(error).fingerprint == digest("ValueError\nbilling.py:bill")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ── as it comes ────────────────────────────────────────────────────────────────────────────────


class Placed(Event, type="forensics.placed", version=1):
    order_id: int


def test_errors_of_pydantic_and_the_interpreter_are_kept() -> None:
    found = kept(lambda: Placed(order_id="x"))
    assert found.error_type == "pydantic_core._pydantic_core.ValidationError"
    assert "order_id" in found.error_message

    def recurse() -> None:
        recurse()

    found = kept(recurse)
    assert_storable(found)
    assert found.error_type == "RecursionError"
    assert "more times]" in found.traceback
