"""What all lanes of a consumer have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.core.replays import Replay
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.pipeline.gate import Gate
from penstock.pipeline.leasing import Leases
from penstock.pipeline.losses import Losses
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan


class Crew(Protocol):
    """Runs stages in threads of their own."""

    def start(self, name: str, open_stage: Callable[..., Any]) -> None:
        """Run a stage until it is stopped; one that runs already is left alone."""

    def stop(self, name: str) -> None:
        """Ask a stage to end after what it has in hand."""

    def wait(self, names: set[str]) -> None:
        """Wait until these have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consuming:
    """One consumer in one worker process."""

    name: str
    options: ConsumerOptions
    plan: HandlerPlan
    settings: Settings
    leases: Leases
    seams: ConsumerSeams
    gate: Gate
    control: Callable[[], psycopg.Connection[Any]]
    """The connection that the process shares for everything but handling."""
    losses: Losses = field(default_factory=Losses)
    """What its lanes remember of connections that broke; a lane does not outlive its own."""
    source: Source | None = None
    """Where the stream is, if it is another service's."""
    replay: Replay | None = None
    """The range that it is for, if it is the temporary consumer of a replay."""

    @property
    def stream_name(self) -> str:
        """The stream that it reads."""
        return self.options.stream_name
