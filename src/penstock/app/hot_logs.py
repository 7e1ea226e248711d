"""The hot logs that a process reads and writes: its own, and those of other services."""

from __future__ import annotations

from penstock.core.outgoing import Unset
from penstock.core.require import require
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.errors import RegistrationError
from penstock.stores.announcements import Announcements
from penstock.stores.hot_log import HotLog, NoHotLog
from penstock.stores.redis_log import RedisLog


class HotLogs:
    """Opens hot logs, one for each stage; where there is none, stages share what wakes them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._announcements: dict[str, Announcements] = {}

    def own(self) -> HotLog:
        """The hot log of this service's streams."""
        settings = self._settings
        if settings.redis_url is None:
            return NoHotLog(self._announced_by(settings.database_url))
        return RedisLog(
            settings.redis_url,
            prefix=settings.redis_prefix,
            length_max=settings.hot_log_length_max,
            bytes_max=settings.hot_log_bytes_max,
        )

    def of_source(self, source: Source) -> HotLog:
        """The hot log of another service's stream. Raises RegistrationError where none is named."""
        url = self._settings.redis_url if isinstance(source.redis_url, Unset) else source.redis_url
        if url is not None:
            return RedisLog(url, prefix=source.redis_prefix)
        require(
            source.source_url is not None,
            f"pipeline.source({source.stream_name!r}, …) names no Redis, and the pipeline has "
            "none either. Write redis_url=… or source_url=….",
            RegistrationError,
        )
        return NoHotLog(self._announced_by(str(source.source_url)))

    def close(self) -> None:
        """Stop listening."""
        for announcements in self._announcements.values():
            announcements.close()

    def _announced_by(self, database_url: str) -> Announcements:
        return self._announcements.setdefault(database_url, Announcements(database_url))
