"""What is asked of Redis about timers, and how its replies read: for threads and asyncio alike."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from penstock.core.timer_keys import KeyNames
from penstock.stores.queries import lua
from penstock.stores.redis_link import Script, Word
from penstock.stores.timer_values import DeadTimer, QueuedTimer

PAGE_COUNT = 5000
"""How many timers one look at a timeline brings, so that it never stops the server for long."""
_SCRIPT_NAMES = ("claim", "settle", "publish", "cancel", "list", "find", "dead", "redrive")
_STATE = re.compile(r"(\S+) (\S+) (\d+) ([lw])")


@dataclass(frozen=True, slots=True)
class Call:
    """A script with its keys and arguments."""

    script: Script
    keys: list[str]
    arguments: tuple[Word, ...]


class TimerCalls:
    """Makes calls for the topics of one set of key names."""

    def __init__(self, names: KeyNames) -> None:
        self.names = names
        self._scripts = {name: Script(lua(f"timer_{name}")) for name in _SCRIPT_NAMES}

    def claim(self, topic: str, count: int, lease_seconds: float, bytes_max: int) -> Call:
        """Take due timers."""
        arguments = (count, number(lease_seconds), bytes_max)
        return Call(self._scripts["claim"], self._living(topic), arguments)

    def settle(self, topic: str, *arguments: Word) -> Call:
        """End or lengthen a lease."""
        return Call(self._scripts["settle"], self._all(topic), arguments)

    def publish(
        self,
        topic: str,
        timer_id: str,
        payload: bytes,
        delay_seconds: float | None,
        at_score: float | None,
    ) -> Call:
        """Arm a timer, after a while or at a time."""
        assert (delay_seconds is None) != (at_score is None), "one of the two says when"
        when = ("at", at_score) if delay_seconds is None else ("in", delay_seconds)
        channel = self.names.of(topic).channel
        arguments = (timer_id, payload, when[0], number(when[1] or 0.0), channel)
        return Call(self._scripts["publish"], self._living(topic), arguments)

    def cancel(self, topic: str, *timer_id: str) -> Call:
        """Remove a timer or, without its id, all of them."""
        return Call(self._scripts["cancel"], self._living(topic), timer_id)

    def page(self, topic: str, low: str, high: str, *, skip: int, count: int) -> Call:
        """List ids and scores of timers between two scores."""
        keys = self.names.of(topic)
        return Call(self._scripts["list"], [keys.timeline], (low, high, skip, count))

    def first(self, topic: str, high: str, count: int) -> Call:
        """List the timers with the lowest scores, with what is known of them."""
        keys = self.names.of(topic)
        return Call(self._scripts["list"], [keys.timeline, keys.state], ("-inf", high, 0, count))

    def find(self, topic: str, timer_id: str) -> Call:
        """Look at one timer."""
        return Call(self._scripts["find"], self._living(topic), (timer_id,))

    def dead(self, topic: str, count: int) -> Call:
        """List dead timers."""
        return Call(self._scripts["dead"], [self.names.of(topic).dead], (count,))

    def redrive(self, topic: str, timer_id: str) -> Call:
        """Arm a dead timer again."""
        arguments = (timer_id, self.names.of(topic).channel)
        return Call(self._scripts["redrive"], self._all(topic), arguments)

    def _living(self, topic: str) -> list[str]:
        keys = self.names.of(topic)
        return [keys.timeline, keys.payloads, keys.state]

    def _all(self, topic: str) -> list[str]:
        return [*self._living(topic), self.names.of(topic).dead]


class PendingPages:
    """Walks over a timeline in pages. Each timer once, even if it moves while they are read."""

    def __init__(self, calls: TimerCalls, topic: str, before_score: float | None) -> None:
        self._calls = calls
        self._topic = topic
        self._high = "+inf" if before_score is None else number(before_score)
        self._low = "-inf"
        self._skip = 0
        self._found: dict[str, None] = {}

    @property
    def ids(self) -> list[str]:
        """What was found so far, in the order of scores."""
        return list(self._found)

    def next_page(self) -> Call:
        """What to ask next."""
        return self._calls.page(
            self._topic, self._low, self._high, skip=self._skip, count=PAGE_COUNT
        )

    def take(self, reply: list[bytes]) -> bool:
        """Note a page. Returns whether there may be another."""
        scores = [score.decode() for score in reply[1::3]]
        self._found.update(dict.fromkeys(text(timer_id) for timer_id in reply[0::3]))
        if len(scores) < PAGE_COUNT:
            return False
        # On from the last score, past those that have it and were seen: an offset from the start
        # would miss as many as were settled meanwhile.
        seen = scores.count(scores[-1])
        self._skip = self._skip + seen if scores[-1] == self._low else seen
        self._low = scores[-1]
        return True


def number(value: float) -> str:
    """A number as Redis reads it, to the last bit."""
    return repr(float(value))


def text(timer_id: bytes) -> str:
    """A timer's id, also where it is no text."""
    return timer_id.decode(errors="backslashreplace")


def queued_timer(topic: str, timer_id: bytes, score: bytes, state: bytes) -> QueuedTimer:
    """A timer as a listing tells of it."""
    found = _STATE.fullmatch(state.decode(errors="replace"))
    # Another score than the one that was given to it: armed anew, and the state is left over.
    if found is None or float(found[1]) != float(score):
        return QueuedTimer(topic, text(timer_id), float(score), float(score), 0, "pending")
    attempts = int(found[3])
    is_leased = found[4] == "l"
    return QueuedTimer(
        topic,
        text(timer_id),
        float(score),
        float(found[2]),
        attempts,
        "leased" if is_leased else "retrying" if attempts else "pending",
    )


def dead_timer(topic: str, timer_id: str, heading: bytes) -> DeadTimer | None:
    """A dead timer as its heading tells of it; None where that is not one of ours."""
    try:
        buried, due, attempts, happened = heading.decode().split("\n")[:4]
        told: Any = json.loads(happened)
        return DeadTimer(
            topic,
            timer_id,
            due_score=float(due),
            attempts=int(attempts),
            buried_score=float(buried),
            error_type=str(told["type"]),
            error_message=str(told["message"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
