"""docs/SIGNALS.md says what the code says."""

from __future__ import annotations

from penstock.telemetry import metrics, signals
from penstock.telemetry.signals import Signal
from tests.signal_docs import PATH, document, moved_by


def test_the_page_is_current() -> None:
    assert PATH.read_text() == document(), "run `make docs`"


def test_every_signal_is_on_it() -> None:
    page = PATH.read_text()
    assert [name for name in Signal.registry if f"| `{name}` |" not in page] == []


def test_metrics_are_found_by_what_they_count() -> None:
    assert moved_by(signals.EventFailed) == [metrics.FAILED]
    assert moved_by(signals.BatchAppended) == [metrics.PUBLISH_SECONDS, metrics.HOT_LOG_REFILLED]
    assert moved_by(signals.EventHandled) == []
