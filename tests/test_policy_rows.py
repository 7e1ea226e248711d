"""Restricted streams in PostgreSQL: strangers try to get in by every way that there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from penstock.core.policy import Member, MemberKind, SecurityLevel, StreamPolicy
from penstock.core.policy_change import PolicyChange
from penstock.errors import OperationRefused
from penstock.ops.policy import set_policy
from penstock.ops.policy_access import grants_for, read_passing
from penstock.stores import policies as policy_store
from penstock.stores.policies import Policies
from tests.bench_of_one import Workbench
from tests.roles import Roles, new_roles

NOT_LET_IN = psycopg.errors.InsufficientPrivilege
SECRET, FREE = "payments", "news"
READING = "SELECT stream_name FROM events.{} ORDER BY 1"


@pytest.fixture
def roles(database_url: str) -> Iterator[Roles]:
    """A worker, a sender, a reader, and somebody with the rights of both on other streams."""
    with new_roles(database_url, "worker", "web", "billing", "stranger") as made:
        limit(made, SECRET, web="shop", billing="billing.bill")
        # The stranger is no stranger to the database: all that keeps him out is the policy.
        named = read(made, SECRET)
        as_stranger = replace_roles(named, made.name("stranger"))
        for policies in ([named], [as_stranger]):
            for each in grants_for(made.owner, policies, worker=made.name("worker")):
                made.run(each.statements)
        for stream_name in (SECRET, FREE):
            made.owner.execute(
                "SELECT events.send(%s, 'T', '{\"card\": 4711}', key => 'k')", (stream_name,)
            )
        fill_failure_tables(made.owner)
        yield made


def limit(roles: Roles, stream_name: str, *, web: str, billing: str) -> None:
    set_policy(
        roles.owner,
        PolicyChange(
            stream_name=stream_name,
            security_level=SecurityLevel.RESTRICTED,
            producers=(Member(MemberKind.PRODUCER, web, roles.name("web")),),
            consumers=(Member(MemberKind.CONSUMER, billing, roles.name("billing")),),
        ),
        by="tests",
    )


def read(roles: Roles, stream_name: str) -> StreamPolicy:
    return Policies().read(roles.owner, stream_name)


def replace_roles(policy: StreamPolicy, role: str) -> StreamPolicy:
    return StreamPolicy(
        stream_name=policy.stream_name,
        producers=tuple(Member(one.kind, one.name, role) for one in policy.producers),
        consumers=tuple(Member(one.kind, one.name, role) for one in policy.consumers),
    )


def fill_failure_tables(owner: psycopg.Connection[Any]) -> None:
    """A parked event, a dead letter and a timer of each stream."""
    for stream_name, consumer in ((SECRET, "billing.bill"), (SECRET, "x.other"), (FREE, "x.y")):
        values = (consumer, stream_name, uuid4())
        owner.execute(
            "INSERT INTO events.parked_event"
            " (consumer, stream_name, event_uuid, position, key_hash, entry)"
            " VALUES (%s, %s, %s, 1, 1, '4711')",
            values,
        )
        owner.execute(
            "INSERT INTO events.dead_letter (consumer, stream_name, event_uuid, position,"
            " event_type, version, key_hash, entry, reason)"
            " VALUES (%s, %s, %s, 1, 'T', 1, 1, '4711', 'fatal')",
            values,
        )
        owner.execute(
            "INSERT INTO events.timer (timer_id, stream_name, event_type, payload, due_at)"
            " VALUES (%s, %s, 'T', '4711', now())",
            (str(uuid4()), stream_name),
        )


def seen(connection: psycopg.Connection[Any], table: str) -> list[str]:
    query = sql.SQL(READING).format(sql.Identifier(table))
    return [name for (name,) in connection.execute(query)]


# ── strangers ──────────────────────────────────────────────────────────────────────────────────


def test_a_stranger_sees_nothing_of_a_restricted_stream(roles: Roles) -> None:
    with roles.connected("stranger") as stranger:
        for table in ("outbox_event", "parked_event", "dead_letter", "timer"):
            assert seen(stranger, table) == [FREE]
        with stranger.cursor().copy("COPY events.outbox_event TO STDOUT") as copying:
            copied = b"".join(bytes(part) for part in copying)
        assert SECRET.encode() not in copied
        assert FREE.encode() in copied
        reading = "SELECT * FROM events.read_entries(%s, 0, 10)"
        roles.owner.execute("UPDATE events.outbox_event SET position = 1, term = 1")
        roles.owner.execute(
            "INSERT INTO events.stream (name, origin) SELECT s, id FROM events.origin,"
            " unnest(%s::text[]) AS s",
            ([SECRET, FREE],),
        )
        assert stranger.execute(reading, (SECRET,)).fetchall() == []
        assert len(stranger.execute(reading, (FREE,)).fetchall()) == 1
        stranger.execute("SET row_security = off")
        with pytest.raises(NOT_LET_IN):
            seen(stranger, "outbox_event")


ATTEMPTS = [
    "SELECT events.send('payments', 'T', '{}')",
    "SELECT events.send('payments', 'T', '{}', key => 'k')",
    """SELECT events.send_many('[{"event_uuid": "6f8f57715090da2632453988d9a1501b",
        "stream_name": "payments", "event_type": "T", "payload": 1}]')""",
    """INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, payload)
       VALUES (gen_random_uuid(), 'payments', 'T', '1')""",
    """INSERT INTO events.timer (timer_id, stream_name, event_type, payload, due_at)
       VALUES ('t', 'payments', 'T', '1', now())""",
    "UPDATE events.timer SET stream_name = 'payments'",
    "COPY events.outbox_event (event_uuid, stream_name, event_type, payload) FROM STDIN",
    "TRUNCATE events.outbox_event",
    "TRUNCATE events.dead_letter",
    "DELETE FROM events.outbox_event",
    "UPDATE events.outbox_event SET payload = '1'",
    "ALTER TABLE events.outbox_event DISABLE ROW LEVEL SECURITY",
    'DROP POLICY "penstock open" ON events.outbox_event',
    "CREATE POLICY mine ON events.outbox_event USING (true)",
    "DROP TRIGGER refuse_stranger ON events.remote_consumer",
    "INSERT INTO events.policy_member VALUES ('payments', 'producer', 'me', 'me')",
    "UPDATE events.policy_member SET role_name = current_user",
    "DELETE FROM events.policy_member",
    "UPDATE events.stream_policy SET security_level = 'open'",
    "DELETE FROM events.stream_policy",
    "UPDATE events.data_key SET wrapped_key = NULL",
    "SELECT events.apply_policies()",
    "SELECT events.apply_row_security()",
    "CREATE FUNCTION events.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
]


