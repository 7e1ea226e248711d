"""Event classes: registered once, and read in any version that upcasters lead from."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import orjson
import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    computed_field,
)

from penstock import ContractError, Event, Pipeline, StreamEvent
from penstock.core import contracts
from penstock.core.contract_schema import contract_of, json_schema_of
from penstock.core.encoding import encode_typed
from penstock.core.schema.nodes import ALIASES
from penstock.core.wire import Entry
from penstock.errors import ContractMissing, RegistrationError
from penstock.pipeline.signature import read_signature

SOURCE = """
from penstock import Event

class Placed(Event, type="{event_type}", version=1):
    order_id: int
"""


def entry_of(payload: Any, event_type: str, version: int) -> Entry:
    fields = (b"1", b"1", b"", b"0", b"null", b"{}")
    raw = payload if isinstance(payload, bytes) else orjson.dumps(payload)
    uuid = "00000000-0000-0000-0000-00000000000a"
    return Entry("s", 1, "origin", uuid, event_type, version, fields, raw)


def import_file(path: Path, name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def write_module(folder: Path, name: str, event_type: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(SOURCE.format(event_type=event_type))
    return path


# ── classes ────────────────────────────────────────────────────────────────────────────────────


def test_a_type_and_version_is_one_class(tmp_path: Path) -> None:
    import_file(write_module(tmp_path, "first", "twice.placed"), "first_twice")
    with pytest.raises(RegistrationError) as caught:
        import_file(write_module(tmp_path, "second", "twice.placed"), "second_twice")
    message = str(caught.value)
    assert "second_twice.Placed and first_twice.Placed are both version 1 of 'twice.placed'" in (
        message
    )
    assert "import the class" in message


def test_the_same_file_may_be_imported_again_and_under_two_names(tmp_path: Path) -> None:
    path = write_module(tmp_path, "shop", "again.placed")
    import_file(path, "shop_again")
    latest = import_file(path, "main_again").Placed
    assert latest in contracts.known_classes()


def test_a_module_that_was_thrown_away_has_no_classes_any_more(tmp_path: Path) -> None:
    import_file(write_module(tmp_path, "old", "gone.placed"), "gone_module")
    del sys.modules["gone_module"]
    latest = import_file(write_module(tmp_path, "new", "gone.placed"), "new_module").Placed
    assert latest in contracts.known_classes()


def test_classes_without_a_version_may_share_a_name() -> None:
    def one() -> type[Event]:
        class Base(Event): ...

        return Base

    def other() -> type[Event]:
        class Base(Event): ...

        return Base

    assert one().__event_type__ == other().__event_type__ == "Base"


# ── reading older versions ─────────────────────────────────────────────────────────────────────


class NamedV1(Event, type="contracts.named", version=1):
    name: str


class NamedV2(Event, type="contracts.named", version=2):
    first: str
    last: str


class Named(Event, type="contracts.named", version=3):
    first: str
    last: str
    initials: str = "?"


@Named.upcast(from_version=1)
def split(old: NamedV1) -> dict[str, Any]:
    first, last = old.name.split(" ")
    return {"first": first, "last": last}


@Named.upcast(from_version=2)
def initial(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "initials": old["first"][0] + old["last"][0]}


def take_named(event: Named) -> None: ...
def take_second(event: NamedV2) -> None: ...
def take_first(event: NamedV1) -> None: ...
def take_any(event: NamedV1 | Named) -> None: ...
def take_wrapped(event: StreamEvent[Named]) -> None: ...


def read(handler: Any, entry: Entry) -> Any:
    return read_signature(handler, "c").decode(entry)


def first_version(payload: Any = None) -> Entry:
    return entry_of(payload or {"name": "Ada Lovelace"}, "contracts.named", 1)


def test_an_old_event_is_read_step_by_step_as_the_current_version() -> None:
    assert read(take_named, first_version()) == Named(first="Ada", last="Lovelace", initials="AL")
    second = entry_of({"first": "Ada", "last": "Lovelace"}, "contracts.named", 2)
    assert read(take_named, second) == Named(first="Ada", last="Lovelace", initials="AL")
    third = entry_of({"first": "A", "last": "L"}, "contracts.named", 3)
    assert read(take_named, third) == Named(first="A", last="L")


def test_a_wrapped_event_keeps_the_version_that_it_was_sent_in() -> None:
    wrapped = read(take_wrapped, first_version())
    assert (wrapped.version, wrapped.payload.initials) == (1, "AL")


def test_a_consumer_may_ask_for_an_older_version() -> None:
    assert read(take_second, first_version()) == NamedV2(first="Ada", last="Lovelace")
    assert read(take_first, first_version()) == NamedV1(name="Ada Lovelace")
    newest = entry_of({"first": "A", "last": "L", "initials": "AL"}, "contracts.named", 3)
    with pytest.raises(ContractMissing, match="has version 3; this consumer understands version 2"):
        read(take_second, newest)


def test_the_exact_version_comes_before_any_upcaster() -> None:
    assert isinstance(read(take_any, first_version()), NamedV1)
    second = entry_of({"first": "Ada", "last": "Lovelace"}, "contracts.named", 2)
    assert isinstance(read(take_any, second), Named)


class StoredV2(Event, type="contracts.stored", version=2):
    n: int


class StoredV4(Event, type="contracts.stored", version=4):
    m: int


@StoredV2.upcast(from_version=1)
def stored_as_number(old: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(old["text"])}


def take_both(event: StoredV2 | StoredV4) -> None: ...


def test_an_old_event_is_read_as_the_greatest_version_that_it_leads_to() -> None:
    entry = entry_of({"text": "7"}, "contracts.stored", 1)
    assert read(take_both, entry) == StoredV2(n=7)
    with pytest.raises(ContractMissing, match="no upcaster from version 3 to 4"):
        read(take_both, entry_of({"n": 7}, "contracts.stored", 3))


def test_unknown_fields_survive_the_steps_that_keep_them() -> None:
    second = entry_of({"first": "A", "last": "L", "later": 1}, "contracts.named", 2)
    read_event = read(take_named, second)
    assert read_event.model_extra == {"later": 1}


class Gapped(Event, type="contracts.gapped", version=4):
    n: int


@Gapped.upcast(from_version=1)
def from_one(old: dict[str, Any]) -> dict[str, Any]:
    return old


def take_gapped(event: Gapped) -> None: ...


def test_a_missing_step_is_named() -> None:
    with pytest.raises(ContractMissing) as caught:
        read(take_gapped, entry_of({"n": 1}, "contracts.gapped", 1))
    message = str(caught.value)
    assert "contracts.gapped of version 1 cannot be read as version 4" in message
    assert "no upcaster from version 2 to 3" in message
    assert caught.value.is_version


class Jumped(Event, type="contracts.jumped", version=5):
    n: int


@Jumped.upcast(from_version=1, to_version=5)
def from_one_to_five(old: dict[str, Any]) -> Jumped:
    return Jumped(n=old["n"] + 1)


def take_jumped(event: Jumped) -> None: ...


def test_a_step_may_jump_and_return_a_model() -> None:
    assert read(take_jumped, entry_of({"n": 1}, "contracts.jumped", 1)) == Jumped(n=2)
    assert contracts.readable_versions(Jumped) == [1]
    assert contracts.readable_versions(Named) == [1, 2]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"name": "Cher"}, "not enough values to unpack"),
        ({"nom": "Ada Lovelace"}, "Field required"),
        ([1], "Input should be an object"),
        (b"{", "EOF while parsing"),
    ],
)
def test_an_upcaster_that_fails_is_a_broken_contract(payload: Any, words: str) -> None:
    with pytest.raises(ContractError) as caught:
        read(take_named, entry_of(payload, "contracts.named", 1))
    assert "The upcaster of contracts.named from version 1 to 2 failed" in str(caught.value)
    assert words in str(caught.value)
    assert not isinstance(caught.value, ContractMissing)


class Careless(Event, type="contracts.careless", version=2):
    n: int


@Careless.upcast(from_version=1)
def forgets_to_return(old: dict[str, Any]) -> None:
    old["n"] = 1


def take_careless(event: Careless) -> None: ...


class Measured(Event, type="contracts.measured", version=2):
    width: int


@Measured.upcast(from_version=1)
def unchecked(old: dict[str, Any]) -> Measured:
    return Measured.model_construct(width=object())  # type: ignore[arg-type]


def test_an_upcaster_whose_model_cannot_be_written_is_a_broken_contract() -> None:
    plan = read_signature(_measured, "measure")
    with pytest.raises(ContractError, match="from version 1 to 2 failed: PydanticSerialization"):
        plan.decode(entry_of({"width": 1}, "contracts.measured", 1))


def _measured(event: Measured) -> None: ...


def test_an_upcaster_that_returns_nothing_is_told() -> None:
    with pytest.raises(ContractError, match="it returned a NoneType and no payload"):
        read(take_careless, entry_of({}, "contracts.careless", 1))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((3, None), "not beyond the class's own"),
        ((0, None), "from a smaller version to a greater one"),
        ((2, 1), "from a smaller version to a greater one"),
        ((1, 4), "not beyond the class's own"),
        ((1, None), "is written twice"),
    ],
)
def test_a_step_that_leads_nowhere_is_refused(steps: tuple[int, int | None], words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        Named.upcast(from_version=steps[0], to_version=steps[1])(lambda old: old)


STEPS = """
from penstock import Event

