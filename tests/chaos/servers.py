"""The world that is hurt: both pairs of servers behind proxies whose addresses never change."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.clocks import Clocks
from tests.chaos.postgres_pair import PostgresPair
from tests.chaos.redis_pair import RedisPair
from tests.proxy import Proxy


class World:
    """Real servers as child processes, which end with this process whatever happens to it."""

    def __init__(self, folder: Path, *, with_standby: bool = True) -> None:
        self.folder = folder
        self.postgres = PostgresPair(folder / "postgres", with_standby=with_standby)
        self.redis = RedisPair(folder / "redis")
        self.clocks = Clocks(folder / "clocks")

    def __enter__(self) -> Self:
        try:
            self.postgres.start()
            self.redis.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every server, in whatever state it is."""
        self.redis.stop()
        self.postgres.stop()

    @property
    def database_proxy(self) -> Proxy:
        """What stands between the workers and PostgreSQL."""
        assert self.postgres.proxy is not None, "the world has not begun"
        return self.postgres.proxy

    @property
    def redis_proxy(self) -> Proxy:
        """What stands between the workers and Redis."""
        assert self.redis.proxy is not None, "the world has not begun"
        return self.redis.proxy

    @property
    def database_url(self) -> str:
        """Where applications find PostgreSQL, whichever server that is."""
        return self.database_proxy.url(self.postgres.url)

    @property
    def redis_url(self) -> str:
        """Where applications find Redis, whichever server that is."""
        return self.redis_proxy.url(self.redis.url)

    @property
    def direct_database_url(self) -> str:
        """The current primary without the proxy: for the harness itself."""
        return self.postgres.url

    @property
    def direct_redis_url(self) -> str:
        """The current Redis without the proxy: for the harness itself."""
        return self.redis.url

    def heal(self) -> None:
        """Everything runs, answers and accepts writes again."""
        self.postgres.thaw()
        self.postgres.restart()
        self.redis.heal()
        for proxy in (self.database_proxy, self.redis_proxy):
            proxy.heal()
