"""What a policy says, and what becomes of it when somebody changes it: no servers needed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.policy import Member, MemberKind, SecurityLevel, StreamPolicy
from penstock.core.policy_change import PolicyChange, changed, parse_member
from penstock.core.redis_acl import users_of
from penstock.errors import OperationRefused, StreamRestricted, UsageError

SHOP = Member(MemberKind.PRODUCER, "shop", "shop_web")
BILL = Member(MemberKind.CONSUMER, "billing.bill", "billing")
FILE = "file:/tmp/key"


def policy(level: str = "open", **values: Any) -> StreamPolicy:
    return StreamPolicy(stream_name="orders", security_level=SecurityLevel(level), **values)


def change(level: str, **values: Any) -> PolicyChange:
    return PolicyChange(stream_name="orders", security_level=SecurityLevel(level), **values)


RESTRICTED = policy("restricted", producers=(SHOP,), consumers=(BILL,))
SEALED = policy(
    "confidential",
    encryption_alg="AES-256-GCM",
    kms_key_id=FILE,
    dek_rotation_days=90,
    active_key_version=3,
)

# ── who may ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", ["open", "confidential"])
def test_a_policy_that_names_nobody_admits_everybody(level: str) -> None:
    policy(level).require_producer(None)
    policy(level).require_consumer("anybody.at_all")


@pytest.mark.parametrize("level", ["restricted", "confidential"])
def test_a_policy_that_names_somebody_admits_nobody_else(level: str) -> None:
    limited = policy(level, producers=(SHOP,), consumers=(BILL,))
    limited.require_producer("shop")
    limited.require_consumer("billing.bill")
    limited.require_consumer("billing.bill@2026-11-16-1")
    for stranger in ("billing.bill", "shop2", "", None):
        with pytest.raises(StreamRestricted, match=r"restricted to shop\. Nothing was sent"):
            limited.require_producer(stranger)
    for stranger in ("shop", "billing.bill2", "@billing.bill"):
        with pytest.raises(StreamRestricted, match=r"restricted to billing\.bill\. Nothing"):
            limited.require_consumer(stranger)


def test_naming_a_producer_alone_leaves_nobody_to_read() -> None:
    with pytest.raises(StreamRestricted, match="restricted to nobody"):
        policy("confidential", producers=(SHOP,)).require_consumer("billing.bill")


# ── changes ────────────────────────────────────────────────────────────────────────────────────


def test_what_a_change_does_not_mention_stays() -> None:
    later = changed(RESTRICTED, change("confidential", kms_key_id=FILE))
    assert (later.producers, later.consumers) == ((SHOP,), (BILL,))
    assert (later.kms_key_id, later.dek_rotation_days) == (FILE, 90)
    other = Member(MemberKind.CONSUMER, "stock.count")
    assert changed(RESTRICTED, change("restricted", consumers=(other,))) == policy(
        "restricted", producers=(SHOP,), consumers=(other,)
    )
    assert changed(SEALED, change("confidential", dek_rotation_days=7)).dek_rotation_days == 7


def test_opening_a_stream_forgets_its_names() -> None:
    assert changed(RESTRICTED, change("open")) == policy()
    limited = policy("confidential", kms_key_id=FILE, producers=(SHOP,))
    assert not changed(limited, change("confidential", is_for_anyone=True)).is_limited


def test_going_back_to_plain_text_has_to_be_meant() -> None:
    with pytest.raises(OperationRefused, match="with --force new events are stored in plain"):
        changed(SEALED, change("open"))
    opened = changed(SEALED, change("open", is_forced=True))
    assert not opened.is_confidential
    # Its keys are still needed for what is there.
    assert (opened.kms_key_id, opened.active_key_version) == (FILE, 3)


@pytest.mark.parametrize(
    ("present", "asked", "sentence"),
    [
        (policy(), change("restricted"), "Nobody could send"),
        (policy(), change("restricted", consumers=(BILL,)), "Nobody could send"),
        (policy(), change("confidential"), "write --kms"),
        (policy(), change("open", producers=(SHOP,)), "write restricted or confidential"),
        (policy(), change("restricted", producers=(SHOP,), kms_key_id=FILE), "for confidential"),
        (policy(), change("open", is_for_anyone=True), "--anyone is for confidential"),
        (policy(), change("confidential", kms_key_id=FILE, dek_rotation_days=0), "1 or more"),
        (SEALED, change("confidential", kms_key_id="alias/new"), "policy rewrap orders"),
    ],
)
def test_what_makes_no_sense_is_refused(
    present: StreamPolicy, asked: PolicyChange, sentence: str
) -> None:
    with pytest.raises((UsageError, OperationRefused), match=sentence):
        changed(present, asked)


def test_members_are_written_with_their_role() -> None:
    assert parse_member(MemberKind.PRODUCER, "shop=shop_web") == SHOP
    assert parse_member(MemberKind.CONSUMER, "billing.bill") == Member(
        MemberKind.CONSUMER, "billing.bill"
    )
    for kind, text in [("producer", "=x"), ("producer", "shop="), ("consumer", "bill=x")]:
        with pytest.raises(UsageError, match="Write PIPELINE"):
            parse_member(MemberKind(kind), text)


# ── users of Redis ─────────────────────────────────────────────────────────────────────────────


def test_a_users_line_has_all_of_its_streams_and_no_others() -> None:
    payments = StreamPolicy(
        stream_name="payments",
        security_level=SecurityLevel.RESTRICTED,
        producers=(SHOP,),
        consumers=(BILL, Member(MemberKind.CONSUMER, "audit.all")),
    )
    free = StreamPolicy(stream_name="news", security_level=SecurityLevel.OPEN)
    policies = [RESTRICTED, payments, free]
    worker, billing = users_of(policies, "p", stream_name="orders")
    assert (worker.name, billing.name) == ("penstock_worker", "billing")
    assert " ~p:{orders}:* ~p:{payments}:* " in billing.line
    assert "+xadd" in worker.line
    assert "+xadd" not in billing.line
    assert [user.name for user in users_of(policies, "p")][2:] == ["audit.all"]
    assert "news" not in "".join(user.line for user in users_of(policies, "p"))
