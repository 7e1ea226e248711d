"""A trace goes through all processes: sender, publisher, workers, and is seen as one outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.otlp import Collector, Received, collecting
from tests.tracing_app import BAD, CANARY, EVENTS
from tests.waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).parent.parent
CONSUMERS = ("bill", "digest", "relay", "tell")
PRODUCER, CONSUMER, INTERNAL = 4, 5, 1


@contextmanager
def worker(environment: Mapping[str, str], log: Path, *roles: str) -> Iterator[None]:
    command = [sys.executable, "-m", "penstock", "--app", "tests.tracing_app:pipeline", "work"]
    for role in roles:
        command += ["--role", role]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output) as process,
    ):
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(SOON_SECONDS)
            assert code == 0, log.read_text()


@pytest.mark.slow
def test_one_trace_leads_from_the_sender_to_every_handler_also_after_a_replayed_batch(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with collecting() as collector:
        environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_REDIS_URL": redis_url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        consumers = [f"consumer:{name}" for name in CONSUMERS]
        with (
            worker(environment, tmp_path / "publisher.log", "publisher"),
            worker(environment, tmp_path / "consumers.log", *consumers),
        ):
            sender = subprocess.run(
                [sys.executable, "-m", "tests.tracing_app"],
                cwd=ROOT,
                env=environment,
                check=True,
                capture_output=True,
                timeout=SOON_SECONDS,
            )
            wait_until(
                lambda: _is_complete(collector),
                what=lambda: f"all spans have come; there are {_names(collector)}",
            )
        checkouts = [tuple(json.loads(line)) for line in sender.stdout.splitlines()]
        assert len(checkouts) == EVENTS
        for n, (trace_id, checkout) in enumerate(checkouts, 1):
            _check_one_event(collector, n, trace_id, checkout)
        _check_batches(collector)
        _check_what_a_handler_sent(collector, checkouts[0][0])
        assert {span.service for span in collector.spans} == {"web", "shop"}
        assert not any(CANARY.encode() in span.raw for span in collector.spans)


def _is_complete(collector: Collector) -> bool:
    bills = collector.named("handle shop.bill", outcome="settled")
    return len(bills) == EVENTS - 1 and all(
        collector.named(name)
        for name in ("handle shop.digest", "handle shop.tell", "publish invoices", "call")
    )


def _names(collector: Collector) -> dict[str, int]:
    return Counter(span.name for span in collector.spans)


def _check_one_event(collector: Collector, n: int, trace_id: str, checkout: str) -> None:
    (send,) = [span for span in collector.named("send orders") if span.parent_id == checkout]
    assert (send.trace_id, send.kind, send.service) == (trace_id, PRODUCER, "web")
    (publish,) = [
        span for span in collector.named("publish orders", position=n) if span.kind == PRODUCER
    ]
    assert (publish.trace_id, publish.parent_id) == (trace_id, send.span_id)
    bills = collector.named("handle shop.bill", position=n)
    relays = collector.named("handle shop.relay", position=n)
    for span in (*bills, *relays):
        assert (span.trace_id, span.parent_id, span.kind) == (trace_id, send.span_id, CONSUMER)
    _check_calls(collector, n, bills, relays)


def _check_calls(
    collector: Collector, n: int, bills: list[Received], relays: list[Received]
) -> None:
    """What its handler did stands below each call; what became of it is said."""
    for name, spans in (("INSERT invoice", bills), ("call", relays)):
        parents = {span.parent_id for span in collector.named(name)}
        assert {span.span_id for span in spans} <= parents
    outcomes = [span.attributes["penstock.outcome"] for span in bills]
    if n == BAD:
        assert outcomes == ["failed", "failed"]
        assert all(span.is_error for span in bills)
        assert {span.attributes["error.type"] for span in bills} == {"FatalError"}
    else:
        # Those before the bad one were rolled back with it and handled again.
        assert outcomes == (["unsettled", "settled"] if n < BAD else ["settled"])
        assert not any(span.is_error for span in bills)
    assert [span.attributes["penstock.outcome"] for span in relays] == ["settled"]


def _check_batches(collector: Collector) -> None:
    """Links lead from calls to batches, and from whatever has many causes to each of them."""
    sends = {span.span_id for span in collector.named("send orders")}
    batches = {span.span_id: span for span in collector.named("batch shop.bill")}
    for call in collector.named("handle shop.bill"):
        (link,) = call.links
        batch = batches[link]
        assert batch.trace_id != call.trace_id
        is_kept = call.attributes["penstock.outcome"] == "settled"
        assert batch.is_error is not is_kept
    (listed,) = collector.named("handle shop.digest")
    (of_list,) = collector.named("batch shop.digest")
    assert listed.parent_id == of_list.span_id
    assert set(listed.links) == {*sends, of_list.span_id}
    (published,) = [span for span in collector.named("publish orders") if span.kind == INTERNAL]
    assert set(published.links) == sends
    assert not published.parent_id
    for span in collector.named("publish orders"):
        assert span is published or span.links == (published.span_id,)


def _check_what_a_handler_sent(collector: Collector, trace_id: str) -> None:
    (send,) = collector.named("send invoices")
    (call,) = [span for span in collector.named("call") if span.span_id == send.parent_id]
    (relay,) = [span for span in collector.spans if span.span_id == call.parent_id]
    assert relay.name == "handle shop.relay"
    (told,) = collector.named("handle shop.tell")
    assert told.parent_id == send.span_id
    assert {span.trace_id for span in (send, call, relay, told)} == {trace_id}
