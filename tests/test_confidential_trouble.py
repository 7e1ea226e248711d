"""Confidential events that cannot be opened, or fail: nothing leaks, nothing is skipped unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
import redis

from penstock import Context
from penstock.core.retry import Retry
from penstock.errors import (
    ContractMissing,
    ExtraMissing,
    KeyRefused,
    KeyUnavailable,
    OperationRefused,
    SealBroken,
    StreamConfidential,
)
from penstock.stores import sealing
from penstock.stores.data_keys import DataKeys
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.servers import Servers
from penstock.stores.unwrapping import unwrapping
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from tests import canary
from tests.databases import new_database
from tests.fake_kms import FakeKms, hide_package, running_kms
from tests.test_cli import Penstock
from tests.test_consumer import heard
from tests.vault import STREAM, Admitted, Vault, new_key_file
from tests.waiting import wait_until

CANARY = "Zebrafieber-9174-QX"
Seen = list[str]


@pytest.fixture
def vault(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(database_url, redis_url, new_key_file(tmp_path), dead_letter_stream="troubles")
    vault.make_confidential()
    yield vault
    vault.close()


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKms]:
    with running_kms(monkeypatch) as fake:
        yield fake


@pytest.fixture
def guarded(database_url: str, redis_url: str, kms: FakeKms) -> Iterator[Vault]:
    """A vault whose wrapping key is the fake's."""
    vault = Vault(database_url, redis_url, kms.arn)
    vault.make_confidential()
    yield vault
    vault.close()


def noting(seen: Seen) -> Callable[[Admitted], None]:
    def handler(event: Admitted) -> None:
        seen.append(event.diagnosis)

    return handler


def test_tampered_events_are_reported_buried_and_seen_by_no_handler(vault: Vault) -> None:
    for number in range(5):
        vault.send(f"d{number}", patient=f"p{number}")
    swap = (
        "UPDATE events.outbox_event o SET payload = other.payload FROM events.outbox_event other"
        " WHERE o.id IN (1, 2) AND other.id = 3 - o.id"
    )
    vault.connection.execute(swap)
    vault.connection.execute("UPDATE events.outbox_event SET version = 2 WHERE id = 3")
    vault.connection.execute("UPDATE events.outbox_event SET key_id = 'v1-nobodys' WHERE id = 4")
    seen: Seen = []
    with heard(signals.TamperingFound) as found, vault.working(noting(seen)):
        vault.wait_for_outcomes("dead", "dead", "dead", "dead", "handled")
    assert seen == ["d4"]
    assert sorted(each.position for each in found) == [1, 2, 3, 4]
    reasons = vault.connection.execute("SELECT DISTINCT reason FROM events.dead_letter").fetchall()
    assert reasons == [("tampered",)]


