"""Ways to the Redis server or cluster that holds timers, for threads and for asyncio.

A command is sent once: a claim or a cancellation that was repeated would lie about its outcome.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import redis
from redis import asyncio as redis_asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE
from redis.retry import Retry

from penstock.core.masking import masked_url
from penstock.errors import ServerUnavailable, ServerUnsuitable, UsageError
from penstock.stores.redis_link import (
    CONNECT_SECONDS,
    STUMBLES,
    RedisLink,
    Script,
    Word,
    complete,
    greet,
    usable_url,
)
from penstock.stores.redis_log import SOCKET_SECONDS
from penstock.stores.redis_refusals import is_passing

LOOK_AGAIN_SECONDS = 0.05
CONNECTIONS_MAX = 16
"""How many commands of one event loop are under way at a time; others wait for their turn."""
TURN_SECONDS = 30.0
TimerServer = (
    str | redis.Redis | redis.RedisCluster | redis_asyncio.Redis | redis_asyncio.RedisCluster
)
"""A URL serves threads and asyncio; a client only its own kind. The client of a cluster is used as
it is, and repeats commands if it was told to."""


class TimerLink:
    """Scripts and commands from threads. The first one waits a while for the server."""

    def __init__(self, server: TimerServer, *, hash_tags: bool, start_seconds: float) -> None:
        self.address = _address(server)
        self._server = server
        self._hash_tags = hash_tags
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._link: RedisLink | _ClusterLink | None = None

    def run(self, script: Script, keys: list[str], *arguments: Word) -> Any:
        """Run a script; returns its reply as bytes."""
        with in_our_words(self.address):
            return (self._link or self._open()).run(script, keys, *arguments)

    def call(self, *words: Word) -> Any:
        """Send a command; returns its reply."""
        with in_our_words(self.address):
            return (self._link or self._open()).call(*words)

    def subscriber(self) -> Any:
        """A redis-py PubSub on a connection of its own, for the caller to close."""
        if isinstance(self._server, redis.RedisCluster):
            return cast("Any", self._server).pubsub()
        return cast("Any", self._client()).pubsub()

    def close(self) -> None:
        """Give connections back; the next command opens new ones. A given client stays open."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _open(self) -> RedisLink | _ClusterLink:
        with self._lock:
            if self._link is None:
                self._link = self._found()
            return self._link

    def _found(self) -> RedisLink | _ClusterLink:
        if isinstance(self._server, redis.RedisCluster):
            _require_hash_tags(self._hash_tags, self.address)
            return _ClusterLink(self._server, is_own=False)
        link = RedisLink(self._client())
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                with in_our_words(self.address):
                    is_cluster = _says_cluster(_asked(link))
                break
            except ServerUnavailable:
                if time.monotonic() >= deadline:
                    raise
                threading.Event().wait(LOOK_AGAIN_SECONDS)
        if not is_cluster:
            return link
        link.close()
        _require_hash_tags(self._hash_tags, self.address)
        if not isinstance(self._server, str):
            raise UsageError(_PLAIN_CLIENT_OF_CLUSTER)
        options = {"socket_timeout": SOCKET_SECONDS, "retry": Retry(NoBackoff(), 0)}
        return _ClusterLink(redis.RedisCluster.from_url(self._server, **options), is_own=True)

    def _client(self) -> redis.Redis:
        if isinstance(self._server, str):
            return cast("redis.Redis", _from_url(redis.ConnectionPool, self._server, redis.Redis))
        if not isinstance(self._server, redis.Redis):
            raise UsageError(
                "These timers were given a client of redis.asyncio, which threads cannot use. "
                "Nothing was done; await the …_async form, or give a URL, which serves both."
            )
        pool = self._server.connection_pool
        options = {**pool.connection_kwargs, **_OWN}
        options["socket_timeout"] = options.get("socket_timeout") or SOCKET_SECONDS
        copied = redis.ConnectionPool(connection_class=pool.connection_class, **options)
        return redis.Redis.from_pool(copied)


