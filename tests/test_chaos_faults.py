"""Every fault does what its name says, and is over when it says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.stores.migrations import migrate
from penstock.stores.queries import lua
from tests.chaos import postgres_pair, redis_pair
from tests.chaos.clocks import usable_library
from tests.chaos.faults import GROUPS
from tests.chaos.nemesis import Nemesis
from tests.chaos.servers import World
from tests.hurting import Crowd, Stage, bystanders
from tests.waiting import wait_until

pytestmark = [pytest.mark.long]

STREAM = "orders"
LOG = "penstock:{orders}:log"
META = "penstock:{orders}:meta"
A_MOMENT_SECONDS = 0.15
"""How long something is watched that must not happen."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as world:
        migrate(world.direct_database_url)
        with postgres_pair.connected(world.direct_database_url) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute(
                "INSERT INTO events.stream (name, origin) SELECT %s, id FROM events.origin",
                [STREAM],
            )
            connection.execute(
                "INSERT INTO events.stream_lease (stream_name, role, lease_until)"
                " VALUES (%s, 'publisher', 'infinity')",
                [STREAM],
            )
        yield world


@pytest.fixture
def stage(world: World) -> Stage:
    with client(world) as redis_client:
        redis_client.flushall()
    return Stage(world, Crowd())


@pytest.fixture
def entries(stage: Stage) -> list[bytes]:
    """A log of five entries; these are their values."""
    values = [entry(position) for position in range(1, 6)]
    with client(stage.world) as redis_client:
        redis_client.hset(META, mapping={"origin": "here", "term": 1, "base": 0})
        for position, value in enumerate(values, 1):
            redis_client.xadd(LOG, {"e": value}, id=f"{position}-0")
    return values


def entry(position: int) -> bytes:
    uuid = f"00000000-0000-4000-8000-{position:012d}"
    fields = ("event", "here", 1, position, uuid, "order.placed", 1, "-", 1_700_000_000_000_000)
    return "\n".join(map(str, ("1 - -", *fields, '"key"', "{}", f'{{"n": {position}}}'))).encode()


def client(world: World) -> Any:
    """Through the proxy, as everybody."""
    return redis_pair.connected(world.redis_url)


def connection(world: World, **options: Any) -> psycopg.Connection[Any]:
    """Through the proxy, as everybody."""
    return psycopg.connect(world.database_url, autocommit=True, connect_timeout=3, **options)


def kept(world: World) -> list[int]:
    with connection(world) as asking:
        return [row[0] for row in asking.execute("SELECT n FROM kept ORDER BY n").fetchall()]


def keep(world: World, n: int) -> None:
    with connection(world) as asking:
        asking.execute("INSERT INTO kept VALUES (%s)", [n])


def log_of(world: World) -> dict[int, dict[bytes, bytes]]:
    with client(world) as redis_client:
        return {int(i.partition(b"-")[0]): fields for i, fields in redis_client.xrange(LOG)}


class Background:
    """Something that is tried meanwhile, in a thread."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._done = threading.Event()

        def run() -> None:
            act()
            self._done.set()

        threading.Thread(target=run, daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether it is not done a moment later."""
        return not self._done.wait(A_MOMENT_SECONDS)

    def wait(self) -> None:
        wait_until(self._done.is_set, what="it is done after all")


# ── PostgreSQL ─────────────────────────────────────────────────────────────────────────────────


def test_a_crashed_postgres_is_away_and_comes_back_with_its_commits(stage: Stage) -> None:
    keep(stage.world, 1)

    def nobody_answers() -> None:
        with pytest.raises(psycopg.OperationalError):
            connection(stage.world)

    assert stage.hurt("postgres-crashed", during=nobody_answers)
    assert 1 in kept(stage.world)


def test_a_failover_keeps_commits_and_the_address_and_begins_a_timeline(stage: Stage) -> None:
    postgres = stage.world.postgres
    postgres.wait_until_synchronous()
    url, primary = stage.world.database_url, postgres.url
    keep(stage.world, 2)
    before = timeline(stage.world)
    assert stage.hurt("postgres-failed-over")
    assert stage.world.database_url == url
    assert postgres.url != primary
    assert 2 in kept(stage.world)
    keep(stage.world, 3)
    assert timeline(stage.world) > before


def test_there_is_no_failover_without_a_standby_that_has_everything(stage: Stage) -> None:
    postgres = stage.world.postgres
    postgres.wait_until_synchronous()
    assert postgres.fail_over()
    failovers = postgres.failovers
    assert stage.hurt("postgres-failed-over") is None
    assert postgres.failovers == failovers


