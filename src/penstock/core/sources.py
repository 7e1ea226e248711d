"""A stream of another service: what an application says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.mac import MacKeys
from penstock.core.outgoing import Unset


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the tiers of another service's stream are. Secrets are not printed."""

    stream_name: str
    redis_url: str | Unset | None = field(repr=False)
    """Unset: the pipeline's own. None: the producer has no hot log."""
    redis_prefix: str
    mac_key: str | None = field(repr=False)
    source_url: str | None = field(repr=False)
    source_schema: str
    archive_url: str | None = field(default=None, repr=False)
    """Where the producer archives the stream."""
    brownout: bool
    """Whether to read the producer's database while Redis is away."""

    @property
    def keys(self) -> MacKeys | None:
        """The keys that its entries are signed with; None: its database tells."""
        return None if self.mac_key is None else MacKeys.parse(self.mac_key)
