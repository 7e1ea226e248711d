"""Entries that no publisher wrote: what somebody does who may write into Redis, but has no key."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import redis

from tests.chaos.redis_faults import log_keys
from tests.chaos.redis_pair import connected
from tests.chaos.scene import Fault, Scene, fault, some

POISONED_POSITION = 10**15
FAR_POSITIONS = 1000
DEPTH_MAX = 50
FIELD = "e"
EVENT_FIELDS = 12

# An entry cannot be changed in its place, so everything from it on is written again, at once.
# KEYS: log. ARGV: id, field, value. Replies how many entries were written again.
REPLACE = """
local after = redis.call('XRANGE', KEYS[1], ARGV[1], '+')
if #after == 0 or after[1][1] ~= ARGV[1] then return 0 end
local before = redis.call('XREVRANGE', KEYS[1], '(' .. ARGV[1], '-', 'COUNT', 100)
redis.call('DEL', KEYS[1])
for n = #before, 1, -1 do redis.call('XADD', KEYS[1], before[n][1], unpack(before[n][2])) end
redis.call('XADD', KEYS[1], ARGV[1], ARGV[2], ARGV[3])
for n = 2, #after do redis.call('XADD', KEYS[1], after[n][1], unpack(after[n][2])) end
return #after
"""

Found = tuple[bytes, bytes]
"""An entry's id and its value."""


class Log:
    """One stream in Redis, as somebody sees it who has looked around a little."""

    def __init__(self, client: redis.Redis, key: bytes) -> None:
        self._client: Any = client
        self.key = key

    def entries(self) -> list[Found]:
        """The last ones, newest first."""
        found = self._client.xrevrange(self.key, count=DEPTH_MAX)
        return [(entry_id, next(iter(fields.values()))) for entry_id, fields in found]

    def add(self, position: int, value: bytes, field: str = FIELD) -> bool:
        """Append; False where somebody else was faster."""
        try:
            self._client.xadd(self.key, {field: value}, id=f"{position}-0")
        except redis.ResponseError:
            return False
        return True

    def replace(self, entry_id: bytes, value: bytes, field: str = FIELD) -> bool:
        """Put something else in an entry's place; False where it is not there any more."""
        return bool(self._client.eval(REPLACE, 1, self.key, entry_id, field, value))

    def remove(self, entry_id: bytes) -> bool:
        """XDEL."""
        return bool(self._client.xdel(self.key, entry_id))

    def forget_meta(self) -> bool:
        """Remove the key beside the log."""
        return bool(self._client.delete(self.key.removesuffix(b"log") + b"meta"))


Forge = Callable[[Log, list[Found], random.Random], str | None]


def _forgery(name: str, weight: float = 0.8) -> Callable[[Forge], Fault]:
    """A fault that gets a log and its last entries, newest first; there is at least one."""

    def made(forge: Forge) -> Fault:
        @fault(name, weight=weight)
        def inject(scene: Scene, chance: random.Random) -> str | None:
            with connected(scene.world.direct_redis_url) as client:
                key = some(chance, log_keys(client))
                entries = Log(client, key).entries() if key is not None else []
                if key is None or not entries:
                    return None
                told = forge(Log(client, key), entries, chance)
            return f"{told} in {key.decode()}" if told else None

        return inject

    return made


