"""What one step of a stage achieved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How many events moved, how long to leave the stage alone, whether it has more to do."""

    moved: int
    pause_seconds: float = 0.0
    has_more: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return self.moved == 0 and self.pause_seconds == 0.0 and not self.has_more


IDLE = Progress(0)
AGAIN = Progress(0, has_more=True)
