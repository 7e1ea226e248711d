"""What every signal is."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class Level(StrEnum):
    """How loudly a log tells of a signal."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Signal:
    """Something that happened."""

    registry: ClassVar[dict[str, type[Signal]]] = {}
    level: ClassVar[Level] = Level.DEBUG

    def __init_subclass__(cls, level: Level | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass with slots is made twice, the second time without its keywords.
        if level is not None:
            cls.level = level
        Signal.registry[cls.__name__] = cls
