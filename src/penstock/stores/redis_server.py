"""What a Redis or Valkey server says about itself."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis

from penstock.errors import ServerUnavailable, ServerUnsuitable, SettingsError
from penstock.stores.redis_link import new_client

ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RedisLook:
    """One look at a server."""

    information: dict[str, Any]
    eviction: str | None
    """Its maxmemory-policy; None where it does not tell."""
    now: datetime


def look_at(url: str) -> RedisLook:
    """Ask a server about itself. Raises ServerUnavailable or ServerUnsuitable."""
    try:
        with closing(new_client(url, ANSWER_SECONDS)) as client:
            seconds, microseconds = client.time()
            information: Any = client.info()
            eviction = information.get("maxmemory_policy")
            # Managed servers hide CONFIG.
            with suppress(redis.ResponseError):
                configured: Any = client.config_get("maxmemory-policy")
                eviction = configured.get("maxmemory-policy", eviction)
    except SettingsError as error:
        raise ServerUnsuitable(str(error)) from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise ServerUnavailable(f"it cannot be reached: {error}") from error
    except redis.RedisError as error:
        raise ServerUnsuitable(f"it does not tell about itself: {error}") from error
    return RedisLook(
        information, eviction, datetime.fromtimestamp(seconds + microseconds / 1_000_000, UTC)
    )


def ping(url: str, answer_seconds: float) -> None:
    """Ask whether a server answers in time. Raises ServerUnavailable where it does not."""
    try:
        with closing(new_client(url, answer_seconds)) as client:
            client.ping()
    except (redis.RedisError, OSError) as error:
        raise ServerUnavailable(f"it does not answer: {error}") from error