class Priced(Event, type="{event_type}", version=3):
    cents: int

@Priced.upcast(from_version=1)
def _(old):
    return {{"euros": old["price"]}}

@Priced.upcast(from_version={from_version})
def _(old):
    return {{"cents": old["euros"] * 100}}
"""


def test_two_steps_from_one_version_are_refused_also_under_one_name(tmp_path: Path) -> None:
    path = tmp_path / "priced.py"
    path.write_text(STEPS.format(event_type="twice.priced", from_version=1))
    with pytest.raises(RegistrationError, match="from version 1 to 2 is written twice"):
        import_file(path, "priced_twice")


def test_the_steps_of_a_module_that_is_imported_again_replace_its_former_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "priced.py"
    source = STEPS.format(event_type="again.priced", from_version=2)
    path.write_text(source)
    import_file(path, "priced_again")
    path.write_text(f"# moved\n{source.replace('100', '1000')}")
    importlib.invalidate_caches()
    priced = import_file(path, "main_priced").Priced
    payload = contracts.upcast(b'{"price": 2}', contracts.path("again.priced", 1, 3))
    assert priced.model_validate_json(payload).cents == 2000


def test_a_step_that_nobody_would_await_is_refused() -> None:
    async def later(old: dict[str, Any]) -> dict[str, Any]:
        return old

    with pytest.raises(RegistrationError, match="Write it with a plain def"):
        Named.upcast(from_version=1)(later)


def test_a_step_needs_a_class_with_a_version() -> None:
    class Unversioned(Event): ...

    with pytest.raises(RegistrationError, match="needs an event class with a version"):
        Unversioned.upcast(from_version=1)(lambda old: old)


# ── what others are told of a class ────────────────────────────────────────────────────────────


class Line(BaseModel):
    cents: int


class Wide(Event, type="contracts.wide", version=1):
    lines: list[Line]
    renamed: int = Field(default=3, validation_alias=AliasChoices("renamed", "before"))
    spelled: str = Field(alias="Spelled")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return sum(line.cents for line in self.lines)


def test_a_schema_says_what_is_written() -> None:
    schema = json_schema_of(Wide)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Line"]["additionalProperties"] is False
    assert schema["required"] == ["lines", "Spelled"]
    assert schema["properties"]["renamed"][ALIASES] == ["before"]
    assert schema["properties"]["total"]["type"] == "integer"
    written = Wide(lines=[Line(cents=1)], Spelled="x").model_dump(mode="json", by_alias=True)
    assert written.keys() == schema["properties"].keys()


class Endless(Event, type="contracts.endless", version=1):
    limit: float = float("inf")
    limits: tuple[float, ...] = (1.5, float("nan"))


def test_a_default_that_json_cannot_express_is_not_in_the_schema() -> None:
    # In a lock file it would be no JSON, and other than what is recorded with events.
    properties = json_schema_of(Endless)["properties"]
    assert properties["limit"]["default"] is None
    assert properties["limits"]["default"] == [1.5, None]


class Aliased(Event, type="contracts.aliased", version=1, key="order_id"):
    order_id: int = Field(alias="orderId")


def test_the_key_of_a_contract_is_what_the_field_is_written_as() -> None:
    assert contract_of(Aliased).key == "orderId"


class OneWay(Event, type="contracts.one_way", version=1):
    n: int = Field(validation_alias="number")


def test_an_event_that_could_not_read_itself_is_refused() -> None:
    with pytest.raises(RegistrationError, match="written as 'n' and read as 'number'"):
        json_schema_of(OneWay)


class Hidden(Event):
    n: int = Field(exclude=True)


class AtTimesHidden(Event):
    n: int = Field(exclude_if=lambda n: n == 0)


class Dug(Event):
    n: int = Field(validation_alias=AliasPath("numbers", 0))


class ByNameOnly(Event):
    model_config = ConfigDict(validate_by_alias=False, validate_by_name=True)

    n: int = Field(alias="number")


class Packed(Event):
    n: Json[int]


class Inner(BaseModel):
    n: Json[int]


class PackedInside(Event):
    inner: list[Inner]


class ByPair(Event):
    n: dict[tuple[int, int], int]


class ByNumbers(Event):
    n: dict[Literal[1, 2], int]


class ByLine(Event):
    n: dict[Line, int]


class HalfEncoded(Event):
    model_config = ConfigDict(ser_json_bytes="base64")

    n: bytes


@pytest.mark.parametrize(
    ("event_class", "words"),
    [
        (Hidden, "Hidden.n is required and excluded from what is written"),
        (AtTimesHidden, "AtTimesHidden.n is required and excluded"),
        (Dug, "written as 'n' and read as a part of another field"),
        (ByNameOnly, "written as 'number' and read as 'n'"),
        (Packed, "Packed: Json[…] is read from a text"),
        (PackedInside, "Inner: Json[…] is read from a text"),
        (ByPair, "ByPair: the keys of a dictionary are of the kind tuple"),
        (ByNumbers, "of the kind literal"),
        (ByLine, "keys of a dictionary"),
        (HalfEncoded, "bytes are written as base64 and read as utf8"),
    ],
)
def test_a_class_that_cannot_read_its_own_events_is_refused(
    event_class: type[Event], words: str
) -> None:
    with pytest.raises(RegistrationError, match=re.escape(words)):
        contract_of(event_class)


class Spared(Event):
    """Looks alike, and reads what it writes."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    hidden: int = Field(default=1, exclude=True)
    dug: int = Field(validation_alias=AliasChoices("dug", AliasPath("numbers", 0)))
    packed: Annotated[Json[int], PlainSerializer(str)]
    by_suit: dict[Literal["a"], int]
    encoded: bytes


