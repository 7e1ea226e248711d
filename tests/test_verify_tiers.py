"""`penstock verify` compares the hot log with the outbox, and knows what a cache may lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from penstock.core.books import Anomaly
from penstock.core.settings import Settings
from penstock.ops.verify import Report, Verify
from penstock.ops.verify_tiers import HotTier
from penstock.stores.cleanup import Cleanup
from penstock.stores.postgres import connect
from penstock.stores.redis_log import FIELD, RedisLog
from tests.bench_of_one import Workbench
from tests.publishing import log_key

EVENTS = 20
HOLE = (21, 30)
HEAD = 35
Entries = dict[str, bytes]


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    """Twenty events, a hole, five more, all of it published."""
    with closing(Workbench(database_url, redis_url)) as bench:
        bench.send(EVENTS)
        bench.publish()
        bench.connection.execute(
            "INSERT INTO events.hole (stream_name, first, last, reason)"
            " VALUES ('orders', %s, %s, 'a test')",
            HOLE,
        )
        bench.connection.execute("UPDATE events.stream SET head = %s", (HOLE[1],))
        bench.send(HEAD - HOLE[1])
        bench.publish()
        yield bench


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url, protocol=2)) as client:
        yield client


def verified(bench: Workbench, redis_url: str | None = None) -> Report:
    database_url = bench.settings.database_url
    with (
        closing(connect(database_url, "verify")) as connection,
        closing(RedisLog(redis_url or bench.settings.redis_url or "")) as log,
    ):
        settings = Settings(database_url=database_url)
        return Verify(connection, settings, tiers=(HotTier(log),), window_events=4).run()


def remark(report: Report) -> str:
    assert report.balance, report.findings
    ((tier,),) = (stream.tiers for stream in report.streams)
    return tier.remark


def entries_of(client: Any) -> Entries:
    found = client.xrange(log_key("orders"))
    return {entry_id.decode(): fields[FIELD] for entry_id, fields in found}


def rewrite(client: Any, entries: Entries) -> None:
    """Let somebody change the hot log."""
    client.delete(log_key("orders"))
    for entry_id in sorted(entries, key=lambda entry_id: int(entry_id.split("-")[0])):
        client.xadd(log_key("orders"), {FIELD: entries[entry_id]}, id=entry_id)


def test_a_hot_log_that_follows_the_outbox_agrees_with_it(bench: Workbench) -> None:
    report = verified(bench)
    assert remark(report) == ""
    (tier,) = report.streams[0].tiers
    # The hole is one entry.
    assert (tier.first, tier.last, tier.compared) == (1, HEAD, EVENTS + 1 + HEAD - HOLE[1])


def alter(entries: Entries) -> None:
    entries["7-0"] = entries["7-0"].replace(b'{"n": 7}', b'{"n": 8}')


def swap(entries: Entries) -> None:
    entries["7-0"], entries["8-0"] = entries["8-0"], entries["7-0"]


DAMAGES: list[tuple[Callable[[Entries], object], Anomaly, str]] = [
    (alter, Anomaly.UNACCOUNTED, "UNACCOUNTED 1 in the hot log of orders: 7 differs from"),
    (swap, Anomaly.UNACCOUNTED, "UNACCOUNTED 2 in"),
    (lambda entries: entries.update({"7-0": b"nonsense"}), Anomaly.UNACCOUNTED, "7 is no entry"),
    (lambda entries: entries.pop("7-0"), Anomaly.UNACCOUNTED, "7 is missing (readers take it from"),
    (
        lambda entries: [entries.pop(f"{n}-0") for n in range(3, 18)],
        Anomaly.UNACCOUNTED,
        "UNACCOUNTED 15 in",
    ),
    (lambda entries: entries.pop("30-0"), Anomaly.UNACCOUNTED, "30 is missing"),
    (lambda entries: entries.update({"25-0": entries["7-0"]}), Anomaly.PHANTOM, "25 has an entry"),
    (lambda entries: entries.update({"99-0": entries["7-0"]}), Anomaly.PHANTOM, "99 lies beyond"),
]


def test_a_hot_log_that_somebody_changed_is_named(bench: Workbench, client: Any) -> None:
    published = entries_of(client)
    for change, anomaly, text in DAMAGES:
        changed = dict(published)
        change(changed)
        rewrite(client, changed)
        (finding,) = verified(bench).findings
        assert finding.anomaly is anomaly
        assert text in str(finding)


def test_what_a_cache_lacks_is_no_anomaly_and_is_told(
    bench: Workbench, client: Any, redis_url: str
) -> None:
    client.xtrim(log_key("orders"), minid="6-0", approximate=False)
    assert remark(verified(bench)) == ""
    bench.connection.execute(
        "UPDATE events.outbox_event SET published_at = now() - interval '8 days'"
        " WHERE position <= 10"
    )
    pruned = Cleanup().prune_outbox(
        bench.connection, "orders", after=0, retention_days=7, batch_size=100
    )
    assert pruned.deleted == 10
    assert remark(verified(bench)) == ""
    client.xdel(log_key("orders"), "35-0", "34-0")
    assert "it ends at 33, and 35 was confirmed" in remark(verified(bench))
    client.delete(log_key("orders"))
    assert "it holds nothing" in remark(verified(bench))
    assert "cannot be reached" in remark(verified(bench, "redis://127.0.0.1:1/0"))


def trim_after_seeing(
    position: int, client: Any, minid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the publisher trim as soon as somebody has read this position."""
    look = HotTier.read

    def read(self: HotTier, stream_name: str, *, after: int, count: int) -> Any:
        found = look(self, stream_name, after=after, count=count)
        if any(place == position for place, _ in found):
            client.xtrim(log_key("orders"), minid=minid, approximate=False)
        return found

    monkeypatch.setattr(HotTier, "read", read)


def test_a_disagreement_that_does_not_last_is_none(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = entries_of(client)
    alter(entries)
    rewrite(client, entries)
    trim_after_seeing(7, client, "9-0", monkeypatch)
    assert remark(verified(bench)) == ""


def test_a_log_that_is_trimmed_meanwhile_lacks_nothing(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trim_after_seeing(1, client, "12-0", monkeypatch)
    report = verified(bench)
    assert remark(report) == ""
    # Of the first eleven, a window of four was seen.
    assert report.streams[0].tiers[0].compared == 4 + 9 + 1 + HEAD - HOLE[1]