def try_it(connection: psycopg.Connection[Any], attempt: str) -> None:
    if not attempt.startswith("COPY"):
        connection.execute(attempt.encode())
        return
    with connection.cursor().copy(attempt.encode()) as copy:
        copy.write_row((uuid4(), SECRET, "T", "1"))


def test_a_stranger_gets_in_by_no_way(roles: Roles) -> None:
    before = everything(roles.owner)
    with roles.connected("stranger") as stranger:
        for attempt in ATTEMPTS:
            with pytest.raises(psycopg.Error) as refused:
                try_it(stranger, attempt)
            assert refused.value.sqlstate in ("42501", "0A000"), attempt
    assert everything(roles.owner) == before


def everything(owner: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    tables = ("outbox_event", "timer", "dead_letter", "policy_member", "stream_policy")
    return [
        row
        for table in tables
        for row in owner.execute(
            sql.SQL("SELECT t::text FROM events.{} AS t ORDER BY 1").format(sql.Identifier(table))
        )
    ]


def test_an_identity_that_is_taken_out_of_sight_does_not_pass_for_sent(roles: Roles) -> None:
    row = roles.owner.execute(
        "SELECT event_uuid FROM events.outbox_event WHERE stream_name = %s", (SECRET,)
    ).fetchone()
    assert row is not None
    sending = "SELECT events.send('news', 'T', '{}', event_uuid => %s)"
    with roles.connected("stranger") as stranger:
        with pytest.raises(psycopg.Error) as refused:
            stranger.execute(sending, row)
        assert refused.value.sqlstate == "PS010"
        mine = (uuid4(),)
        stranger.execute(sending, mine)
        stranger.execute(sending, mine)


def test_a_stranger_cannot_hold_up_pruning(roles: Roles) -> None:
    roles.owner.execute(
        "INSERT INTO events.stream (name, origin) SELECT s, id FROM events.origin,"
        " unnest(%s::text[]) AS s",
        ([SECRET, FREE],),
    )
    record = "SELECT events.record_remote_checkpoint(%s, %s, 0)"
    with roles.connected("stranger") as stranger:
        stranger.execute(record, ("spy.reader", FREE))
        # Not by borrowing a name either.
        for name in ("spy.reader", "billing.bill", "billing.bill@1"):
            with pytest.raises(psycopg.Error) as refused:
                stranger.execute(record, (name, SECRET))
            assert refused.value.sqlstate == "PS021"
    with roles.connected("billing") as billing:
        billing.execute(record, ("billing.bill", SECRET))
        with pytest.raises(psycopg.Error, match="not among its consumers"):
            billing.execute(record, ("billing.other", SECRET))


# ── members ────────────────────────────────────────────────────────────────────────────────────


def test_a_producer_sends_and_looks_after_no_consumer(roles: Roles) -> None:
    with roles.connected("web") as web:
        web.execute("SELECT events.send('payments', 'T', '{}', key => 'k')")
        web.execute("SELECT events.send('news', 'T', '{}', key => 'k')")
        assert seen(web, "timer") == [FREE, SECRET, SECRET]
        for table in ("parked_event", "dead_letter"):
            with pytest.raises(NOT_LET_IN):
                seen(web, table)


def test_a_consumers_role_reads_its_own_and_sends_nothing(roles: Roles) -> None:
    with roles.connected("billing") as billing:
        assert seen(billing, "outbox_event") == [FREE, SECRET]
        # Of two consumers of the stream, its own.
        assert seen(billing, "dead_letter") == [FREE, SECRET]
        assert seen(billing, "parked_event") == [FREE, SECRET]
        for attempt in (
            "SELECT events.send('payments', 'T', '{}')",
            "DELETE FROM events.dead_letter",
            "UPDATE events.parked_event SET entry = ''",
        ):
            with pytest.raises(NOT_LET_IN):
                billing.execute(attempt.encode())


def test_even_with_the_right_to_insert_a_consumers_role_cannot_send(roles: Roles) -> None:
    billing = sql.Identifier(roles.name("billing"))
    roles.owner.execute(sql.SQL("GRANT ALL ON events.outbox_event TO {}").format(billing))
    with roles.connected("billing") as connection:
        with pytest.raises(NOT_LET_IN):
            connection.execute("SELECT events.send('payments', 'T', '{}')")
        connection.execute("SELECT events.send('news', 'T', '{}')")
        connection.execute("UPDATE events.outbox_event SET payload = '{}'")
        connection.execute("DELETE FROM events.outbox_event")
    # What it may read it may still not touch.
    assert seen(roles.owner, "outbox_event") == [SECRET]


def test_a_member_who_is_dropped_is_out_at_once(roles: Roles) -> None:
    with roles.connected("billing") as billing:
        reading = "SELECT count(*) FROM events.outbox_event WHERE stream_name = 'payments'"
        assert billing.execute(reading).fetchone() == (1,)
        other = Member(MemberKind.CONSUMER, "audit.all")
        change = PolicyChange(
            stream_name=SECRET, security_level=SecurityLevel.RESTRICTED, consumers=(other,)
        )
        set_policy(roles.owner, change, by="tests")
        assert billing.execute(reading).fetchone() == (0,)


# ── workers ────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_with_the_printed_grants_runs_the_whole_line(roles: Roles) -> None:
    with roles.connected("web") as web:
        web.execute("SELECT events.send('payments', 'T', '{}', key => 'k')")
    bench = Workbench(roles.url("worker"), None)
    try:
        bench.publish()
        assert bench.head(SECRET) == 2
        assert bench.head(FREE) == 1
    finally:
        bench.close()
    with roles.connected("worker") as worker:
        assert len(seen(worker, "outbox_event")) == 3
        for attempt in (
            "UPDATE events.policy_member SET role_name = NULL",
            "UPDATE events.stream_policy SET security_level = 'open'",
            "SELECT events.apply_policies()",
        ):
            with pytest.raises(NOT_LET_IN):
                worker.execute(attempt.encode())
    assert read_passing(roles.owner).workers == (roles.name("worker"),)
    assert read_passing(roles.owner).administrators == ()


def test_numbering_under_row_level_security_uses_the_index(roles: Roles) -> None:
    explain = (
        "EXPLAIN SELECT o.id FROM events.outbox_event o WHERE (o.stream_name, o.id) > ('payments',"
        " 0) AND o.stream_name <= 'payments' AND o.position IS NULL"
        " ORDER BY o.stream_name, o.id LIMIT 100"
    )
    with roles.connected("worker") as worker:
        worker.execute("SET enable_seqscan = off")
        plan = "\n".join(line for (line,) in worker.execute(explain.encode()))
    assert "outbox_event_unnumbered" in plan
    assert "Sort" not in plan


# ── switching it on and off ────────────────────────────────────────────────────────────────────


def guarded(owner: psycopg.Connection[Any]) -> tuple[int, int]:
    """How many tables have row-level security, and how many triggers policies have made."""
    row = owner.execute(
        "SELECT (SELECT count(*) FROM pg_class WHERE relrowsecurity),"
        " (SELECT count(*) FROM pg_trigger"
        "   WHERE tgname IN ('refuse_stranger', 'refuse_plaintext', 'refuse_dead_key'))"
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def test_where_nothing_is_restricted_nothing_is_switched_on(database_url: str) -> None:
    with new_roles(database_url, "web", "billing") as roles:
        assert guarded(roles.owner) == (0, 0)
        opened = PolicyChange(stream_name=SECRET, security_level=SecurityLevel.OPEN)
        set_policy(roles.owner, opened, by="tests")
        assert guarded(roles.owner) == (0, 0)
        limit(roles, SECRET, web="shop", billing="billing.bill")
        limit(roles, FREE, web="shop", billing="billing.bill")
        assert guarded(roles.owner) == (4, 2)
        set_policy(roles.owner, opened, by="tests")
        assert guarded(roles.owner) == (4, 2)
        free = PolicyChange(stream_name=FREE, security_level=SecurityLevel.OPEN)
        set_policy(roles.owner, free, by="tests")
        assert guarded(roles.owner) == (0, 0)


def test_nobody_waits_long_behind_a_change(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_store, "LOCK_SECONDS", 0.1)
    with (
        new_roles(database_url, "web", "billing") as roles,
        psycopg.connect(database_url) as sender,
    ):
        sender.execute("SELECT events.send('payments', 'T', '{}')")
        with pytest.raises(OperationRefused, match="Nothing was changed; try again"):
            limit(roles, SECRET, web="shop", billing="billing.bill")
        assert not read(roles, SECRET).is_limited
        sender.commit()
        limit(roles, SECRET, web="shop", billing="billing.bill")


def test_a_role_that_does_not_exist_is_refused(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as owner:
        nobody = Member(MemberKind.PRODUCER, "shop", "nobody_at_all")
        change = PolicyChange(
            stream_name=SECRET, security_level=SecurityLevel.RESTRICTED, producers=(nobody,)
        )
        with pytest.raises(OperationRefused, match="no role 'nobody_at_all'"):
            set_policy(owner, change, by="tests")
        assert Policies().read_all(owner) == []