def test_a_dead_standby_costs_neither_the_primary_nor_its_commits(stage: Stage) -> None:
    postgres = stage.world.postgres
    postgres.wait_until_synchronous()
    standby = postgres._standby
    assert standby is not None
    standby.crash()
    assert stage.hurt("postgres-failed-over") is None
    keep(stage.world, 9)
    assert 9 in kept(stage.world)
    wait_until(lambda: postgres._standby not in (None, standby), what="there is a new standby")


def test_a_frozen_postgres_answers_nobody_until_it_goes_on(stage: Stage) -> None:
    asking = connection(stage.world)
    begun: list[Background] = []

    def nobody_is_answered() -> None:
        begun.append(Background(lambda: asking.execute("SELECT 1")))
        assert begun[0].hangs

    assert stage.hurt("postgres-frozen", during=nobody_is_answered)
    begun[0].wait()
    asking.close()


def test_commits_wait_for_a_frozen_standby(stage: Stage) -> None:
    stage.world.postgres.wait_until_synchronous()
    begun: list[Background] = []

    def a_commit_hangs() -> None:
        begun.append(Background(lambda: keep(stage.world, 4)))
        assert begun[0].hangs

    assert stage.hurt("standby-frozen", during=a_commit_hangs)
    begun[0].wait()
    assert 4 in kept(stage.world)


def test_a_terminated_backend_is_somebody_elses_than_the_harness(stage: Stage) -> None:
    victim = connection(stage.world, application_name="penstock worker")
    with postgres_pair.connected(stage.world.direct_database_url) as own:
        assert stage.hurt("backend-terminated")
        assert own.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError):
        victim.execute("SELECT 1")


@pytest.mark.parametrize(
    ("kind", "table"),
    [("stream-row-locked", "events.stream"), ("lease-row-locked", "events.stream_lease")],
)
def test_a_locked_row_is_free_again_afterwards(stage: Stage, kind: str, table: str) -> None:
    lock = f"SELECT 1 FROM {table} FOR UPDATE NOWAIT".encode()  # noqa: S608

    def it_is_taken() -> None:
        with connection(stage.world) as other, pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute(lock)

    assert stage.hurt(kind, during=it_is_taken)
    with connection(stage.world) as other:
        assert other.execute(lock).fetchone() == (1,)


def test_an_open_transaction_holds_an_early_id(stage: Stage) -> None:
    def one_is_open() -> None:
        with connection(stage.world) as other:
            row = other.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL"
            ).fetchone()
        assert row == (1,)

    assert stage.hurt("transaction-left-open", during=one_is_open)


def timeline(world: World) -> int:
    with connection(world) as asking:
        row = asking.execute(
            "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
        ).fetchone()
    assert row is not None
    return int(row[0], 16)


# ── Redis ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("redis-killed", {"early"}),
        ("redis-away", {"early"}),
        ("redis-emptied", set()),
    ],
)
def test_redis_is_away_and_back_with_what_it_kept(stage: Stage, kind: str, left: set[str]) -> None:
    remember_on_disk(stage, "early")

    def nobody_answers() -> None:
        with client(stage.world) as asking, pytest.raises(redis.ConnectionError):
            asking.ping()

    assert stage.hurt(kind, during=nobody_answers)
    assert remembered(stage) == left
    remember(stage, "afterwards")


@pytest.mark.parametrize("kind", ["redis-lost-power", "redis-restored", "redis-failed-over"])
def test_redis_goes_back_in_time(stage: Stage, kind: str) -> None:
    remember_on_disk(stage, "early")
    if kind == "redis-failed-over":
        with redis_pair.connected(stage.world.redis.replica_url) as replica:
            wait_until(
                lambda: stage.world.redis.replica_follows and replica.exists("early") == 1,
                what="the replica has caught up",
            )
    url = stage.world.redis_url
    assert stage.hurt(kind, during=lambda: remember(stage, "late"))
    assert stage.world.redis_url == url
    assert remembered(stage) == {"early"}
    remember(stage, "afterwards")


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("redis-out-of-memory", redis.exceptions.OutOfMemoryError),
        ("redis-read-only", redis.exceptions.ReadOnlyError),
    ],
)
def test_redis_reads_but_does_not_write(
    stage: Stage, kind: str, refusal: type[redis.RedisError]
) -> None:
    remember(stage, "early")

    def writes_are_refused() -> None:
        assert remembered(stage) == {"early"}
        with pytest.raises(refusal):
            remember(stage, "late")

    assert stage.hurt(kind, during=writes_are_refused)
    remember(stage, "afterwards")
    assert remembered(stage) == {"early", "afterwards"}


