"""Settings: frozen, with units in their names, checked against each other at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.core.require import require

MEBIBYTE = 1024 * 1024


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
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        require(
            self.lease_renew_seconds * 2 <= self.lease_seconds,
            "lease_renew_seconds must fit twice into lease_seconds, "
            "so that one missed renewal is harmless",
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
        require(self.shutdown_seconds > 0, "shutdown_seconds must be positive")
