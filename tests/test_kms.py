"""Wrapping keys: AWS KMS over HTTP, a file for development; keys in memory and outages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from penstock.core.key_rings import KEY_SECONDS, KEY_STALE_SECONDS
from penstock.core.wrapped_keys import WrappedKey, key_id_of
from penstock.errors import ExtraMissing, KeyRefused, KeyShredded, KeyUnavailable, UsageError
from penstock.stores.kms import kms_for, wrapping_context
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.unwrapping import Unwrapping
from penstock.telemetry import signals
from tests.fake_kms import WRONG_BODIES, FakeKms, hide_package, lead_to, running_kms
from tests.test_consumer import heard

ORDERS = wrapping_context("orders", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKms]:
    with running_kms(monkeypatch) as kms:
        yield kms


def test_aws_kms_wraps_for_one_stream_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        lead_to(monkeypatch, f"http://{host}:{port}")
        client: Any = boto3.client("kms")
        arn = client.create_key()["KeyMetadata"]["Arn"]
        client.create_alias(AliasName="alias/orders", TargetKeyId=arn)
        for name in (arn, "alias/orders", f"aws:{arn.rpartition('/')[2]}"):
            new = kms_for(name).generate(ORDERS)
            assert len(new.secret) == 32
            # An alias may lead elsewhere tomorrow; what is recorded does not.
            assert new.kms_key_id == arn
            assert kms_for(arn).unwrap(new.wrapped, ORDERS) == new.secret
            again = kms_for(arn).wrap(new.secret, ORDERS)
            assert kms_for(arn).unwrap(again.wrapped, ORDERS) == new.secret
        with pytest.raises(KeyRefused):
            kms_for(arn).unwrap(new.wrapped, wrapping_context("orders", 2))
        with pytest.raises(KeyRefused, match="KMS refuses"):
            kms_for("alias/nobody").generate(ORDERS)
    finally:
        server.stop()


def test_a_kms_that_is_not_there_is_not_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(KeyUnavailable, match="cannot be asked"):
        kms_for("alias/away").generate(ORDERS)


@pytest.mark.parametrize("body", WRONG_BODIES)
def test_an_answer_that_is_none_is_not_believed_and_not_taken_for_a_no(
    fake: FakeKms, body: str
) -> None:
    kms = kms_for(fake.arn)
    new = kms.generate(ORDERS)
    fake.answer = body
    for asked in (
        lambda: kms.generate(ORDERS),
        lambda: kms.wrap(new.secret, ORDERS),
        lambda: kms.unwrap(new.wrapped, ORDERS),
    ):
        with pytest.raises(KeyUnavailable, match="cannot be asked"):
            asked()


def test_a_key_that_the_answer_does_not_name_by_its_arn_is_not_used(fake: FakeKms) -> None:
    """It is recorded with the data key: an alias may lead elsewhere tomorrow."""
    # A name that no other test asks for: clients are kept, with the place that they ask.
    fake.arn = "alias/unnamed"
    kms = kms_for(fake.arn)
    with pytest.raises(KeyUnavailable, match="names no key by its ARN"):
        kms.generate(ORDERS)
    with pytest.raises(KeyUnavailable, match="names no key by its ARN"):
        kms.wrap(bytes(32), ORDERS)


def test_a_refusal_names_the_right_that_is_missing(fake: FakeKms) -> None:
    kms = kms_for(fake.arn)
    fake.answer = "refuse"
    with pytest.raises(KeyRefused, match="role kms:GenerateDataKey on"):
        kms.generate(ORDERS)
    with pytest.raises(KeyRefused, match="role kms:Encrypt on"):
        kms.wrap(b"x" * 32, ORDERS)
    with pytest.raises(KeyRefused, match="role kms:Decrypt on"):
        kms.unwrap(b"x", ORDERS)


def test_a_key_file_is_its_owners_and_wraps_for_one_stream(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert KeyFile(str(path)).create()
    assert not KeyFile(str(path)).create()
    assert path.stat().st_mode & 0o777 == 0o600
    kms = kms_for(f"file:{path}")
    new = kms.generate(ORDERS)
    assert kms.unwrap(new.wrapped, ORDERS) == new.secret
    with pytest.raises(KeyRefused, match="has not wrapped"):
        kms.unwrap(new.wrapped, wrapping_context("returns", 1))
    path.chmod(0o640)
    with pytest.raises(KeyRefused, match="chmod 600"):
        kms.unwrap(new.wrapped, ORDERS)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(KeyRefused, match="holds no key"):
        kms.unwrap(new.wrapped, ORDERS)
    with pytest.raises(KeyRefused, match="cannot be made"):
        KeyFile(str(path / "key")).create()
    path.unlink()
    with pytest.raises(KeyRefused, match="cannot be read"):
        kms.unwrap(new.wrapped, ORDERS)


def test_without_its_package_a_key_file_is_neither_made_nor_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kms = KeyFile(str(tmp_path / "key"))
    kms.create()
    new = kms.generate(ORDERS)
    other = tmp_path / "other"
    hide_package(monkeypatch, "cryptography")
    for asked in (
        lambda: kms.generate(ORDERS),
        lambda: kms.unwrap(new.wrapped, ORDERS),
        lambda: KeyFile(str(other)).create(),
    ):
        with pytest.raises(ExtraMissing, match=r"penstock\[crypto\]"):
            asked()
    assert not other.exists()


def test_without_a_region_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(KeyRefused, match="set AWS_REGION") as refused:
        kms_for("alias/lost").generate(ORDERS)
    assert ".." not in str(refused.value)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with pytest.raises(KeyUnavailable, match="cannot be asked"):
        kms_for("alias/lost").generate(ORDERS)


def test_an_id_of_no_known_kind_is_explained() -> None:
    with pytest.raises(UsageError, match="alias/NAME"):
        kms_for("vault:secret")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wrapped(fake: FakeKms) -> WrappedKey:
    new = kms_for(fake.arn).generate(ORDERS)
    fake.asked.clear()
    return WrappedKey("orders", 1, "v1-a", new.wrapped, new.kms_key_id)


def test_the_kms_is_asked_once_and_again_when_the_key_is_old(
    fake: FakeKms, wrapped: WrappedKey
) -> None:
    clock = Clock()
    keys = Unwrapping(clock)
    first = keys.key(wrapped)
    assert keys.key(wrapped) is first
    assert fake.asked == ["Decrypt"]
    clock.now = KEY_SECONDS
    assert keys.key(wrapped) is not first
    assert fake.asked == ["Decrypt"] * 2


@pytest.mark.parametrize("answer", ["fail", "throttle", "stop at the gate", *WRONG_BODIES])
def test_while_the_kms_is_away_a_known_key_goes_on_for_a_while_and_no_other(
    fake: FakeKms, wrapped: WrappedKey, answer: str
) -> None:
    clock = Clock()
    keys = Unwrapping(clock)
    first = keys.key(wrapped)
    fake.answer = answer
    clock.now = KEY_SECONDS
    with heard(signals.KeyOutlived) as outlived:
        assert keys.key(wrapped) is first
        assert keys.key(wrapped) is first
    assert len(outlived) == 1
    unknown = WrappedKey("orders", 1, "v1-b", wrapped.wrapped, wrapped.kms_key_id)
    with pytest.raises(KeyUnavailable, match="v1-b"):
        keys.key(unknown)
    clock.now = KEY_STALE_SECONDS
    with pytest.raises(KeyUnavailable):
        keys.key(wrapped)


def test_a_key_is_known_by_its_id_unless_it_is_one_of_the_first(
    fake: FakeKms, wrapped: WrappedKey
) -> None:
    fake.answer = "give another"
    Unwrapping(Clock()).key(wrapped)
    secret = bytes(32)
    key_id = key_id_of(1, secret)
    known = replace(wrapped, key_id=key_id)
    assert known.may_be(secret)
    assert not known.may_be(b"x" * 32)
    with pytest.raises(KeyUnavailable, match="gave another key"):
        Unwrapping(Clock()).key(known)
    # It lies where everybody may look.
    assert secret.hex()[:8] not in key_id
    assert key_id_of(2, secret) != key_id


def test_a_refusal_is_not_an_outage_and_the_key_is_dropped(
    fake: FakeKms, wrapped: WrappedKey
) -> None:
    clock = Clock()
    keys = Unwrapping(clock)
    keys.key(wrapped)
    fake.answer = "refuse"
    clock.now = KEY_SECONDS
    with heard(signals.KeyWithdrawn) as withdrawn, pytest.raises(KeyRefused):
        keys.key(wrapped)
    assert len(withdrawn) == 1
    fake.answer = "fail"
    with pytest.raises(KeyUnavailable):
        keys.key(wrapped)


def test_a_shredded_key_is_not_used_though_it_was_just_unwrapped(
    fake: FakeKms, wrapped: WrappedKey
) -> None:
    keys = Unwrapping(Clock())
    keys.key(wrapped)
    shredded = WrappedKey("orders", 1, "v1-a", None, wrapped.kms_key_id)
    with pytest.raises(KeyShredded):
        keys.key(shredded)
    fake.answer = "fail"
    with pytest.raises(KeyUnavailable):
        keys.key(wrapped)