def test_a_frozen_redis_answers_nobody_until_it_goes_on(stage: Stage) -> None:
    begun: list[Background] = []

    def nobody_is_answered() -> None:
        begun.append(Background(lambda: remember(stage, "late")))
        assert begun[0].hangs

    assert stage.hurt("redis-frozen", during=nobody_is_answered)
    begun[0].wait()


def test_streams_are_flushed_deleted_and_trimmed(stage: Stage, entries: list[bytes]) -> None:
    assert stage.hurt("stream-trimmed")
    assert len(log_of(stage.world)) < len(entries)
    remember(stage, "beside")
    with client(stage.world) as asking:
        asking.xadd(LOG, {"e": b"x"}, id="9-0")
    assert stage.hurt("stream-deleted")
    assert log_of(stage.world) == {}
    assert stage.hurt("redis-flushed")
    assert remembered(stage) == set()


def remember(stage: Stage, key: str) -> None:
    with client(stage.world) as asking:
        asking.set(key, "x" * 100)


def remember_on_disk(stage: Stage, key: str) -> None:
    """A server that waits for its disk answers first, and writes up to two seconds later."""
    before = stage.world.redis.size_of_file()
    remember(stage, key)
    wait_until(lambda: stage.world.redis.size_of_file() > before + 100, what="it is written")


def remembered(stage: Stage) -> set[str]:
    with client(stage.world) as asking:
        return {key.decode() for key in asking.keys()}  # noqa: SIM118 - a command of Redis


# ── between ────────────────────────────────────────────────────────────────────────────────────


def test_cut_connections_are_reset_and_new_ones_are_welcome(stage: Stage) -> None:
    asking = connection(stage.world)
    assert stage.hurt("postgres-cut")
    with pytest.raises(psycopg.OperationalError):
        asking.execute("SELECT 1")
    assert kept(stage.world) is not None
    with client(stage.world) as other:
        before = other.client_id()
        assert stage.hurt("redis-cut")
        assert other.client_id() != before


@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_nothing_moves_through_a_black_hole_until_it_closes(stage: Stage, server: str) -> None:
    act = {"postgres": lambda: keep(stage.world, 5), "redis": lambda: remember(stage, "late")}
    begun: list[Background] = []

    def nobody_is_answered() -> None:
        begun.append(Background(act[server]))
        assert begun[0].hangs
        with redis_pair.connected(stage.world.direct_redis_url) as direct:
            assert not direct.exists("late")

    assert stage.hurt(f"{server}-black-holed", during=nobody_is_answered)
    begun[0].wait()


@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_a_muted_server_has_done_what_it_was_told(stage: Stage, server: str) -> None:
    asking = connection(stage.world)
    other = redis.Redis.from_url(stage.world.redis_url, retry=Retry(NoBackoff(), 0))
    other.ping()
    acts: dict[str, Callable[[], object]] = {
        "postgres": lambda: asking.execute("INSERT INTO kept VALUES (60)"),
        "redis": lambda: other.set("late", 1),
    }

    def is_done() -> bool:
        with (
            redis_pair.connected(stage.world.direct_redis_url) as direct,
            postgres_pair.connected(stage.world.direct_database_url) as own,
        ):
            row = own.execute("SELECT 1 FROM kept WHERE n = 60").fetchone()
            return bool(direct.exists("late") if server == "redis" else row)

    failed = threading.Event()

    def the_reply_is_lost() -> None:
        def act() -> None:
            with pytest.raises((psycopg.OperationalError, redis.ConnectionError)):
                acts[server]()
            failed.set()

        assert Background(act).hangs
        wait_until(is_done, what="it is done, although nobody was told")

    assert stage.hurt(f"{server}-muted", during=the_reply_is_lost)
    wait_until(failed.is_set, what="the caller knows that it does not know")
    other.close()
    asking.close()


@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_a_delayed_server_is_farther_away(stage: Stage, server: str) -> None:
    proxies = {"postgres": stage.world.database_proxy, "redis": stage.world.redis_proxy}

    def it_takes_longer() -> None:
        assert proxies[server]._delay_seconds > 0
        remember(stage, "late")
        keep(stage.world, 7)

    assert stage.hurt(f"{server}-delayed", during=it_takes_longer)
    assert proxies[server]._delay_seconds == 0