def test_events_of_a_shredded_key_are_passed_by_and_the_books_balance(
    vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault.send("one", "two")
    with pytest.raises(OperationRefused, match="rotate"):
        DataKeys().shred(vault.connection, STREAM, 1)
    DataKeys().rotate(vault.connection, STREAM)
    sealing.forget()
    vault.send("three")
    assert DataKeys().shred(vault.connection, STREAM, 1)
    assert not DataKeys().shred(vault.connection, STREAM, 1)
    seen: Seen = []
    with heard(signals.EventShredded) as shredded, vault.working(noting(seen)):
        vault.wait_for_outcomes("skipped", "skipped", "handled")
    assert seen == ["three"]
    assert [each.position for each in shredded] == [1, 2]
    variables = {"PENSTOCK_DATABASE_URL": vault.database_url}
    Penstock(tmp_path, variables, capsys)("verify")


def test_nobody_seals_with_a_key_that_is_shredded_meanwhile(vault: Vault) -> None:
    vault.send("known")
    DataKeys().rotate(vault.connection, STREAM)
    # This process has not heard of the new key yet.
    DataKeys().shred(vault.connection, STREAM, 1)
    with pytest.raises(StreamConfidential, match="send again"):
        vault.send("lost")
    vault.send("found")
    assert vault.row("SELECT count(*) FROM events.outbox_event") == (2,)


@pytest.mark.parametrize("answer", ["fail", "refuse", "a page", "a short key", "give another"])
def test_a_consumer_waits_for_its_key_and_counts_no_attempt(
    guarded: Vault, kms: FakeKms, answer: str
) -> None:
    guarded.send("measles")
    unwrapping.cache_clear()
    kms.answer = answer
    seen: Seen = []
    handler = noting(seen)
    with heard(signals.ConsumerBlocked) as blocked, guarded.working(handler):
        wait_until(lambda: bool(blocked), what="the consumer says that it waits")
        assert guarded.outcomes() == []
        kms.answer = "serve"
        guarded.wait_for_outcomes("handled")
    assert seen == ["measles"]
    assert "kms" in blocked[0].reason.lower()
    assert guarded.row("SELECT count(*) FROM events.parked_event") == (0,)


def test_without_the_package_that_opens_events_nothing_is_sent_and_a_consumer_waits(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault.send("measles")
    seen: Seen = []
    with heard(signals.ConsumerBlocked) as blocked, ExitStack() as stack:
        with monkeypatch.context() as hidden:
            hide_package(hidden, "cryptography")
            unwrapping.cache_clear()
            with pytest.raises(ExtraMissing, match="cryptography"):
                vault.send("mumps")
            stack.enter_context(vault.working(noting(seen)))
            wait_until(lambda: bool(blocked), what="the consumer says that it waits")
            assert vault.outcomes() == []
        vault.wait_for_outcomes("handled")
    assert seen == ["measles"]
    assert "penstock[crypto]" in blocked[0].reason


@pytest.mark.parametrize("answer", ["fail", "a page", "give another"])
def test_while_the_kms_is_away_senders_get_a_clear_error_and_known_keys_go_on(
    guarded: Vault, kms: FakeKms, answer: str
) -> None:
    kms.answer = answer
    with pytest.raises(KeyUnavailable, match=f"Nothing was sent to '{STREAM}'"):
        guarded.send("one")
    kms.answer = "serve"

    def is_sent() -> bool:
        try:
            guarded.send("two")
        except KeyUnavailable:
            return False
        return True

    wait_until(is_sent, what="the KMS is asked again")
    kms.answer = "fail"
    guarded.send("three")
    assert guarded.row("SELECT count(*), count(key_id) FROM events.outbox_event") == (2, 2)


def test_an_operator_is_told_that_something_answers_in_the_place_of_the_kms(
    guarded: Vault, kms: FakeKms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock = Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": guarded.database_url}, capsys)
    kms.answer = "a page"
    for command in ("rotate", "rewrap"):
        said = penstock("policy", command, STREAM, code=1).stderr
        assert "no answer of a KMS" in said
    kms.answer = "give another"
    assert "gave another key" in penstock("policy", "rewrap", STREAM, code=1).stderr
    assert guarded.row("SELECT count(*) FROM events.data_key") == (2,)


def fail_with(diagnosis: str, kind: type[Exception]) -> None:
    try:
        raise KeyError(diagnosis)
    except KeyError as error:
        error.add_note(f"a note about {diagnosis}")
        raise kind(f"cannot treat {diagnosis}") from error


@pytest.mark.parametrize("kind", [ValueError, SealBroken, psycopg.OperationalError])
def test_a_known_plaintext_is_nowhere_to_be_found(
    kind: type[Exception],
    vault: Vault,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(event: Admitted, context: Context) -> None:
        assert context.once("charge", lambda: {"for": event.diagnosis}) == {"for": event.diagnosis}
        fail_with(event.diagnosis, kind)

    said: list[object] = []
    subscribe_to_all(said.append)
    retry = Retry.exponential(first_seconds=0.01, longest_seconds=0.01, attempts_max=2)
    try:
        with psycopg.connect(vault.database_url) as connection:
            event = Admitted(patient=f"{CANARY} key", diagnosis=CANARY)
            vault.pipeline.send(connection, STREAM, event, metadata={"about": CANARY})
        with vault.working(failing, retry=retry):
            vault.wait_for_outcomes("dead")
    finally:
        unsubscribe(said.append)
    variables = {"PENSTOCK_DATABASE_URL": vault.database_url, "PENSTOCK_REDIS_URL": vault.redis_url}
    penstock = Penstock(tmp_path, {k: str(v) for k, v in variables.items()}, capsys)
    commands = ("dlq list", "dlq show 1", "dlq show 1 --json", "parked list", "status")
    said += [penstock(*command.split()).stdout for command in commands]
    said += caplog.records
    assert any(kind.__name__ in str(words) for words in said)
    assert canary.found_in_words(CANARY, said) == []
    assert canary.found_in_database(CANARY, vault.connection) == []
    assert canary.found_in_redis(CANARY, str(vault.redis_url)) == []
    assert vault.row("SELECT result::text FROM events.effect")[0].startswith('"penstock-sealed:')

    revealed = json.loads(penstock("dlq", "show", "1", "--reveal", "--json").stdout)
    assert revealed["payload"] == {"patient": f"{CANARY} key", "diagnosis": CANARY}
    assert revealed["key"] == f"{CANARY} key"
    assert f"cannot treat {CANARY}" in revealed["traceback"]


def test_a_consumer_with_sealed_results_keeps_its_name(
    vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_broken, results = True, list[object]()

    def handle(event: Admitted, context: Context) -> None:
        result = context.once("charge", lambda: event.diagnosis)
        if is_broken:
            raise ValueError("not now")
        results.append(result)

    retry = Retry.fixed(seconds=0.1, attempts_max=1000)
    vault.send("flu")
    with vault.working(handle, retry=retry):
        vault.wait_for_outcomes("parked")
    penstock = Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": vault.database_url}, capsys)
    said = penstock("consumers", "rename", "clinic.read", "clinic.treat", code=1).stderr
    assert "1 results of its calls to the outside are sealed for that name" in said
    is_broken = False
    with vault.working(handle, retry=retry):
        vault.wait_for_outcomes("handled")
    assert results == ["flu"]


@pytest.mark.parametrize("kind", [KeyUnavailable, KeyRefused, ContractMissing])
def test_a_handler_that_blocks_its_lane_is_not_quoted(vault: Vault, kind: type[Exception]) -> None:
    def failing(event: Admitted) -> None:
        raise kind(event.diagnosis)

    vault.send(CANARY)
    with heard(signals.ConsumerBlocked) as blocked, vault.working(failing):
        wait_until(lambda: len(blocked) > 0, what="it is blocked")
    assert kind.__name__ in blocked[0].reason
    assert CANARY not in blocked[0].reason


def test_the_search_finds_a_canary_that_is_there(vault: Vault) -> None:
    with psycopg.connect(vault.database_url) as connection:
        vault.pipeline.send(connection, "open", Admitted(patient="p", diagnosis="Sumpf-4711"))
    assert canary.found_in_database("Sumpf-4711", vault.connection)
    with vault.working():
        wait_until(
            lambda: bool(canary.found_in_redis("Sumpf-4711", str(vault.redis_url))),
            what="it is published",
        )


def test_the_janitor_replaces_an_old_key_and_the_copy_follows(vault: Vault) -> None:
    vault.send("one")
    vault.connection.execute("UPDATE events.data_key SET created_at = now() - interval '1 year'")
    with (
        heard(signals.KeyRotated) as rotated,
        vault.working(roles=("publisher", "janitor")),
        closing(redis.Redis.from_url(str(vault.redis_url))) as client,
    ):
        key = f"penstock:{{{STREAM}}}:keys"
        wait_until(lambda: b"v2-" in (client.get(key) or b""), what="the new key is copied")
        client.delete(key)
        wait_until(lambda: b"v2-" in (client.get(key) or b""), what="it is copied again")
        sealing.forget()
        DataKeys().shred(vault.connection, STREAM, 1)
        wait_until(
            lambda: b'\\"wrapped\\":null' in (client.get(key) or b""), what="a copy is shredded"
        )
    assert [(each.stream_name, each.version) for each in rotated] == [(STREAM, 2)]
    sealing.forget()
    vault.send("two")
    assert vault.row("SELECT count(DISTINCT key_id) FROM events.outbox_event") == (2,)


def test_something_else_in_the_place_of_one_copy_holds_up_no_other(vault: Vault) -> None:
    streams = ["alpha", "beta", "gamma", STREAM]
    for stream_name in streams[:-1]:
        vault.make_confidential(stream_name=stream_name)
    with vault.connection.transaction():
        for stream_name in streams:
            event = Admitted(patient="p1", diagnosis="flu")
            vault.pipeline.send(vault.connection, stream_name, event)
    keys = [f"penstock:{{{stream_name}}}:keys" for stream_name in streams]
    with (
        closing(redis.Redis.from_url(str(vault.redis_url))) as client,
        heard(signals.ServerLost) as lost,
        heard(signals.ServerFound) as found,
        vault.working(),
    ):
        wait_until(lambda: client.exists(*keys) == len(keys), what="all are copied")
        for spoilt in keys:
            client.delete(*keys)
            client.lpush(spoilt, "mine")
            wait_until(lambda: client.exists(*keys) == len(keys), what="the others are copied")
            assert client.lrange(spoilt, 0, -1) == [b"mine"]
            wait_until(lambda: len(lost) == len(found) + 1, what="the one is told")
            client.delete(spoilt)
            wait_until(lambda: len(lost) == len(found), what="its end is told")
    assert [each.server for each in lost] == [
        f"the copy of the data keys of {stream_name}" for stream_name in streams
    ]


def test_a_service_elsewhere_needs_the_hot_log_and_the_kms_only(
    vault: Vault, servers: Servers, template_database: str
) -> None:
    vault.send("one", "two")
    source = {"mac_key": MacKeyTable().read(vault.connection).as_setting()}
    seen: Seen = []
    with (
        new_database(servers.database_url, template_database) as url,
        vault.working(),
        closing(Vault(url, vault.redis_url, vault.kms_key_id)) as elsewhere,
        elsewhere.working(noting(seen), roles=(), source=source, start="earliest"),
    ):
        elsewhere.wait_for_outcomes("handled", "handled")
    assert seen == ["one", "two"]