def test_a_class_that_reads_its_own_events_is_not_refused() -> None:
    sent = Spared(dug=1, packed="2", by_suit={"a": 3}, encoded=b"abc")
    assert Spared.model_validate_json(encode_typed(sent, "spared")) == sent
    assert set(contract_of(Spared).json_schema["properties"]) > {"dug", "packed", "encoded"}


class Doubled(Event, type="contracts.doubled", version=1):
    n: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.n * 2

    @computed_field(alias="Nothing")  # type: ignore[prop-decorator]
    @property
    def nothing(self) -> int:
        return 0


def take_doubled(event: Doubled) -> None: ...


def test_a_computed_field_is_no_unknown_one_to_its_reader() -> None:
    sent = Doubled(n=2)
    written = json.loads(encode_typed(sent, "doubled"))
    assert written == {"n": 2, "double": 4, "Nothing": 0}
    found = read(take_doubled, entry_of(written, "contracts.doubled", 1))
    assert (found, found.model_extra) == (sent, {})
    found = read(take_doubled, entry_of({**written, "z": 1}, "contracts.doubled", 1))
    assert found.model_extra == {"z": 1}


def test_a_pipeline_without_declared_streams_has_nothing_to_register() -> None:
    Pipeline("shop", database_url="postgresql://nowhere/none").register_contracts()