def test_the_reply_of_a_commit_is_lost_but_not_the_commit(stage: Stage) -> None:
    told: list[str | None] = []
    fault = threading.Thread(target=lambda: told.append(stage.hurt("commit-reply-lost")))
    asking = psycopg.connect(stage.world.database_url)
    fault.start()
    tried: list[int] = []

    def commit_many() -> None:
        for n in range(1000, 5000):
            tried.append(n)
            asking.execute("INSERT INTO kept VALUES (%s)", [n])
            asking.commit()

    with pytest.raises(psycopg.OperationalError):
        commit_many()
    fault.join()
    assert told[0] is not None
    assert max(kept(stage.world)) == tried[-1]


def test_the_reply_of_an_append_is_lost_but_not_the_append(stage: Stage) -> None:
    told: list[str | None] = []
    fault = threading.Thread(target=lambda: told.append(stage.hurt("append-reply-lost")))
    with client(stage.world) as asking:
        sha = asking.script_load(lua("append"))

        def append_many() -> None:
            while fault.is_alive():
                asking.evalsha(sha, 2, LOG, META, "here", 1, 1000, 1, b"entry")

        fault.start()
        with pytest.raises(redis.ConnectionError):
            append_many()
    fault.join()
    assert told[0] is not None


def test_a_reply_that_nobody_waits_for_is_no_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.network_faults.REPLY_SECONDS", 0.01)
    assert stage.hurt("append-reply-lost") is None
    remember(stage, "afterwards")


# ── forgeries ──────────────────────────────────────────────────────────────────────────────────


def changed(stage: Stage, entries: list[bytes], kind: str) -> dict[int, dict[bytes, bytes]]:
    """What is on the log after a forgery and was not before."""
    assert stage.hurt(kind)
    before = {position: {b"e": value} for position, value in enumerate(entries, 1)}
    after = log_of(stage.world)
    return {position: now for position, now in after.items() if before.get(position) != now}


@pytest.mark.parametrize("kind", ["entry-forged", "entry-replayed"])
def test_a_forgery_stands_at_the_next_position(
    stage: Stage, entries: list[bytes], kind: str
) -> None:
    ((position, fields),) = changed(stage, entries, kind).items()
    assert position == 6
    assert fields[b"e"].split(b"\n")[1:3] == [b"event", b"here"]
    assert (fields[b"e"] in entries) == (kind == "entry-replayed")


@pytest.mark.parametrize("kind", ["entry-altered", "entry-swapped", "field-foreign"])
def test_a_forgery_stands_in_a_real_entrys_place(
    stage: Stage, entries: list[bytes], kind: str
) -> None:
    ((position, fields),) = changed(stage, entries, kind).items()
    assert 1 <= position <= 5
    assert len(log_of(stage.world)) == 5
    assert (fields.get(b"e") in entries) == (kind == "entry-swapped")


def test_a_forged_hole_says_that_there_are_no_events(stage: Stage, entries: list[bytes]) -> None:
    ((position, fields),) = changed(stage, entries, "hole-forged").items()
    assert fields[b"e"].split(b"\n")[1:] == [b"hole", b"here", b"6", str(position).encode()]


def test_a_poisoned_id_leaves_no_room_for_positions(stage: Stage, entries: list[bytes]) -> None:
    ((position, _),) = changed(stage, entries, "id-poisoned").items()
    assert position >= 10**15


def test_foreign_bytes_are_no_entry(stage: Stage, entries: list[bytes]) -> None:
    ((_, fields),) = changed(stage, entries, "bytes-foreign").items()
    assert not fields[b"e"].startswith(b"1 ")


def test_entries_and_the_key_beside_them_are_removed(stage: Stage, entries: list[bytes]) -> None:
    assert stage.hurt("entry-removed")
    assert len(log_of(stage.world)) == len(entries) - 1
    assert stage.hurt("meta-deleted")
    with client(stage.world) as asking:
        assert not asking.exists(META)


@pytest.mark.parametrize("fault", GROUPS["forgeries"], ids=lambda one: one.name)
def test_what_was_forged_before_is_forged_again(
    stage: Stage, entries: list[bytes], fault: Any
) -> None:
    with client(stage.world) as asking:
        asking.xadd(LOG, {"x": b"\0"}, id=f"{len(entries) + 1}-0")
    assert stage.hurt(fault.name)


