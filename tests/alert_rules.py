"""The alert rules as Prometheus reads them: their state over time, and what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as grammar
import yaml

from tests.promql import NAME, Ambiguous, Labels, Store, without

RULES = Path(__file__).parent.parent / "deploy" / "prometheus" / "penstock.rules.yml"
STEP_SECONDS = 60.0
"""Between two scrapes, and between two evaluations, in the time that Prometheus is told."""
PLACEHOLDER = re.compile(r"\{\{\s*(.*?)\s*\}\}")
LABEL = re.compile(r"\$labels\.(\w+)")
FUNCTIONS = {"humanize", "humanizeDuration", "or"}
"""Those of Prometheus' templates that are used here."""


@dataclass(frozen=True)
class Rule:
    """One alert."""

    name: str
    expression: str
    for_seconds: float
    labels: dict[str, str]
    annotations: dict[str, str]

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Rule:
        unknown = document.keys() - {"alert", "expr", "for", "labels", "annotations"}
        assert not unknown, f"Prometheus knows no {unknown} in a rule"
        waits = document.get("for")
        return cls(
            name=document["alert"],
            expression=document["expr"],
            for_seconds=grammar.parse_duration(waits).total_seconds() if waits else 0.0,
            labels=document["labels"],
            annotations=document["annotations"],
        )

    def said(self, annotation: str, labels: Labels, value: float) -> str:
        """An annotation as a person reads it; refuses what Prometheus would leave empty."""
        known = dict(labels)

        def fill(match: re.Match[str]) -> str:
            first, *rest = re.findall(r"[$\w.]+|`[^`]*`", match[1])
            if first == "or":
                label = known.get(rest[0].removeprefix("$labels."))
                return label or rest[1].strip("`")
            assert set(rest) <= FUNCTIONS, f"{self.name}: {match[0]}"
            return f"{value:g}" if first == "$value" else known[first.removeprefix("$labels.")]

        return PLACEHOLDER.sub(fill, self.annotations[annotation])


def read_rules(path: Path = RULES) -> list[Rule]:
    """Every alert of a file."""
    document = yaml.safe_load(path.read_text())
    assert document.keys() == {"groups"}
    for group in document["groups"]:
        assert group.keys() <= {"name", "interval", "rules"}, group["name"]
    return [Rule.parse(rule) for group in document["groups"] for rule in group["rules"]]


class Alerts:
    """What Prometheus would do with some rules: pending, firing, resolved."""

    def __init__(self, store: Store, rules: list[Rule]) -> None:
        self.store = store
        self._rules = [(rule, grammar.parse(rule.expression)) for rule in rules]
        self._since: dict[tuple[str, Labels], float] = {}
        self.said: dict[str, str] = {}
        """The summary of each that has fired, as it was the last time."""

    def evaluate(self, at: float) -> set[str]:
        """The names of those that fire at a moment; to be asked in the order of time."""
        firing: set[str] = set()
        active: dict[tuple[str, Labels], float] = {}
        for rule, expression in self._rules:
            found = self.store.query(expression, at)
            assert isinstance(found, dict), rule.name
            alerts = {without(labels, NAME): value for labels, value in found.items()}
            if len(alerts) < len(found):
                raise Ambiguous(f"{rule.name}: two alerts have the same labels")
            for labels, value in alerts.items():
                since = self._since.get((rule.name, labels), at)
                active[rule.name, labels] = since
                if at - since >= rule.for_seconds:
                    firing.add(rule.name)
                    self.said[rule.name] = rule.said("summary", labels, value)
                    rule.said("description", labels, value)
        self._since = active
        return firing


class Watch:
    """Prometheus beside some targets, in a time that passes faster than theirs.

    A target is what it says when it is asked; None: it does not answer. Its name is its host, or
    job/host.
    """

    def __init__(
        self, targets: dict[str, Callable[[], str | None]], rules: list[Rule] | None = None
    ) -> None:
        self.targets = targets
        self.store = Store()
        self.alerts = Alerts(self.store, read_rules() if rules is None else rules)
        self.began_at = self.now = 1_000_000.0
        self.firing: set[str] = set()
        self.history: list[set[str]] = []
        """What fired at each step."""

    def step(self) -> set[str]:
        """Scrape every target and evaluate every rule, once; returns what fires."""
        self.now += STEP_SECONDS
        for instance, scrape in self.targets.items():
            job, _, host = instance.rpartition("/")
            self.store.scrape(self.now, scrape(), job=job or "penstock", instance=host)
        self.firing = self.alerts.evaluate(self.now)
        self.history.append(self.firing)
        return self.firing

    def pass_minutes(self, minutes: float) -> set[str]:
        """Let time pass; returns everything that has fired in it."""
        fired: set[str] = set()
        for _ in range(round(minutes * 60 / STEP_SECONDS)):
            fired |= self.step()
        return fired
