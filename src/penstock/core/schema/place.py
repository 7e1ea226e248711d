"""Where a comparison stands, and what its parts need of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.core.schema.breaks import Break, Cause
from penstock.core.schema.nodes import Node
from penstock.core.schema.shapes import Shapes, Together

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """A place inside the event."""

    path: str = ""
    depth: int = 0
    """How many steps into the value."""
    assumed: Mapping[Pair, int] = field(default_factory=dict)
    """Pairs that are being compared further out, and how deep in the value that began."""
    is_trial: bool = False
    """Only whether there is a break matters, not how it is told."""

    def field(self, name: str) -> Place:
        """The place of a field."""
        return replace(
            self, path=f"{self.path}.{name}" if self.path else name, depth=self.depth + 1
        )

    def member(self, number: int | None = None) -> Place:
        """The place of one member of a list, or of all."""
        told = "" if number is None else str(number)
        return replace(self, path=f"{self.path}[{told}]", depth=self.depth + 1)

    def names(self) -> Place:
        """The place of the names of fields."""
        return replace(self, depth=self.depth + 1)

    def may_lean_on(self, pairs: Iterable[Pair]) -> bool:
        """Whether these pairs are being compared, each on the way into the value to here."""
        return all(self.assumed.get(pair, self.depth) < self.depth for pair in pairs)

    def assuming(self, pair: Pair) -> Place:
        """The same place, with a pair taken as compatible further in."""
        return replace(self, assumed={**self.assumed, pair: self.depth})

    def trial(self) -> Place:
        """The same place, for a question that is answered by yes or no."""
        return replace(self, is_trial=True)

    def breaks(self, cause: Cause, before: str, after: str, reason: str) -> Break:
        """A break here."""
        return Break(self.path, cause.value, before, after, reason)


class Comparing(Protocol):
    """A comparison, as its parts for objects and lists see it."""

    shapes: Shapes

    def breaks(self, together: Together, node: Node, at: Place) -> Iterator[Break]:
        """What passes all schemas of the writer and not the reader's."""
        ...