@_forgery("entry-forged", weight=1.2)
def entry_forged(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """The next position is taken by an event that nobody sent, plausible in every field."""
    position = position_of(entries[0]) + 1
    body = forged(body_of(entries[0]), chance)
    header = chance.choice((header_of(entries[0]), b"1 - -", b"1 1 " + b"0" * 64))
    return f"forged {position}" if log.add(position, header + b"\n" + body) else None


@_forgery("hole-forged")
def hole_forged(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """Readers are told that positions which have events, or will have, are none."""
    last = position_of(entries[0])
    position = last + chance.randint(1, FAR_POSITIONS)
    body = b"hole\n%b\n%d\n%d" % (origin_of(entries[0]), last + 1, position)
    value = header_of(entries[0]) + b"\n" + body
    return f"forged a hole {last + 1} to {position}" if log.add(position, value) else None


@_forgery("entry-altered", weight=2.5)
def entry_altered(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """A real entry says something else, under its own header."""
    entry = _one(entries, chance)
    value = header_of(entry) + b"\n" + forged(body_of(entry), chance)
    return f"altered {position_of(entry)}" if log.replace(entry[0], value) else None


@_forgery("entry-replayed")
def entry_replayed(log: Log, entries: list[Found], _chance: random.Random) -> str | None:
    """A real entry, properly signed, once more at the next position."""
    position = position_of(entries[0]) + 1
    original = entries[-1]
    if not log.add(position, original[1]):
        return None
    return f"replayed {position_of(original)} as {position}"


@_forgery("entry-swapped")
def entry_swapped(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """A real entry, properly signed, in the place of another."""
    place = _one(entries, chance)
    other = some(chance, [entry for entry in entries if entry[1] != place[1]])
    if other is None or not log.replace(place[0], other[1]):
        return None
    return f"put {position_of(other)} in the place of {position_of(place)}"


@_forgery("id-poisoned")
def id_poisoned(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """The stream's last id is so large that no position fits behind it."""
    position = POISONED_POSITION + chance.randint(0, FAR_POSITIONS)
    value = entries[0][1]
    return f"poisoned with the id {position}-0" if log.add(position, value) else None


@_forgery("bytes-foreign")
def bytes_foreign(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """Bytes that are nobody's, at the next position or in the place of a real entry."""
    value, goes_behind = chance.randbytes(chance.choice((0, 1, 40, 4000))), chance.random() < 0.5
    entry = _one(entries, chance)
    if goes_behind:
        position = position_of(entries[0]) + 1
        return f"foreign bytes at {position}" if log.add(position, value) else None
    return f"foreign bytes at {position_of(entry)}" if log.replace(entry[0], value) else None


@_forgery("field-foreign")
def field_foreign(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """A real value under another field's name."""
    entry = _one(entries, chance)
    if not log.replace(entry[0], entry[1], field="payload"):
        return None
    return f"a foreign field at {position_of(entry)}"


@_forgery("entry-removed")
def entry_removed(log: Log, entries: list[Found], chance: random.Random) -> str | None:
    """XDEL of one entry, be it the last."""
    entry = _one(entries, chance)
    return f"removed {position_of(entry)}" if log.remove(entry[0]) else None


@_forgery("meta-deleted")
def meta_deleted(log: Log, _entries: list[Found], _chance: random.Random) -> str | None:
    """The key beside the stream, with its term and origin, is gone."""
    return "the :meta deleted" if log.forget_meta() else None


def position_of(entry: Found) -> int:
    """The position that an entry's id stands for."""
    return int(entry[0].partition(b"-")[0])


def header_of(entry: Found) -> bytes:
    """The transport's line of an entry."""
    return entry[1].partition(b"\n")[0]


def body_of(entry: Found) -> bytes:
    """What the header signs."""
    return entry[1].partition(b"\n")[2]


def origin_of(entry: Found) -> bytes:
    """Which database it says it is from; nothing where it is a forgery itself."""
    parts = body_of(entry).split(b"\n")
    return parts[1] if len(parts) > 1 else b""


def forged(body: bytes, chance: random.Random) -> bytes:
    """A body that differs in what matters: another event, or another number in its payload."""
    parts = body.split(b"\n", EVENT_FIELDS - 1)
    if len(parts) != EVENT_FIELDS:
        return body + b" "
    if chance.random() < 0.5:
        parts[4] = str(UUID(int=chance.getrandbits(128), version=4)).encode()
    parts[-1] = re.sub(rb"\d+", lambda number: b"%d" % (int(number[0]) + 1), parts[-1])
    return b"\n".join(parts)


def _one(entries: list[Found], chance: random.Random) -> Found:
    entry = some(chance, entries)
    assert entry is not None
    return entry


FAULTS: tuple[Fault, ...] = (
    entry_forged,
    hole_forged,
    entry_altered,
    entry_replayed,
    entry_swapped,
    id_poisoned,
    bytes_foreign,
    field_foreign,
    entry_removed,
    meta_deleted,
)
