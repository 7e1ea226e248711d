"""Parked events whose data key cannot be had: they wait, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.retry import Retry
from penstock.core.settings import Settings
from penstock.ops.policy_keys import rotate
from penstock.stores import sealing
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.unwrapping import unwrapping
from penstock.telemetry import signals
from tests.test_consumer import heard
from tests.vault import STREAM, Admitted, Vault, new_key_file
from tests.waiting import wait_until

RETRY = Retry.fixed(seconds=0.2, attempts_max=20)
OTHERS = 6


@pytest.fixture
def vault(database_url: str, tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(database_url, None, new_key_file(tmp_path))
    vault.make_confidential()
    yield vault
    vault.close()


@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_parked_event_without_its_key_holds_nobody_up(
    vault: Vault, tmp_path: Path, batch_size: int
) -> None:
    is_broken, seen = True, list[str]()

    def handle(event: Admitted) -> None:
        if is_broken:
            raise ValueError("not now")
        seen.append(event.diagnosis)

    vault.send("alone", patient="p0")
    # The next key is wrapped by another key of the KMS.
    other = tmp_path / "other.key"
    KeyFile(str(other)).create()
    vault.connection.execute("UPDATE events.stream_policy SET kms_key_id = %s", (f"file:{other}",))
    rotate(vault.connection, Settings(**vault.settings), STREAM, by="somebody")
    sealing.forget()
    for number in range(OTHERS):
        vault.send(f"other {number}", patient=f"p{number + 1}")
    with vault.working(handle, retry=RETRY):
        vault.wait_for_outcomes(*["parked"] * (OTHERS + 1))
    is_broken = False
    first = tmp_path / "wrapping.key"
    first.rename(tmp_path / "gone")
    unwrapping.cache_clear()
    with (
        heard(signals.ConsumerBlocked) as blocked,
        heard(signals.EventParked) as parked,
        vault.working(handle, retry=RETRY, batch_size=batch_size),
    ):
        wait_until(lambda: len(seen) == OTHERS, what="the others are handled")
        assert [signal.position for signal in blocked] == [1]
        (tmp_path / "gone").rename(first)
        unwrapping.cache_clear()
        wait_until(lambda: "alone" in seen, what="the first one is handled")
    # Whoever waits for a key has not failed.
    assert parked == []
