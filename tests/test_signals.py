"""Signals reach whoever asked for them, and nobody else's trouble stops the line."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from typing import Any

import pytest

from penstock import Pipeline
from penstock.errors import RegistrationError
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted, subscribe, subscribe_to_all, unsubscribe
from penstock.telemetry.signals import Level, Signal


def test_every_signal_of_the_module_is_in_the_registry() -> None:
    declared = {
        name: value
        for name, value in vars(signals).items()
        if isinstance(value, type) and issubclass(value, Signal) and value is not Signal
    }
    assert Signal.registry == declared
    assert all(is_dataclass(signal) for signal in declared.values())


def test_a_signal_keeps_the_level_that_it_was_declared_with() -> None:
    assert signals.LeaseAcquired.level is Level.INFO
    assert signals.EventFailed.level is Level.ERROR
    assert signals.BatchRead.level is Level.DEBUG


def test_a_subscriber_hears_its_signals_until_it_leaves() -> None:
    heard: list[Signal] = []
    listen = heard.append
    subscribe(signals.BatchConfirmed, listen)
    assert is_wanted(signals.BatchConfirmed)
    emit(signals.BatchConfirmed("orders", 1))
    emit(signals.BatchRead("c", 1, 2))
    unsubscribe(listen)
    emit(signals.BatchConfirmed("orders", 2))
    assert heard == [signals.BatchConfirmed("orders", 1)]
    assert not is_wanted(signals.BatchConfirmed)


def test_a_subscriber_that_raises_stops_nobody() -> None:
    heard: list[Signal] = []

    def broken(_signal: Signal) -> None:
        raise ValueError

    subscribe_to_all(broken)
    subscribe_to_all(heard.append)
    try:
        emit(signals.BatchConfirmed("orders", 1))
    finally:
        unsubscribe(broken)
        unsubscribe(heard.append)
    assert len(heard) == 1


async def awaiting(_signal: Signal) -> None: ...
def yielding(_signal: Signal) -> Any:
    yield


class Awaiting:
    async def __call__(self, _signal: Signal) -> None: ...


@pytest.mark.parametrize("wrong", ["EventBuried", signals, Signal, int, awaiting, None])
def test_an_application_cannot_wait_for_what_never_comes(wrong: Any) -> None:
    with pytest.raises(RegistrationError, match=r"Write @pipeline\.on\(EventBuried\)"):
        Pipeline("shop").on(wrong)


@pytest.mark.parametrize(
    "wrong", [awaiting, Awaiting(), Awaiting().__call__, partial(awaiting), yielding, None, 5]
)
def test_an_application_cannot_be_told_by_what_nobody_runs(wrong: Any) -> None:
    pipeline = Pipeline("shop")
    for register in (pipeline.on(signals.EventBuried), pipeline.on_dead_letter):
        with pytest.raises(RegistrationError, match="cannot subscribe: "):
            register(wrong)
