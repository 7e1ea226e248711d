"""Seals what is sent to confidential streams: in the sender's process, right before the INSERT.

What a sender knows of policies and keys may be half a minute old. Where that is too old,
PostgreSQL refuses the row; nothing is ever stored in plain text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from penstock.core.key_rings import HeldKey
from penstock.core.outgoing import OutgoingEvent
from penstock.core.policy import StreamPolicy
from penstock.core.sealing import NONCE_BYTES, sealed_event
from penstock.core.wrapped_keys import WrappedKey
from penstock.errors import KeyRefused, KeyShredded, KeyUnavailable, StreamConfidential
from penstock.stores.data_keys import wrapped_keys
from penstock.stores.policies import POLICY_SECONDS, forget_policies, remembered_policy
from penstock.stores.queries import Queries
from penstock.stores.questions import Questions, Statement
from penstock.stores.unwrapping import unwrapping

REMEMBERED_MAX: Final = 10_000


class _Wrapped(NamedTuple):
    """What an event is sealed with, as the database has it."""

    hashing: WrappedKey
    sealing: WrappedKey


_remembered: dict[tuple[object, str, str, int], tuple[float, _Wrapped]] = {}


def sealing(
    place: object, schema: str, events: Sequence[OutgoingEvent]
) -> Questions[Sequence[OutgoingEvent]]:
    """The events as they may be stored: those of confidential streams sealed.

    Raises StreamRestricted for a producer that a policy does not name, and KeyUnavailable,
    KeyRefused or StreamConfidential; then nothing may be sent.
    """
    keys: dict[str, tuple[HeldKey, HeldKey]] = {}
    for stream_name in dict.fromkeys(event.stream_name for event in events):
        policy = yield from remembered_policy(place, schema, stream_name)
        if policy.is_limited:
            for producer in {one.producer for one in events if one.stream_name == stream_name}:
                policy.require_producer(producer)
        if policy.is_confidential:
            keys[stream_name] = yield from _keys(place, schema, policy)
    if not keys:
        return events
    return [
        _sealed(event, *keys[event.stream_name]) if event.stream_name in keys else event
        for event in events
    ]


def forget() -> None:
    """Ask again for policies and keys: PostgreSQL has refused what they allow."""
    forget_policies()
    _remembered.clear()


def _sealed(event: OutgoingEvent, hashing: HeldKey, sealing_key: HeldKey) -> OutgoingEvent:
    return sealed_event(event, sealing_key.key, hashing.secret, os.urandom(NONCE_BYTES))


def _keys(place: object, schema: str, policy: StreamPolicy) -> Questions[tuple[HeldKey, HeldKey]]:
    wrapped = yield from _wrapped(place, schema, policy)
    found: list[HeldKey] = []
    for key in wrapped:
        # What is at hand needs no thread of its own, which asynchronous callers give to work.
        held = unwrapping().fresh(key)
        found.append(held if held is not None else (yield partial(_unwrapped, key)))
    return found[0], found[1]


def _wrapped(place: object, schema: str, policy: StreamPolicy) -> Questions[_Wrapped]:
    stream_name, version = policy.stream_name, policy.active_key_version
    if version is None:
        raise _without_key(stream_name)
    identity = (place, schema, stream_name, version)
    known = _remembered.get(identity)
    if known is not None and known[0] > time.monotonic():
        return known[1]
    until = time.monotonic() + POLICY_SECONDS
    query = Queries("data_key.sql", schema)["read_for_sending"]
    rows = yield Statement(query, {"stream_name": stream_name, "version": version})
    found = wrapped_keys(stream_name, rows)
    if len(found) != len(_Wrapped._fields):
        forget()
        raise _without_key(stream_name)
    if len(_remembered) >= REMEMBERED_MAX:
        _remembered.clear()
    _remembered[identity] = (until, _Wrapped(*found))
    return _remembered[identity][1]


def _unwrapped(key: WrappedKey) -> HeldKey:
    try:
        return unwrapping().key(key)
    except KeyUnavailable as error:
        raise KeyUnavailable(f"Nothing was sent to {key.stream_name!r}: {error}") from error
    except (KeyRefused, KeyShredded) as error:
        raise KeyRefused(f"Nothing was sent to {key.stream_name!r}: {error}") from error


def _without_key(stream_name: str) -> StreamConfidential:
    return StreamConfidential(
        f"{stream_name!r} is confidential and has no data key, so nothing was sent. Make one with "
        f"`penstock policy set {stream_name} confidential --kms KEY`."
    )
