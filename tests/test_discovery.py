"""Consumers are found where they are, and a module that breaks is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import autodiscover
from penstock.errors import RegistrationError

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules of a package `orchard` that only this test can import."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str = "") -> None:
        path = tmp_path / "orchard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, *path.parent.parents):
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        path.write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "orchard"]:
        del sys.modules[name]


def test_every_module_of_the_name_is_imported_however_deep(write: Write) -> None:
    write("pears/events_consumers.py", "")
    write("apples/events_consumers.py", "")
    write("apples/late/events_consumers.py", "")
    write("apples/models.py", "raise AssertionError('nobody asked for this one')")
    assert autodiscover("orchard") == [
        "orchard.apples.events_consumers",
        "orchard.apples.late.events_consumers",
        "orchard.pears.events_consumers",
    ]
    assert "orchard.pears.events_consumers" in sys.modules


def test_the_name_may_be_another(write: Write) -> None:
    write("events_consumers.py", "")
    write("apples/handlers.py", "")
    assert autodiscover("orchard", pattern="handlers") == ["orchard.apples.handlers"]
    assert autodiscover("orchard") == ["orchard.events_consumers"]


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(RegistrationError, match="no package 'orchard_of_nobody'"):
        autodiscover("orchard_of_nobody.apples")


def test_a_module_is_not_a_package(write: Write) -> None:
    write("apples.py", "")
    with pytest.raises(RegistrationError, match="not a package"):
        autodiscover("orchard.apples")


def test_a_module_that_cannot_be_imported_is_named_with_its_cause(write: Write) -> None:
    write("apples/events_consumers.py", "import no_such_library")
    with pytest.raises(RegistrationError, match=r"orchard\.apples\.events_consumers") as raised:
        autodiscover("orchard")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_package_whose_own_import_fails_is_not_called_absent(write: Write) -> None:
    write("apples.py", "")
    write("__init__.py", "import no_such_library")
    with pytest.raises(RegistrationError, match="importing orchard failed"):
        autodiscover("orchard")
