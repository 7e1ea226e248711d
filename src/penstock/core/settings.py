"""Settings: frozen, with units in their names, checked against each other at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.core.mac import MacKeys
from penstock.core.outgoing import is_stream_name
from penstock.core.require import require
from penstock.core.timer_keys import PAYLOADS_KEY, TIMELINE_KEY, KeyNames

MEBIBYTE = 1024 * 1024
# Within lease_seconds after a host's death others have noticed, taken over, and handle again.
LEASE_GRANTED_PART = 0.85
DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that a deployment may choose; each has a default that is safe."""

    database_url: str
    redis_url: str | None = None
    schema: str = "events"
    redis_prefix: str = "penstock"
    wakeup: Literal["notify", "poll"] = "notify"
    poll_seconds: float = 5.0
    lease_seconds: float = 30.0
    lease_renew_seconds: float = 10.0
    publish_batch_size: int = 500
    payload_bytes_max: int = MEBIBYTE
    metadata_bytes_max: int = 64 * 1024
    hot_log_length_max: int = 1_000_000
    hot_log_bytes_max: int = 256 * MEBIBYTE
    mac_key: str | None = None
    brownout: bool = True
    early_events: bool = True
    outbox_backlog_max: int = 100_000
    shutdown_seconds: float = 30.0
    heartbeat_timeout_seconds: float = 30.0
    crashes_max: int = 5
    crash_window_seconds: float = 60.0
    parked_per_key_max: int = 10_000
    dead_letter_stream: str | None = None
    cleanup_every_seconds: float = 300.0
    cleanup_batch_size: int = 1000
    settled_retention_days: float = 7.0
    outbox_retention_days: float = 7.0
    inbox_retention_days: float = 30.0
    archive_url: str | None = None
    archive_count_max: int = 100_000
    archive_bytes_max: int = 64 * MEBIBYTE
    archive_age_seconds: float = 300.0
    timer_redis_url: str | None = None
    timer_timeline_key: str = TIMELINE_KEY
    timer_payloads_key: str = PAYLOADS_KEY
    timer_prefix: str | None = None
    timer_hash_tags: bool = False

    @property
    def lease_granted_seconds(self) -> float:
        """How long a lease runs: a little less than it takes until others handle again."""
        return self.lease_seconds * LEASE_GRANTED_PART

    def __post_init__(self) -> None:
        require(
            self.lease_renew_seconds * 2 <= self.lease_granted_seconds,
            "lease_renew_seconds must fit twice into the granted part of lease_seconds "
            f"({LEASE_GRANTED_PART:.0%} of it), so that one missed renewal is harmless",
        )
        require(self.lease_renew_seconds > 0, "lease_renew_seconds must be positive")
        require(self.poll_seconds > 0, "poll_seconds must be positive")
        require(
            self.wakeup in ("notify", "poll"), f'wakeup={self.wakeup!r} must be "notify" or "poll"'
        )
        require(
            1 <= self.publish_batch_size <= 10_000, "publish_batch_size must be between 1 and 10000"
        )
        require(self.payload_bytes_max > 0, "payload_bytes_max must be positive")
        require(self.metadata_bytes_max > 0, "metadata_bytes_max must be positive")
        require(
            self.hot_log_length_max >= self.publish_batch_size,
            "hot_log_length_max must hold at least one batch (publish_batch_size)",
        )
        require(
            self.hot_log_bytes_max >= MEBIBYTE, "hot_log_bytes_max must be at least 1048576 (1 MiB)"
        )
        if self.mac_key is not None:
            MacKeys.parse(self.mac_key)
        require(self.outbox_backlog_max >= 1, "outbox_backlog_max must be at least 1")
        for name in ("shutdown_seconds", "heartbeat_timeout_seconds"):
            require(
                0 < getattr(self, name) <= DAY_SECONDS,
                f"{name} must be positive, and at most {DAY_SECONDS} (a day)",
            )
        require(self.crashes_max >= 1, "crashes_max must be at least 1")
        require(self.crash_window_seconds > 0, "crash_window_seconds must be positive")
        require(self.parked_per_key_max >= 1, "parked_per_key_max must be at least 1")
        require(
            self.dead_letter_stream is None or is_stream_name(self.dead_letter_stream),
            f"dead_letter_stream={self.dead_letter_stream!r} cannot name a stream: start with a "
            "letter or digit and go on with letters, digits and . _ : / - (200 at most)",
        )
        self._require_cleanup()
        self._require_archive()
        KeyNames(
            timeline_key=self.timer_timeline_key,
            payloads_key=self.timer_payloads_key,
            prefix=self.timer_prefix or "",
            hash_tags=self.timer_hash_tags,
        )

    def _require_archive(self) -> None:
        require(
            1 <= self.archive_count_max <= 10_000_000,
            "archive_count_max must be between 1 and 10000000",
        )
        require(
            1 <= self.archive_bytes_max <= 1024 * MEBIBYTE,
            "archive_bytes_max must be between 1 and 1073741824 (1 GiB): readers hold two objects "
            "of that size in memory",
        )
        require(self.archive_age_seconds > 0, "archive_age_seconds must be positive")

    def _require_cleanup(self) -> None:
        require(self.cleanup_every_seconds > 0, "cleanup_every_seconds must be positive")
        require(
            1 <= self.cleanup_batch_size <= 10_000, "cleanup_batch_size must be between 1 and 10000"
        )
        for name in ("settled_retention_days", "outbox_retention_days", "inbox_retention_days"):
            retention_seconds = getattr(self, name) * DAY_SECONDS
            require(
                retention_seconds >= self.cleanup_every_seconds,
                f"{name} must be at least as long as cleanup_every_seconds, "
                "so that nothing is kept for much longer than it says",
            )
