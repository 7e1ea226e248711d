"""Metrics: named once, bounded, added up across processes, and told as Prometheus reads them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from penstock.runtime import state_cache
from penstock.runtime.exposition import exposed
from penstock.runtime.metric_pipe import MetricListener, MetricPipe, as_line, from_line
from penstock.runtime.state_cache import StateCache
from penstock.telemetry import metrics, signals
from penstock.telemetry.bus import emit, is_wanted
from penstock.telemetry.meters import Meters, Sums
from penstock.telemetry.metrics import Distribution, Kind, Reading
from tests.waiting import wait_until

BILL = ("shop.bill", "orders")


@contextmanager
def counting() -> Iterator[Meters]:
    meters = Meters()
    meters.start()
    try:
        yield meters
    finally:
        meters.stop()


def of(sums: Sums) -> dict[str, dict[tuple[str, ...], float | Distribution]]:
    """Everything by name and labels."""
    found: dict[str, dict[tuple[str, ...], float | Distribution]] = {}
    for reading in sums.readings():
        found.setdefault(reading.instrument.name, {})[reading.labels] = reading.value
    return found


def of_counter(sums: Sums, instrument: metrics.Instrument) -> dict[tuple[str, ...], float]:
    """One counter by labels."""
    return {
        reading.labels: reading.value
        for reading in sums.readings()
        if reading.instrument is instrument and not isinstance(reading.value, Distribution)
    }


# ── names and text ─────────────────────────────────────────────────────────────────────────────


def test_every_instrument_is_described_and_only_histograms_have_buckets() -> None:
    assert len({instrument.prometheus_name for instrument in metrics.INSTRUMENTS}) == len(
        metrics.INSTRUMENTS
    )
    for instrument in metrics.INSTRUMENTS:
        assert instrument.help.endswith(".")
        assert instrument.unit
        assert bool(instrument.buckets) == (instrument.kind is Kind.HISTOGRAM)
        assert list(instrument.buckets) == sorted(instrument.buckets)
        is_total = instrument.prometheus_name.endswith("_total")
        assert is_total == (instrument.kind is Kind.COUNTER)


def test_no_label_can_forge_a_line() -> None:
    name = 'a"} 1\nforged{b="\\'
    told = exposed([Reading(metrics.LAG_MS, (name, "orders"), 3)])
    assert told.splitlines()[2:] == [
        r'events_pipeline_consumer_lag_ms{consumer="a\"} 1\nforged{b=\"\\",stream="orders"} 3'
    ]


def test_a_metric_is_introduced_once_and_buckets_include_the_smaller_ones() -> None:
    sums = Sums()
    for value in (1, 3, 3, 5000):
        sums.observe(metrics.BATCH_EVENTS, BILL, value)
    sums.count(metrics.HANDLED, BILL, 7)
    sums.count(metrics.HANDLED, ("shop.ship", "orders"), 0)
    lines = exposed(sums.readings()).splitlines()
    name = "events_pipeline_consumer_batch_events"
    labels = 'consumer="shop.bill",stream="orders"'
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE events_pipeline_consumer_handled_total counter",
        f"# TYPE {name} histogram",
    ]
    assert f"events_pipeline_consumer_handled_total{{{labels}}} 7" in lines
    assert f'{name}_bucket{{{labels},le="1"}} 1' in lines
    assert f'{name}_bucket{{{labels},le="5"}} 3' in lines
    assert f'{name}_bucket{{{labels},le="1000"}} 3' in lines
    assert f'{name}_bucket{{{labels},le="+Inf"}} 4' in lines
    assert f"{name}_sum{{{labels}}} 5007" in lines
    assert f"{name}_count{{{labels}}} 4" in lines


# ── adding up ──────────────────────────────────────────────────────────────────────────────────


def test_an_instrument_has_a_bounded_number_of_series() -> None:
    sums = Sums()
    for number in range(metrics.LABELS_MAX + 50):
        sums.count(metrics.PUBLISHED, (f"stream-{number}",))
        sums.take()
        sums.count(metrics.PUBLISHED, (f"stream-{number}",))
    found = of(sums)["events_pipeline.publisher.published"]
    assert set(found) <= {("other",), *((f"stream-{n}",) for n in range(metrics.LABELS_MAX))}
    assert found["other",] == 1
    for number in range(metrics.LABELS_MAX + 50):
        sums.count(metrics.PUBLISHED, (f"stream-{number}",))
    found = of(sums)["events_pipeline.publisher.published"]
    assert len(found) == metrics.LABELS_MAX + 1
    assert found["other",] == 51


def test_signals_are_counted_under_the_stream_of_their_consumer() -> None:
    with counting() as meters:
        emit(signals.ConsumerRegistered("shop.bill", "orders", 1))
        emit(signals.BatchCommitted("shop.bill", 1, 10, 8, 2))
        emit(signals.ParkedHandled("shop.bill", 3, 3, 1))
        emit(signals.EventFailed("shop.bill", 3, "uuid", 1, "ValueError"))
        emit(signals.EventParked("shop.bill", 3, "uuid", 1, 0.5))
        emit(signals.SuccessorsParked("shop.bill", 4))
        emit(signals.EventBuried("shop.bill", 9, "uuid", "why"))
        emit(signals.LeaseAcquired("orders", "consumer:shop.bill/2", "owner", 1))
        emit(signals.LeaseLost("orders", "publisher", "owner", "why"))
        emit(signals.TimersFired(5, 3))
        emit(signals.ServerLost("worker", "Redis", "away"))
        emit(signals.EarlyEventRead("shop.bill", 10))
        emit(signals.EarlyEventRead("shop.bill", 10))
        emit(signals.EarlyEventGivenUp("shop.bill", 10, "why"))
        emit(signals.HotTierRead("shop.bill", 1, 10))
        emit(signals.ColdTierRead("shop.bill", 11, 11))
        found = of(meters.sums)
    assert {name: values.get(BILL) for name, values in found.items() if BILL in values} == {
        "events_pipeline.consumer.handled": 9,
        "events_pipeline.consumer.skipped": 2,
        "events_pipeline.consumer.failed": 1,
        "events_pipeline.consumer.parked": 5,
        "events_pipeline.consumer.buried": 1,
        "events_pipeline.consumer.unknown_event_type": 0,
        "events_pipeline.consumer.shredded": 0,
        "events_pipeline.consumer.begun_early": 2,
        "events_pipeline.consumer.begun_in_vain": 1,
    }
    assert found["events_pipeline.leases.changes"] == {
        ("consumer", "acquired"): 1,
        ("publisher", "lost"): 1,
    }
    assert found["events_pipeline.timers.fired"] == {(): 5}
    assert found["events_pipeline.servers.lost"] == {("PostgreSQL",): 0, ("Redis",): 1}
    assert found["events_pipeline.reader.tier_reads"] == {
        ("shop.bill", "hot"): 10,
        ("shop.bill", "cold"): 1,
    }


def test_nothing_is_built_for_meters_that_are_not_there() -> None:
    assert not is_wanted(signals.AttemptEnded)
    with counting():
        assert is_wanted(signals.AttemptEnded)
        assert not is_wanted(signals.EventHandled), "a signal for each event is too dear"
    assert not is_wanted(signals.AttemptEnded)


# ── from worker to supervisor ──────────────────────────────────────────────────────────────────


def test_counts_arrive_as_they_were_sent() -> None:
    sums = Sums()
    sums.count(metrics.HANDLED, ('shop."bill"\n', "orders"), 3)
    sums.observe(metrics.HANDLER_SECONDS, BILL, 0.02)
    assert from_line(as_line(sums.readings())) == sums.readings()


def test_a_supervisor_that_does_not_read_costs_no_count() -> None:
    totals = Sums()
    writing: list[int] = []
    listener = MetricListener(totals.add, lambda fd: writing.append(os.dup(fd)))
    pipe = MetricPipe(writing[0])
    lines = [[Reading(metrics.HANDLED, (f"consumer-{n % 7}", "x" * 90), 1)] for n in range(5000)]
    sent = 0
    for line in lines:
        if pipe.is_full:
            break
        pipe(line)
        sent += 1
    assert pipe.is_full, "64 KiB fit into a pipe"
    assert sent < len(lines)
    listener.drain()
    # What did not fit comes with the next line.
    pipe([Reading(metrics.HANDLED, BILL, 1)])
    listener.drain()
    assert sum(of_counter(totals, metrics.HANDLED).values()) == sent + 1
    os.close(writing[0])
    listener.close()


def test_a_line_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    totals = Sums()
    writing: list[int] = []
    listener = MetricListener(totals.add, lambda fd: writing.append(os.dup(fd)))
    good = as_line([Reading(metrics.HANDLED, BILL, 1)])
    os.write(writing[0], b'nonsense\n[["no.such", [], 1]]\n' + good[:10])
    listener.drain()
    os.write(writing[0], good[10:])
    os.close(writing[0])
    listener.drain()
    listener.close()
    assert of(totals) == {"events_pipeline.consumer.handled": {BILL: 1}}


# ── state ──────────────────────────────────────────────────────────────────────────────────────


class Server:
    """Counts how often it is asked; may be told to hang."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.is_closed = threading.Event()

    def read(self) -> Sequence[Reading]:
        self.asked += 1
        self.answers.wait(30)
        return [Reading(metrics.TIMERS_PENDING, (), self.asked)]


