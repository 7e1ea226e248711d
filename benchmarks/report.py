"""What was measured, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Figures = Mapping[str, float]
"""Named by their unit; the first one is compared."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One comparison and the ratio that it should reach."""

    name: str
    title: str
    target: float
    is_ceiling: bool = False
    """Whether the ratio should stay at or below its target: latency."""


@dataclass(frozen=True, slots=True)
class Round:
    """Both sides, measured side by side, and digests of what each of them did."""

    penstock: Figures
    other: Figures
    effects: tuple[str, str] | None = None

    @property
    def ratio(self) -> float:
        """Penstock's first figure by the other side's."""
        return next(iter(self.penstock.values())) / next(iter(self.other.values()))


@dataclass(frozen=True, slots=True)
class Result:
    """All rounds of one comparison."""

    claim: Claim
    rounds: Sequence[Round]

    @property
    def ratios(self) -> list[float]:
        """One per round."""
        return [each.ratio for each in self.rounds]

    @property
    def is_reached(self) -> bool:
        """Whether the median round keeps the claim."""
        ratio = median(self.ratios)
        return ratio <= self.claim.target if self.claim.is_ceiling else ratio >= self.claim.target

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured."""
        return {
            "name": self.claim.name,
            "title": self.claim.title,
            "ratio": median(self.ratios),
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "target": self.claim.target,
            "target_is_ceiling": self.claim.is_ceiling,
            "is_reached": self.is_reached,
            "rounds": [
                {
                    "penstock": dict(each.penstock),
                    "other": dict(each.other),
                    "ratio": each.ratio,
                    "effects": each.effects,
                }
                for each in self.rounds
            ],
        }


HEADINGS = ("name", "ratio", "min..max", "target", "reached", "Penstock", "per event")


def table(results: Sequence[Result]) -> str:
    """One line per comparison."""
    lines = [HEADINGS, *(_line(result) for result in results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _line(result: Result) -> tuple[str, ...]:
    claim, ratios = result.claim, result.ratios
    return (
        f"{claim.name}: {claim.title}",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f}..{max(ratios):.2f}",
        f"{'<=' if claim.is_ceiling else '>='} {claim.target:g}",
        "yes" if result.is_reached else "NO",
        _absolutes([each.penstock for each in result.rounds]),
        _absolutes([each.other for each in result.rounds]),
    )


def _absolutes(rounds: Sequence[Figures]) -> str:
    medians = {unit: median(figures[unit] for figures in rounds) for unit in rounds[0]}
    return ", ".join(
        f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
        for unit, value in medians.items()
    )
