"""What the library lets a producer and a consumer do, and what PostgreSQL adds to that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from penstock import Pipeline, RawEvent
from penstock.core.events import StreamEvent
from penstock.core.policy import Member, MemberKind, SecurityLevel
from penstock.core.policy_change import PolicyChange
from penstock.errors import StreamRestricted
from penstock.ops.policy import set_policy
from penstock.ops.policy_access import grants_for
from penstock.stores.policies import Policies, forget_policies
from tests.roles import Roles, new_roles
from tests.waiting import SOON_SECONDS, wait_until

EVENT = RawEvent("T", {"n": 1})
MADE: list[Pipeline] = []


@pytest.fixture
def roles(database_url: str) -> Iterator[Roles]:
    """`orders` is for shop and billing.bill, each with a role of its own."""
    forget_policies()
    with new_roles(database_url, "worker", "web", "stranger") as made, disposing():
        restrict(made, "orders")
        for each in grants_for(
            made.owner, Policies().read_all(made.owner), worker=made.name("worker")
        ):
            made.run(each.statements)
        yield made
    forget_policies()


@contextmanager
def disposing() -> Iterator[None]:
    """No connection outlives the test that its pipeline was made for."""
    try:
        yield
    finally:
        while MADE:
            MADE.pop().engine.dispose()


def restrict(roles: Roles, stream_name: str, *consumers: str) -> None:
    set_policy(
        roles.owner,
        PolicyChange(
            stream_name=stream_name,
            security_level=SecurityLevel.RESTRICTED,
            producers=(Member(MemberKind.PRODUCER, "shop", roles.name("web")),),
            consumers=tuple(Member(MemberKind.CONSUMER, name) for name in consumers),
        ),
        by="tests",
    )


def pipeline(roles: Roles, name: str, role: str | None = None) -> Pipeline:
    url = roles.database_url if role is None else roles.url(role)
    made = Pipeline(name, database_url=url, redis_url=None)

    def note(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("SELECT 1")

    made.consumer("orders", name="bill")(note)
    MADE.append(made)
    return made


def sent(roles: Roles) -> int:
    row = roles.owner.execute("SELECT count(*) FROM events.outbox_event").fetchone()
    assert row is not None
    return int(row[0])


def test_a_producer_that_is_not_named_sends_nothing(roles: Roles) -> None:
    stranger = pipeline(roles, "billing")
    with pytest.raises(StreamRestricted, match="'billing' may not send to 'orders'"):
        stranger.send_now("orders", EVENT)
    with psycopg.connect(roles.database_url) as connection:
        with pytest.raises(StreamRestricted):
            stranger.send_many(connection, "orders", [EVENT, EVENT])
        # Nothing was asked of the database that would spoil the caller's transaction.
        stranger.send(connection, "news", EVENT)
    assert sent(roles) == 1
    pipeline(roles, "shop").send_now("orders", EVENT)
    assert sent(roles) == 2


def test_what_one_may_send_another_in_the_same_batch_may_not(roles: Roles) -> None:
    shop, billing = pipeline(roles, "shop"), pipeline(roles, "billing")
    with Session(shop.engine) as session:
        shop.send(session, "orders", EVENT)
        billing.send(session, "orders", EVENT)
        with pytest.raises(StreamRestricted):
            session.commit()
    assert sent(roles) == 0


def test_a_borrowed_name_does_not_help_where_the_role_is_not_named(roles: Roles) -> None:
    for each in grants_for(
        roles.owner, [Policies().read(roles.owner, "orders")], worker=roles.name("worker")
    ):
        roles.run(
            [one.replace(roles.name("web"), roles.name("stranger")) for one in each.statements]
        )
    forged = pipeline(roles, "shop", "stranger")
    with pytest.raises(StreamRestricted, match="keeps this database role from sending"):
        forged.send_now("orders", EVENT)
    pipeline(roles, "shop", "web").send_now("orders", EVENT)
    assert sent(roles) == 1


def run(worker: Pipeline, roles: Roles, *names: str) -> list[BaseException]:
    """Work until everything is handled, or something ends it."""
    stop, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            worker.run_worker(["publisher", "consumer:bill"], stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    counting = "SELECT count(*) FROM events.processed_event WHERE consumer = ANY (%s)"
    wait_until(
        lambda: (
            bool(failures)
            or roles.owner.execute(counting, (list(names),)).fetchone() == (sent(roles),)
        ),
        what="it is handled, or refused",
    )
    stop.set()
    thread.join(SOON_SECONDS)
    return failures


def test_a_consumer_that_is_not_named_does_not_start(roles: Roles) -> None:
    pipeline(roles, "shop").send_now("orders", EVENT)
    worker = pipeline(roles, "billing", "worker")
    (refused,) = run(worker, roles, "billing.bill")
    assert isinstance(refused, StreamRestricted)
    assert "'billing.bill' may not read 'orders'" in str(refused)
    assert roles.owner.execute("SELECT count(*) FROM events.consumer").fetchone() == (0,)
    restrict(roles, "orders", "billing.bill")
    assert run(worker, roles, "billing.bill") == []


def test_an_older_library_cannot_register_a_stranger_either(roles: Roles) -> None:
    register = (
        "INSERT INTO events.consumer (name, stream_name, start_position) VALUES (%s, 'orders', 1)"
    )
    restrict(roles, "orders", "billing.bill")
    roles.owner.execute(register, ("billing.bill",))
    with pytest.raises(psycopg.Error) as refused:
        roles.owner.execute(register, ("billing.spy",))
    assert refused.value.sqlstate == "PS021"
    with pytest.raises(psycopg.Error, match="not among its consumers"):
        roles.owner.execute("UPDATE events.consumer SET name = 'billing.spy'")
