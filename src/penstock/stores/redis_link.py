"""Commands to Redis on connections that are kept: a client's way to one costs more than the rest.

A command is sent once. Whatever goes wrong, its connection is closed, so that the next command
never reads the reply to an earlier one.
"""

from __future__ import annotations

import hashlib
import math
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

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
# What redis-py raises besides its own errors where a server speaks the protocol, and answers
# something else than Redis would.
STUMBLES = (AttributeError, LookupError, TypeError, ValueError)


class Script:
    """A Lua script, and the name under which a server keeps it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Question:
    """A command and its reply, on a connection that rests again afterwards."""

    def __init__(
        self, connection: Any, resting: list[tuple[Any, float]], seconds: float = 0.0
    ) -> None:
        self._connection = connection
        self._resting = resting
        self.due_at = time.monotonic() + seconds

    def send(self, words: tuple[Word, ...]) -> None:
        """Send the command."""
        try:
            self._connection.send_command(*words)
        except BaseException:
            self.give_up()
            raise

    def reply(self) -> Any:
        """Wait for the reply."""
        try:
            reply = self._connection.read_response()
        except BaseException:
            self.give_up()
            raise
        self._resting.append((self._connection, time.monotonic()))
        return reply

    @property
    def is_stale(self) -> bool:
        """Whether its reply has waited for so long that it may have got lost meanwhile."""
        return time.monotonic() > self.due_at + REST_SECONDS_MAX

    def is_answered(self, deadline: float, unless: int | None = None) -> bool:
        """Wait for the reply; False where the deadline or the descriptor `unless` comes first.

        What is overdue counts as answered: to take the reply tells what is wrong.
        """
        seconds = min(deadline, self.due_at) - time.monotonic()
        if seconds <= 0:
            return time.monotonic() >= self.due_at
        own = int(self._connection._sock.fileno())  # noqa: SLF001 - it has no other name
        poll = select.poll()
        for descriptor in (own,) if unless is None else (own, unless):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))]
        return own in ready or time.monotonic() >= self.due_at

    def give_up(self) -> None:
        """Close the connection: whoever uses it next must not get this reply."""
        self._connection.disconnect()
        self._resting.append((self._connection, _CLOSED))


class RedisLink:
    """Connections made as a client makes its own, one for each thread that calls just now."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._made: list[Any] = []
        # With the time of their last use. Several threads take from a list's end and add to it.
        self._resting: list[tuple[Any, float]] = []
        _links.add(self)

    def call(self, *words: Word) -> Any:
        """Send a command and wait for its reply. Raises what redis-py raises; repeats nothing."""
        return self.ask(*words).reply()

    def ask(self, *words: Word, seconds: float = 0.0) -> Question:
        """Send a command that is answered within `seconds`, for a reply that is taken later.

        Raises what redis-py raises; then nobody need be waited for.
        """
        question = Question(self._take(), self._resting, seconds)
        question.send(words)
        return question

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

    def leave_to_parent(self) -> None:
        """In a forked process: forget connections, of which the parent's work goes on."""
        self._made, self._resting = [], []

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


_links: WeakSet[RedisLink] = WeakSet()


def _leave_to_parent() -> None:
    """In a child: two processes on one connection would get each other's replies."""
    for link in _links:
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def new_client(
    url: str, socket_seconds: float, *, connect_seconds: float = CONNECT_SECONDS
) -> redis.Redis:
    """A client that never repeats a command by itself: the caller knows what is safe."""
    with usable_url("redis_url"):
        client = redis.Redis.from_url(url, socket_connect_timeout=connect_seconds)
        complete(
            client.connection_pool,
            socket_timeout=socket_seconds,
            decode_responses=False,
            redis_connect_func=greet,
            retry=Retry(NoBackoff(), 0),
        )
    return client


@contextmanager
def usable_url(name: str) -> Iterator[None]:
    """Raise SettingsError for a URL with which no connection can be made."""
    try:
        yield
    except (*STUMBLES, redis.RedisError):
        # Not in redis-py's words: they may repeat a part of the URL, and with it a password.
        raise SettingsError(
            f"{name} cannot be used. Write redis://user:password@host:port/0, rediss:// for TLS, "
            "or unix:///path/to/socket; behind a ? only options that redis-py has for these."
        ) from None


def complete(pool: Any, **options: Any) -> None:
    """Set what options in the URL must not change, and see whether redis-py takes them all."""
    pool.connection_kwargs.update(options)
    if "path" not in pool.connection_kwargs:
        # Connections through a socket file do not know the option.
        pool.connection_kwargs.setdefault("socket_keepalive", True)
    # It looks at options when a connection is made, which is not yet opened by that.
    pool.connection_class(**pool.connection_kwargs)


def greet(connection: Any) -> None:
    """Begin a connection. Where that fails with a RedisError, redis-py closes it again."""
    try:
        connection.on_connect()
    except STUMBLES as error:
        raise redis.exceptions.InvalidResponse(str(error)) from error


def _drop_if_stale(connection: Any) -> None:
    """Close a connection on which something waits: its end, or what nobody asked for."""
    try:
        is_stale = bool(connection.can_read())
    except (redis.RedisError, OSError):
        is_stale = True
    if is_stale:
        connection.disconnect()
