"""What the keys of Redis timers are called: those of faststream-redis-timers, and a few beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.core.require import require
from penstock.errors import InvalidTimer

TIMELINE_KEY = "timers_timeline"
PAYLOADS_KEY = "timers_payloads"
TOPIC_BYTES_MAX = 1000
TIMER_ID_BYTES_MAX = 1000
_TIMELINE_SUFFIX = "_timeline"


@dataclass(frozen=True, slots=True)
class TopicKeys:
    """The keys of one topic, and the channel on which its workers are woken."""

    timeline: str
    """A sorted set: timer_id by the time when it is due, or when its lease ends."""
    payloads: str
    """A hash: timer_id to envelope."""
    state: str
    """A hash: timer_id to lease score, due score, attempts, and whether it is leased or waits."""
    dead: str
    """A hash: timer_id to what happened, and the envelope."""
    channel: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyNames:
    """How keys are made of topics. With hash tags, a topic's keys share a slot of a cluster."""

    timeline_key: str = TIMELINE_KEY
    payloads_key: str = PAYLOADS_KEY
    prefix: str = ""
    hash_tags: bool = False

    def __post_init__(self) -> None:
        require(bool(self.timeline_key), "timeline_key must not be empty")
        require(bool(self.payloads_key), "payloads_key must not be empty")
        require(self.timeline_key != self.payloads_key, "timeline_key and payloads_key must differ")
        if self.hash_tags:
            require(
                not _has_braces(self.timeline_key + self.payloads_key + self.prefix),
                "timeline_key, payloads_key and prefix must be without braces where hash_tags "
                "puts its own",
            )

    def of(self, topic: Any) -> TopicKeys:
        """The keys of a topic. Raises InvalidTimer for one that cannot have any."""
        require(
            isinstance(topic, str) and 0 < len(_bytes(topic)) <= TOPIC_BYTES_MAX,
            f"A topic is a text that is not empty, of {TOPIC_BYTES_MAX} bytes at most. Nothing was "
            "done.",
            InvalidTimer,
        )
        tail = f"{self.prefix}{topic}"
        if self.hash_tags:
            require(
                not _has_braces(topic),
                f"The topic {topic!r} has braces, and hash_tags puts its own. Nothing was done; "
                "name it without.",
                InvalidTimer,
            )
            tail = f"{{{tail}}}"
        # Beside the timeline's own name, so that two queues with different ones share nothing.
        family = self.timeline_key.removesuffix(_TIMELINE_SUFFIX)
        return TopicKeys(
            timeline=f"{self.timeline_key}:{tail}",
            payloads=f"{self.payloads_key}:{tail}",
            state=f"{family}_state:{tail}",
            dead=f"{family}_dead:{tail}",
            channel=f"{family}_wake:{tail}",
        )


def require_timer_id(timer_id: Any) -> None:
    """Raise InvalidTimer for what cannot name a timer."""
    require(
        isinstance(timer_id, str) and 0 < len(_bytes(timer_id)) <= TIMER_ID_BYTES_MAX,
        f"A timer_id is a text that is not empty, of {TIMER_ID_BYTES_MAX} bytes at most. Nothing "
        "was done.",
        InvalidTimer,
    )


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return b""


def _has_braces(text: str) -> bool:
    return "{" in text or "}" in text
