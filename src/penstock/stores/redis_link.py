"""Commands to Redis on connections that are kept: a client's way to one costs more than the rest.

A command is sent once. Whatever goes wrong, its connection is closed, so that the next command
never reads the reply to an earlier one.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.errors import SettingsError

# A connection that rested for longer may have been closed by the server or by something between.
REST_SECONDS_MAX = 1.0
CONNECT_SECONDS = 3.0
# Used at no time that could be long ago: it is opened by its next command.
_CLOSED = math.inf
Word = str | int | bytes


class Script:
    """A Lua script, and the name under which a server keeps it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Connections made as a client makes its own, one for each thread that calls just now."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._made: list[Any] = []
        # With the time of their last use. Several threads take from a list's end and add to it.
        self._resting: list[tuple[Any, float]] = []

    def call(self, *words: Word) -> Any:
        """Send a command and wait for its reply. Raises what redis-py raises; repeats nothing."""
        connection = self._take()
        used_at = _CLOSED
        try:
            connection.send_command(*words)
            reply = connection.read_response()
            used_at = time.monotonic()
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._resting.append((connection, used_at))
        return reply

    def run(self, script: Script, keys: list[str], *arguments: Word) -> Any:
        """Run a script; a server that does not know it has done nothing, and is told it."""
        try:
            return self.call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            self.call("SCRIPT", "LOAD", script.text)
        return self.call("EVALSHA", script.sha, len(keys), *keys, *arguments)

    def close(self) -> None:
        """Close all connections; the next command opens its own again."""
        for connection in self._made:
            connection.disconnect()

    def _take(self) -> Any:
        try:
            connection, used_at = self._resting.pop()
        except IndexError:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            self._made.append(connection)
            return connection
        if time.monotonic() - used_at > REST_SECONDS_MAX:
            _drop_if_stale(connection)
        return connection


def new_client(
    url: str, socket_seconds: float, *, connect_seconds: float = CONNECT_SECONDS
) -> redis.Redis:
    """A client that never repeats a command by itself: the caller knows what is safe."""
    try:
        client = redis.Redis.from_url(
            url,
            socket_connect_timeout=connect_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        raise SettingsError(
            "redis_url cannot be used. Write redis://user:password@host:port/0, rediss:// for "
            "TLS, or unix:///path/to/socket"
        ) from None
    # Set here, because options in the URL would win over arguments.
    client.connection_pool.connection_kwargs["socket_timeout"] = socket_seconds
    client.connection_pool.connection_kwargs["decode_responses"] = False
    return client


def _drop_if_stale(connection: Any) -> None:
    """Close a connection on which something waits: its end, or what nobody asked for."""
    try:
        is_stale = bool(connection.can_read())
    except (redis.RedisError, OSError):
        is_stale = True
    if is_stale:
        connection.disconnect()