def test_many_scrapers_are_one_question() -> None:
    server = Server()
    cache = StateCache(server.read, server.is_closed.set)
    told: list[object] = []
    threads = [threading.Thread(target=lambda: told.append(cache.get())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == 1
    assert len(told) == 20
    assert all(told)
    cache.close()
    assert server.is_closed.wait(10)


def test_who_asks_now_and_then_finds_it_read_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "STATE_SECONDS", 0.05)
    server = Server()
    cache = StateCache(server.read, server.is_closed.set)
    cache.get()
    wait_until(lambda: server.asked > 3, what="it is read again by itself")
    cache.close()
    assert server.is_closed.wait(10)


def test_a_server_that_hangs_is_waited_for_once_and_old_state_is_never_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_cache, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(state_cache, "WANTED_SECONDS", -1.0)
    monkeypatch.setattr(state_cache, "ANSWER_SECONDS", 0.2)
    server = Server()
    cache = StateCache(server.read, server.is_closed.set)
    assert [reading.value for reading in cache.get()] == [1]
    server.answers.clear()
    began_at = time.monotonic()
    assert [list(cache.get()) for _ in range(50)] == [[]] * 50
    assert time.monotonic() - began_at < 50 * 0.2 / 2
    assert server.asked == 2
    server.answers.set()
    wait_until(lambda: bool(cache.get()), what="the server answers")
    cache.close()
    assert server.is_closed.wait(10)


def test_a_failure_is_not_kept_and_holds_up_nobody() -> None:
    server = Server()
    answers: list[Sequence[Reading]] = [[], server.read()]
    cache = StateCache(lambda: answers.pop(0), server.is_closed.set)
    began_at = time.monotonic()
    assert not cache.get()
    assert cache.get()
    assert time.monotonic() - began_at < state_cache.ANSWER_SECONDS
    cache.close()
    assert server.is_closed.wait(10)