class AsyncTimerLink:
    """The same for asyncio; each event loop has connections of its own."""

    def __init__(self, server: TimerServer, *, hash_tags: bool, start_seconds: float) -> None:
        self.address = _address(server)
        self._server = server
        self._hash_tags = hash_tags
        self._start_seconds = start_seconds
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def run(self, script: Script, keys: list[str], *arguments: Word) -> Any:
        """Run a script; returns its reply as bytes."""
        words = (len(keys), *keys, *arguments)
        with in_our_words(self.address):
            client = await self._client()
            try:
                return await client.execute_command("EVALSHA", script.sha, *words, **_RAW)
            except redis.exceptions.NoScriptError:
                return await client.execute_command("EVAL", script.text, *words, **_RAW)

    async def call(self, *words: Word) -> Any:
        """Send a command; returns its reply as redis-py reads it."""
        with in_our_words(self.address):
            return await (await self._client()).execute_command(*words, **_RAW)

    async def close(self) -> None:
        """Give the running loop's connections back. A given client stays open."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None and client is not self._server:
            await client.aclose()

    async def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = await self._found()
            # Another task may have been as quick: one of the two is enough.
            kept = self._clients.setdefault(loop, client)
            if kept is not client:
                await client.aclose()
                client = kept
        return client

    async def _found(self) -> Any:
        if isinstance(self._server, redis_asyncio.RedisCluster):
            _require_hash_tags(self._hash_tags, self.address)
            return self._server
        client = self._plain()
        try:
            is_cluster = await self._is_cluster(client)
        except BaseException:
            await client.aclose()
            raise
        if not is_cluster:
            return client
        await client.aclose()
        _require_hash_tags(self._hash_tags, self.address)
        if not isinstance(self._server, str):
            raise UsageError(_PLAIN_CLIENT_OF_CLUSTER)
        options = {"socket_timeout": SOCKET_SECONDS, "retry": AsyncRetry(NoBackoff(), 0)}
        return redis_asyncio.RedisCluster.from_url(self._server, **options)

    async def _is_cluster(self, client: Any) -> bool:
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                with in_our_words(self.address):
                    return _says_cluster(await client.execute_command("INFO", "cluster"))
            except ServerUnavailable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
            except ServerUnsuitable as error:
                if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                    return False
                raise

    def _plain(self) -> Any:
        limits = {"max_connections": CONNECTIONS_MAX, "timeout": TURN_SECONDS}
        if isinstance(self._server, str):
            pool_class = redis_asyncio.BlockingConnectionPool
            return _from_url(pool_class, self._server, redis_asyncio.Redis, **limits)
        if not isinstance(self._server, redis_asyncio.Redis):
            raise UsageError(
                "These timers were given a client for threads, which asyncio cannot use. Nothing "
                "was done; call the form without _async, or give a URL, which serves both."
            )
        given = self._server.connection_pool
        options = {**given.connection_kwargs, **_OWN, "retry": AsyncRetry(NoBackoff(), 0)}
        options["socket_timeout"] = options.get("socket_timeout") or SOCKET_SECONDS
        pool = redis_asyncio.BlockingConnectionPool(
            connection_class=given.connection_class, **cast("Any", limits), **options
        )
        return redis_asyncio.Redis.from_pool(pool)


class _ClusterLink:
    """The face of a RedisLink before a cluster's client, which finds a key's node."""

    def __init__(self, client: Any, *, is_own: bool) -> None:
        self._client = client
        self._is_own = is_own

    def call(self, *words: Word) -> Any:
        return self._client.execute_command(*words, **_RAW)

    def run(self, script: Script, keys: list[str], *arguments: Word) -> Any:
        words = (len(keys), *keys, *arguments)
        try:
            return self.call("EVALSHA", script.sha, *words)
        except redis.exceptions.NoScriptError:
            return self.call("EVAL", script.text, *words)

    def close(self) -> None:
        if self._is_own:
            self._client.close()


@contextmanager
def in_our_words(address: str) -> Iterator[None]:
    """Translate what redis-py raises: what waiting cures, and what it does not."""
    try:
        yield
    except redis.AuthenticationError as error:
        raise ServerUnsuitable(
            f"Redis at {address} refuses this user: {error}. Nothing was done; check name and "
            "password."
        ) from error
    except redis.exceptions.NoPermissionError as error:
        raise ServerUnsuitable(
            f"Redis at {address} refuses this user: {error}. {_IN_PART}; check its permissions "
            "(docs/TIMERS.md)."
        ) from error
    except redis.exceptions.RedisClusterException as error:
        raise ServerUnavailable(
            f"The Redis cluster at {address} cannot be used now: {error} Its timers stay."
        ) from error
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise ServerUnavailable(
            f"Redis at {address} cannot be reached: {error} Timers that are in it stay. What was "
            "asked may have happened; a timer published again under its timer_id is there once."
        ) from error
    except (redis.exceptions.InvalidResponse, *STUMBLES) as error:
        raise ServerUnsuitable(
            f"What is at {address} does not answer like Redis: {error}. Correct the address."
        ) from error
    except redis.RedisError as error:
        reply = str(error)
        if is_passing(error):
            raise ServerUnavailable(
                f"Redis at {address} accepts nothing for now: {reply} Nothing was done."
            ) from error
        raise ServerUnsuitable(
            f"Redis at {address} refuses: {reply} {_IN_PART}; if a key has a wrong type, "
            "something else uses it, and these timers need a prefix of their own."
        ) from error


_OWN = {"decode_responses": False, "socket_connect_timeout": CONNECT_SECONDS}
_IN_PART = (
    "What was asked failed, perhaps after a part of it, and can be asked again once that is mended"
)
_RAW: Any = {NEVER_DECODE: []}
_PLAIN_CLIENT_OF_CLUSTER = (
    "The server is a Redis cluster, and these timers were given a client for one server. Nothing "
    "was done; give a RedisCluster client, or a URL."
)


def _from_url(pool_class: Any, url: str, client_class: Any, **limits: Any) -> Any:
    options: dict[str, Any] = {**_OWN, "socket_timeout": SOCKET_SECONDS}
    if client_class is redis_asyncio.Redis:
        options["retry"] = AsyncRetry(NoBackoff(), 0)
    else:
        options |= {"retry": Retry(NoBackoff(), 0), "redis_connect_func": greet}
    with usable_url("The URL of the timers' Redis"):
        pool = pool_class.from_url(url, **limits)
        complete(pool, **options)
    return client_class.from_pool(pool)


def _address(server: TimerServer) -> str:
    if isinstance(server, str):
        return masked_url(server)
    pool = getattr(server, "connection_pool", None)
    options = {} if pool is None else pool.connection_kwargs
    if "path" in options:
        return f"unix://{options['path']}"
    return f"{options['host']}:{options.get('port', 6379)}" if "host" in options else "the client's"


def _asked(link: RedisLink) -> Any:
    try:
        return link.call("INFO", "cluster")
    except redis.exceptions.NoPermissionError:
        # Who may not ask may still be allowed everything that matters.
        return b""


def _says_cluster(reply: Any) -> bool:
    if isinstance(reply, dict):
        return str(reply.get("cluster_enabled", 0)) == "1"
    return b"cluster_enabled:1" in reply


def _require_hash_tags(hash_tags: bool, address: str) -> None:
    if not hash_tags:
        raise ServerUnsuitable(
            f"Redis at {address} is a cluster, where the keys of a topic have to lie on one node. "
            "Nothing was done; set hash_tags=True (timer_hash_tags) for everybody who uses these "
            "timers."
        )
