"""What a Redis or Valkey server says about itself."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis

from penstock.errors import ServerUnavailable, ServerUnsuitable, SettingsError
from penstock.stores.redis_link import STUMBLES, new_client

ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RedisLook:
    """One look at a server."""

    server: str
    """Its name and version."""
    information: dict[str, Any]
    eviction: str | None
    """Its maxmemory-policy; None where it does not tell."""
    now: datetime | None
    """Its clock; None where this user may not ask."""


def look_at(url: str) -> RedisLook:
    """Ask a server about itself. Raises ServerUnavailable or ServerUnsuitable."""
    try:
        with closing(new_client(url, ANSWER_SECONDS)) as client:
            information: Any = client.info()
            version = information.get("valkey_version") or information["redis_version"]
            now = None
            # Whoever only reads the hot log need not ask for the time.
            with suppress(redis.exceptions.NoPermissionError):
                seconds, microseconds = client.time()
                now = datetime.fromtimestamp(seconds + microseconds / 1_000_000, UTC)
            eviction = information.get("maxmemory_policy")
            # Managed servers hide CONFIG.
            with suppress(redis.ResponseError):
                configured: Any = client.config_get("maxmemory-policy")
                eviction = configured.get("maxmemory-policy", eviction)
    except SettingsError as error:
        raise ServerUnsuitable(str(error)) from None
    except redis.AuthenticationError as error:
        raise ServerUnsuitable(f"it refuses this user: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise ServerUnavailable(f"it cannot be reached: {error}") from error
    except (redis.exceptions.InvalidResponse, *STUMBLES) as error:
        raise ServerUnsuitable(f"it does not answer like Redis: {error}") from error
    except redis.RedisError as error:
        raise ServerUnsuitable(f"it does not tell about itself: {error}") from error
    name = information.get("server_name", "redis")
    return RedisLook(f"{name} {version}", information, eviction, now)


def ping(url: str, answer_seconds: float) -> None:
    """Ask whether a server answers in time. Raises ServerUnavailable where it does not."""
    try:
        with closing(new_client(url, answer_seconds)) as client:
            client.ping()
    except (redis.RedisError, OSError, *STUMBLES) as error:
        raise ServerUnavailable(f"it does not answer: {error}") from error
