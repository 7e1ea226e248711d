"""What a supervisor waits for, besides the end of a child."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.children import Child


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody sent SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True)
class StopInsisted:
    """Somebody sent SIGINT after that: they do not want to wait."""


@dataclass(frozen=True, slots=True)
class InquiryEnded:
    """It is known whether something else than the worker explains its death."""

    child: Child
    is_explained: bool


@dataclass(frozen=True, slots=True)
class QuarantineChanged:
    """Others are set aside than before."""


Happening = Child | StopRequested | StopInsisted | InquiryEnded | QuarantineChanged
