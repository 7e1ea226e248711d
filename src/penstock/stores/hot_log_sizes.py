"""How large hot logs are: one round trip for all streams, and nothing is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.stores.hot_log_keys import log_key
from penstock.stores.redis_link import new_client

ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class HotLogSize:
    """One hot log."""

    stream_name: str
    length: int | None
    size_bytes: int | None
    """None where this user may not ask."""


class HotLogSizes:
    """Asks one server, on a connection that is kept."""

    def __init__(self, url: str, prefix: str) -> None:
        self._prefix = prefix
        self._client = new_client(url, ANSWER_SECONDS)

    def read(self, stream_names: Sequence[str]) -> list[HotLogSize]:
        """The sizes of these streams' logs; an absent one is empty. Raises redis.RedisError."""
        pipe = self._client.pipeline(transaction=False)
        for name in stream_names:
            key = log_key(self._prefix, name)
            pipe.xlen(key)
            pipe.memory_usage(key)
        answers = pipe.execute(raise_on_error=False)
        if any(isinstance(answer, redis.ConnectionError) for answer in answers):
            raise redis.ConnectionError("the connection broke")
        pairs = zip(answers[0::2], answers[1::2], strict=True)
        return [
            HotLogSize(name, _count(length), _count(size))
            for name, (length, size) in zip(stream_names, pairs, strict=True)
        ]

    def close(self) -> None:
        """Let go of the connection; the next question opens a new one."""
        self._client.close()


def _count(answer: Any) -> int | None:
    if isinstance(answer, redis.RedisError):
        return None
    return 0 if answer is None else int(answer)
