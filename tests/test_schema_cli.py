"""`penstock schema`: locked, checked, compared, fetched and documented."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from tests.test_cli import Done, Penstock

HEAD = """
from datetime import datetime

from pydantic import AwareDatetime, NaiveDatetime

from penstock import Event, Pipeline

pipeline = Pipeline("shop")

"""
PAID = '''
class Paid(Event, type="{event_type}", version={version}, key="order_id"):
    """An order was paid."""

    order_id: int
    {fields}

'''
DECLARED = """
pipeline.stream("payments", Paid)
"""
UPCASTER = """
@Paid.upcast(from_version=1)
def step(old: dict) -> dict:
    return {**old, "cents": 0}
"""


_lengths = count(1)


class Shop:
    """An application whose only event changes from one command to the next."""

    def __init__(self, penstock: Penstock, event_type: str) -> None:
        self._penstock = penstock
        self._event_type = event_type

    def write(self, *fields: str, version: int = 1, upcaster: str = "") -> None:
        paid = PAID.format(
            event_type=self._event_type, version=version, fields="\n    ".join(fields)
        )
        # Longer each time: bytecode of a module of the same size and second would do for both.
        text = HEAD + paid + DECLARED + upcaster + "#" * next(_lengths)
        (self._penstock.folder / "shop.py").write_text(text)

    def schema(self, *arguments: str, code: int = 0) -> Done:
        return self._penstock("--app", "shop:pipeline", "schema", *arguments, code=code)

    @property
    def folder(self) -> Path:
        return self._penstock.folder / "schemas"


@pytest.fixture
def penstock(
    tmp_path: Path, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    variables = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    return Penstock(tmp_path, variables, capsys)


@pytest.fixture
def shop(penstock: Penstock, request: pytest.FixtureRequest) -> Shop:
    shop = Shop(penstock, f"cli.{request.node.name[-40:]}")
    shop.write("cents: int")
    return shop


def test_a_lock_is_written_once_and_the_same_each_time(shop: Shop) -> None:
    (line,) = shop.schema("lock").stdout.split()
    text = (shop.folder.parent / line).read_text()
    document = json.loads(text)
    assert document["x-penstock"]["version"] == 1
    assert document["x-penstock"]["key"] == "order_id"
    assert document["required"] == ["order_id", "cents"]
    again = shop.schema("lock")
    assert (again.stdout, "0 files changed" in again.stderr) == ("", True)
    assert shop.schema("check").stdout == ""


def test_a_break_is_named_with_field_rule_who_and_what_to_do(shop: Shop) -> None:
    shop.schema("lock")
    shop.write("cents: int", "currency: str")
    said = shop.schema("check", code=1).stdout
    for word in ("currency", "required-added", "consumers on the new code", "give it a default"):
        assert word.lower() in said.lower()
    report = json.loads(shop.schema("check", "--format", "json", code=1).stdout)
    assert report["holds"] is False
    assert [one["path"] for one in report["findings"]] == ["currency"]
    (annotation,) = shop.schema("check", "--format", "github", code=1).stdout.splitlines()
    assert annotation.startswith("::error file=schemas/")
    assert "%3A" in annotation
    # An optional field breaks nobody, and the same change the other way round does.
    shop.write("cents: int", 'currency: str = "EUR"')
    assert "breaks nobody" in shop.schema("check").stderr
    shop.write("")
    assert shop.schema("check").stdout == ""
    assert "cents" in shop.schema("check", "--rule", "forward", code=1).stdout
    assert "cents" in shop.schema("check", "--rule", "full", code=1).stdout


def test_a_new_version_with_an_upcaster_makes_a_break_legal(shop: Shop) -> None:
    shop.write("price: str")
    shop.schema("lock")
    shop.write("cents: int", version=2)
    said = shop.schema("check", code=1).stdout
    assert "upcaster-missing" in said
    assert "not-locked" in said
    shop.write("cents: int", version=2, upcaster=UPCASTER)
    assert "upcaster-missing" not in shop.schema("check", code=1).stdout
    shop.schema("lock")
    shop.schema("check")
    shop.write("cents: int", version=2)
    assert "upcaster-removed" in shop.schema("check", code=1).stdout


def test_a_lock_is_not_written_over_a_break(shop: Shop) -> None:
    shop.schema("lock")
    before = {path: path.read_text() for path in shop.folder.iterdir()}
    shop.write("cents: bool")
    refused = shop.schema("lock", code=1)
    assert "nothing was written" in refused.stderr.replace("\n", " ")
    assert {path: path.read_text() for path in shop.folder.iterdir()} == before
    shop.schema("lock", "--force")
    shop.schema("check")


def test_an_event_that_is_gone_is_missed(shop: Shop) -> None:
    shop.schema("lock")
    path = next(shop.folder.iterdir())
    document = json.loads(path.read_text())
    document["x-penstock"]["type"] = "orders.gone"
    (shop.folder / "orders.gone.v1.json").write_text(json.dumps(document))
    assert "event-removed" in shop.schema("check", code=1).stdout
    (shop.folder / "broken.v1.json").write_text("{")
    assert "is no locked contract" in shop.schema("check", code=2).stderr.replace("\n", " ")


def test_two_places_are_compared(shop: Shop, database_url: str) -> None:
    shop.schema("lock")
    assert "the same" in shop.schema("diff", "schemas", "code").stderr
    shop.write("cents: int", 'note: str = ""')
    said = shop.schema("diff", "schemas", "code", code=1).stdout
    assert "  note added: " in said
    assert "Difference" not in said
    assert "backward compatible, forward compatible" in said
    found = json.loads(shop.schema("diff", "schemas", "code", "--json", code=1).stdout)
    assert found[0]["backward"] is True
    only = shop.schema("diff", database_url, "code", code=1).stdout
    assert "only in code" in only
    wrong = shop.schema("diff", "nowhere", "code", code=2)
    assert "neither a folder" in wrong.stderr


def test_classes_of_a_stream_are_pulled(shop: Shop, database_url: str, tmp_path: Path) -> None:
    from penstock.app import Pipeline
    from tests.test_contract_records import Paid

    sender = Pipeline("till", database_url=database_url, redis_url=None)
    sender.send_now("payments", Paid(cents=1))
    sender.engine.dispose()
    text = shop.schema("pull", "payments", "--from", database_url).stdout
    assert 'type="records.paid", version=1' in text
    compile(text, "pulled", "exec")
    target = tmp_path / "payments_events.py"
    shop.schema("pull", "payments", "--from", database_url, "--output", str(target))
    shop.schema("pull", "payments", "--from", database_url, "--output", str(target))
    assert target.read_text() == text
    target.write_text("# by hand\n")
    shop.schema("pull", "payments", "--from", database_url, "--output", str(target), code=1)
    assert target.read_text() == "# by hand\n"
    unknown = shop.schema("pull", "orders", "--from", database_url, code=1)
    assert "known are: payments" in unknown.stderr.replace("\n", " ")


def test_documents_are_written(shop: Shop, tmp_path: Path) -> None:
    document = json.loads(shop.schema("docs").stdout)
    assert document["asyncapi"] == "3.0.0"
    assert "payments" in json.dumps(document)
    shop.schema("docs", "--output", str(tmp_path / "events"))
    names = {path.name for path in (tmp_path / "events").iterdir()}
    assert {"asyncapi.json", "index.md"} < names


def test_a_lock_of_a_former_release_holds_and_is_completed(shop: Shop) -> None:
    shop.write("at: AwareDatetime")
    shop.schema("lock")
    (path,) = shop.folder.iterdir()
    document = json.loads(path.read_text())
    assert document["properties"]["at"].pop("x-penstock-demands") == ["with a time zone"]
    assert document["x-penstock"].pop("names_demands") is True
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    assert "`penstock schema lock` completes them" in told(shop.schema("check"))
    assert told(shop.schema("diff", "schemas", "code")) == "They are the same. "
    shop.schema("lock")
    assert "completes" not in told(shop.schema("check"))
    # What a former release would not have seen.
    shop.write("at: NaiveDatetime")
    assert "not without a time zone" in shop.schema("check", code=1).stdout


def test_a_demand_that_is_new_is_a_break(shop: Shop) -> None:
    shop.write("at: datetime")
    shop.schema("lock")
    shop.write("at: AwareDatetime")
    assert "format-tightened" in shop.schema("check", code=1).stdout
    assert shop.schema("check", "--rule", "forward").stdout == ""


def test_an_event_type_may_be_longer_than_the_name_of_a_file(penstock: Penstock) -> None:
    for event_type in ("é" * 200, "é" * 199 + "è"):
        shop = Shop(penstock, event_type)
        shop.write("cents: int")
        shop.schema("lock")
    names = {path.name for path in shop.folder.iterdir()}
    assert len(names) == 2
    assert all(name.endswith(".v1.json") and len(name) <= 255 for name in names)
    assert "event-removed" in shop.schema("check", code=1).stdout


def test_what_cannot_be_written_there_is_told(shop: Shop, tmp_path: Path) -> None:
    shop.schema("lock")
    (tmp_path / "file").write_text("in the way")
    for arguments, words in (
        (("lock", "--folder", "file"), "file is no folder"),
        (("check", "--folder", "file"), "file is no folder"),
        (("lock", "--folder", "file/schemas"), "cannot be a folder: Not a directory"),
        (("docs", "--output", "file"), "cannot be a folder: File exists"),
        (("pull", "payments", "--from", "schemas", "--output", "schemas"), "Is a directory"),
        (("pull", "payments", "--from", "schemas", "--output", "no/where.py"), "No such file"),
    ):
        assert words in told(shop.schema(*arguments, code=2))
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("type", 5),
        ("type", "objekt"),
        ("required", 5),
        ("properties", []),
        ("properties", {"cents": 5}),
        ("properties", {"cents": {"minimum": "0"}}),
        ("$defs", {"A": {"enum": 5}}),
        ("x-penstock", {"type": "a", "version": "first"}),
        ("anyOf", {}),
        ("minimum", float("inf")),
        ("enum", [{"cents": [float("nan")]}]),
        ("const", float("-inf")),
        pytest.param("title", "\ud800", id="half a character"),
    ],
)
def test_a_damaged_lock_is_told_with_its_place(shop: Shop, keyword: str, value: object) -> None:
    shop.schema("lock")
    (path,) = shop.folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), keyword: value}))
    said = told(shop.schema("check", code=2))
    assert "is no locked contract" in said
    assert keyword in said or "first" in said or "surrogates" in said


def test_a_lock_with_a_conflict_is_mended_as_the_error_says(shop: Shop) -> None:
    shop.schema("lock")
    (path,) = shop.folder.iterdir()
    path.write_text("<<<<<<< HEAD\n" + path.read_text())
    said = told(shop.schema("lock", code=2))
    assert "`penstock schema lock --force` writes the files of all event classes anew" in said
    shop.schema("lock", "--force")
    shop.schema("check")


def told(done: Done) -> str:
    return done.stderr.replace("\n", " ")


def test_without_an_application_or_a_class_there_is_nothing_to_check(
    penstock: Penstock, shop: Shop
) -> None:
    assert "--app" in penstock("schema", "check", code=2).stderr
    (penstock.folder / "shop.py").write_text(HEAD)
    said = shop.schema("check", code=2).stderr.replace("\n", " ")
    assert "imports no event class that has a version" in said