@pytest.mark.parametrize("fault", GROUPS["forgeries"], ids=lambda one: one.name)
def test_without_a_log_there_is_nothing_to_forge(stage: Stage, fault: Any) -> None:
    assert stage.hurt(fault.name) is None


# ── processes and people ───────────────────────────────────────────────────────────────────────

PLACES = [
    (role, host) for host in ("h1", "h2") for role in ("supervisor", "publisher", "consumer:a")
]


@pytest.fixture
def settled(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Two hosts that count as settled, however young they are, and a sender."""
    monkeypatch.setattr("tests.chaos.process_faults.SETTLED_SECONDS", 0.0)
    with bystanders(*PLACES, ("sender", "s")) as crowd:
        yield Stage(world, Crowd(crowd))


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("worker-killed", "consumer:a"),
        ("publisher-killed", "publisher"),
        ("supervisor-killed", "supervisor"),
        ("sender-killed", "sender"),
    ],
)
def test_one_process_of_the_role_is_killed(settled: Stage, kind: str, role: str) -> None:
    assert settled.hurt(kind)
    crowd = settled.hosts.processes()
    wait_until(lambda: any(one.state == "Z" for one in crowd), what="somebody is dead")
    assert [one.role for one in crowd if one.state == "Z"] == [role]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("process-stopped", 1),
        ("worker-stopped-past-lease", 1),
        ("publisher-stopped-past-lease", 1),
        ("host-frozen", 3),
    ],
)
def test_who_stands_still_goes_on_afterwards(settled: Stage, kind: str, count: int) -> None:
    crowd = settled.hosts.processes()

    def some_stand_still() -> None:
        wait_until(lambda: [one.state for one in crowd].count("T") == count, what="they stop")

    assert settled.hurt(kind, during=some_stand_still)
    wait_until(lambda: all(one.state != "T" for one in crowd), what="they go on")


SPARING = [one.name for one in GROUPS["processes"] if one.name != "process-stopped"]


@pytest.mark.parametrize("kind", SPARING)
def test_nobody_is_taken_away_before_another_has_settled(world: World, kind: str) -> None:
    with bystanders(*PLACES) as crowd:
        assert Stage(world, Crowd(crowd)).hurt(kind) is None


@pytest.mark.parametrize("fault", GROUPS["processes"], ids=lambda one: one.name)
def test_where_nobody_is_left_nobody_is_hurt(stage: Stage, fault: Any) -> None:
    assert stage.hurt(fault.name) is None


def test_what_people_do_is_undone_and_a_consumer_is_added_once(world: World) -> None:
    crowd = Crowd()
    stage = Stage(world, crowd)
    for kind in ("lanes-changed", "redrive-run", "handlers-slowed", "consumer-paused"):
        assert stage.hurt(kind)
    done = [note.split()[0] for note in crowd.notes]
    assert done == ["lanes", "redrive", "slow", "fast", "pause", "resume"]
    assert stage.hurt("consumer-added")
    assert stage.hurt("consumer-added") is None


# ── the nemesis at work ────────────────────────────────────────────────────────────────────────


def test_a_run_counts_what_happened_and_leaves_everything_well(
    stage: Stage, entries: list[bytes]
) -> None:
    profile = "redis-flushed,redis-read-only,postgres-crashed,worker-killed"
    nemesis = Nemesis(stage, seed=5, profile=profile, gap_seconds=0.02)
    with nemesis:
        wait_until(
            lambda: nemesis.never_happened == ["worker-killed"],
            what=lambda: f"every kind with a target has happened: {nemesis.never_happened}",
        )
    assert nemesis.counts()["worker-killed"] == 0
    assert all(one.started_at <= one.healed_at for one in nemesis.history)
    remember(stage, "afterwards")
    keep(stage.world, 8)


def test_stopping_ends_a_long_fault_early(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.redis_faults.LONG_SECONDS", (1000.0, 1000.0))
    nemesis = Nemesis(stage, seed=1, profile="redis-away")
    nemesis.step()
    wait_until(lambda: not stage.world.redis.is_up, what="Redis is away")
    nemesis.stop(seconds=20.0)
    assert nemesis.counts() == {"redis-away": 1}
    remember(stage, "afterwards")


def test_a_clock_that_cannot_jump_says_why(stage: Stage) -> None:
    nemesis = Nemesis(stage, seed=1, profile="clocks,redis-flushed")
    library, reason = usable_library()
    reason = "no process was started with a clock of its own" if library else reason
    assert nemesis.unavailable == {"clock-jumped": reason}
    assert nemesis.kinds == ["redis-flushed"]
