"""PromQL over samples in memory: as much of it as the alert rules use, and as Prometheus means it.

The expressions are parsed and type-checked by `promql-parser`. What is evaluated follows
Prometheus: a sample counts for five minutes, a series that is missing from a scrape is stale at
once, `increase` extrapolates and knows resets. What is not written here raises `Unsupported`.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import pairwise

import promql_parser as grammar

NAME = "__name__"
LOOKBACK_SECONDS = 300.0
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)",?')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Point = tuple[float, float]

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "count": len,
}
OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "max_over_time": max,
    "min_over_time": min,
    "last_over_time": lambda values: values[-1],
    "present_over_time": lambda _values: 1.0,
    "count_over_time": len,
}


class Unsupported(Exception):
    """An expression needs more of PromQL than is written here."""


class Ambiguous(Exception):
    """Prometheus would refuse the result: two of its elements cannot be told apart."""


@cache
def parse_exposition(text: str) -> Vector:
    """The samples of a scrape in the text format. Raises ValueError, also for one said twice."""
    found: Vector = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError(f"not the text format: {line!r}")
        name, inside, value = match.groups()
        labels = frozenset({(NAME, name), *_parse_labels(inside or "", line)})
        if labels in found:
            raise ValueError(f"said twice: {line!r}")
        found[labels] = float(value)
    return found


def _parse_labels(inside: str, line: str) -> Iterator[tuple[str, str]]:
    end = 0
    while end < len(inside):
        match = LABEL.match(inside, end)
        if match is None:
            raise ValueError(f"not the text format: {line!r}")
        yield match[1], re.sub(r'\\[\\"n]', lambda escape: ESCAPES[escape[0]], match[2])
        end = match.end()


def without(labels: Labels, *names: str) -> Labels:
    return frozenset(label for label in labels if label[0] not in names)


def only(labels: Labels, *names: str) -> Labels:
    return frozenset(label for label in labels if label[0] in names)


@dataclass
class Series:
    """One series: samples in the order of time; None where it became stale."""

    times: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, at: float, value: float | None) -> None:
        self.times.append(at)
        self.values.append(value)

    def latest(self, at: float) -> float | None:
        """What it says at a moment; None: nothing."""
        place = bisect_right(self.times, at) - 1
        if place < 0 or self.times[place] <= at - LOOKBACK_SECONDS:
            return None
        return self.values[place]

    def window(self, after: float, until: float) -> list[Point]:
        """Its samples in a range that is open on the left."""
        places = range(bisect_right(self.times, after), bisect_right(self.times, until))
        points = ((self.times[place], self.values[place]) for place in places)
        return [(at, value) for at, value in points if value is not None]


class Store:
    """What a Prometheus would have of some targets, and what it would answer."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, Series]] = defaultdict(dict)
        self._last: dict[Labels, set[Labels]] = defaultdict(set)

    def scrape(self, at: float, text: str | None, **target: str) -> None:
        """Add what a target said at a moment; None: it did not answer."""
        identity = frozenset(target.items())
        said = {} if text is None else parse_exposition(text)
        # A label of the target wins, as without honor_labels.
        samples = {without(labels, *target) | identity: value for labels, value in said.items()}
        for gone in self._last[identity] - samples.keys():
            self._add(gone, at, None)
        self._last[identity] = set(samples)
        samples[identity | {(NAME, "up")}] = float(text is not None)
        for labels, value in samples.items():
            self._add(labels, at, value)

    def _add(self, labels: Labels, at: float, value: float | None) -> None:
        (name,) = (text for label, text in labels if label == NAME)
        self._series[name].setdefault(labels, Series()).add(at, value)

    def query(self, expression: str | grammar.Expr, at: float) -> Vector | float:
        """The answer at a moment."""
        parsed = grammar.parse(expression) if isinstance(expression, str) else expression
        return _Evaluation(self, at).value(parsed)

    def everything(self) -> Iterator[tuple[Labels, Series]]:
        """Every series, with its name among its labels."""
        for series in self._series.values():
            yield from series.items()

    def select(self, selector: grammar.VectorSelector) -> Iterator[tuple[Labels, Series]]:
        """The series that a selector means."""
        if selector.at is not None or selector.name is None or selector.matchers.or_matchers:
            raise Unsupported(str(selector))
        matchers = selector.matchers.matchers
        for labels, series in self._series.get(selector.name, {}).items():
            if not matchers or all(_matches(matcher, dict(labels)) for matcher in matchers):
                yield labels, series


def _matches(matcher: grammar.Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op == grammar.MatchOp.Equal:
        return value == matcher.value
    if matcher.op == grammar.MatchOp.NotEqual:
        return value != matcher.value
    is_match = re.fullmatch(matcher.value, value) is not None
    return is_match == bool(matcher.op == grammar.MatchOp.Re)


def _seconds(offset: timedelta | None) -> float:
    return 0.0 if offset is None else offset.total_seconds()


def _vector(elements: Iterable[tuple[Labels, float]]) -> Vector:
    found: Vector = {}
    for labels, value in elements:
        if labels in found:
            raise Ambiguous(f"two elements are {dict(labels)}")
        found[labels] = value
    return found


@dataclass(frozen=True)
class _Evaluation:
    store: Store
    at: float

    def value(self, node: grammar.Expr) -> Vector | float:
        match node:
            case grammar.ParenExpr():
                return self.value(node.expr)
            case grammar.NumberLiteral():
                return node.val
            case grammar.VectorSelector():
                at = self.at - _seconds(node.offset)
                read = ((labels, series.latest(at)) for labels, series in self.store.select(node))
                return {labels: value for labels, value in read if value is not None}
            case grammar.AggregateExpr():
                return self._aggregate(node)
            case grammar.Call():
                return self._call(node)
            case grammar.BinaryExpr():
                return self._binary(node)
        raise Unsupported(str(node))

    def vector(self, node: grammar.Expr) -> Vector:
        found = self.value(node)
        if isinstance(found, float):
            raise Unsupported(f"a number where a vector is needed: {node}")
        return found

    def _aggregate(self, node: grammar.AggregateExpr) -> Vector:
        if str(node.op) not in AGGREGATIONS:
            raise Unsupported(str(node))
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in self.vector(node.expr).items():
            groups[_group(labels, node.modifier)].append(value)
        combine = AGGREGATIONS[str(node.op)]
        return {labels: float(combine(values)) for labels, values in groups.items()}

    def _call(self, node: grammar.Call) -> Vector:
        name = node.func.name
        (argument, *more) = node.args
        if more:
            raise Unsupported(str(node))
        if name == "absent":
            return {} if self.vector(argument) else {_equalities(argument): 1.0}
        if not isinstance(argument, grammar.MatrixSelector):
            raise Unsupported(str(node))
        if name == "absent_over_time":
            is_there = any(points for _, points in self._windows(argument))
            return {} if is_there else {_equalities(argument.vector_selector): 1.0}
        if name in OVER_TIME:
            kept = (NAME,) if name != "last_over_time" else ()
            return _vector(
                (without(labels, *kept), float(OVER_TIME[name]([value for _, value in points])))
                for labels, points in self._windows(argument)
                if points
            )
        if name in ("increase", "rate", "delta"):
            return self._change(name, argument)
        raise Unsupported(str(node))

    def _windows(self, node: grammar.MatrixSelector) -> Iterator[tuple[Labels, list[Point]]]:
        until = self.at - _seconds(node.vector_selector.offset)
        after = until - node.range.total_seconds()
        for labels, series in self.store.select(node.vector_selector):
            yield labels, series.window(after, until)

    def _change(self, name: str, node: grammar.MatrixSelector) -> Vector:
        until = self.at - _seconds(node.vector_selector.offset)
        seconds = node.range.total_seconds()
        share = 1 / seconds if name == "rate" else 1.0
        return _vector(
            (
                without(labels, NAME),
                extrapolated(points, until - seconds, until, is_counter=name != "delta") * share,
            )
            for labels, points in self._windows(node)
            if len(points) > 1
        )

    def _binary(self, node: grammar.BinaryExpr) -> Vector | float:
        symbol = str(node.op)
        left, right = self.value(node.lhs), self.value(node.rhs)
        if isinstance(left, float) and isinstance(right, float):
            if symbol not in ARITHMETIC:
                raise Unsupported(str(node))
            return ARITHMETIC[symbol](left, right)
        if symbol in ("and", "or", "unless"):
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            return _combined(symbol, left, right, node.modifier)
        if isinstance(left, dict) and isinstance(right, dict):
            return _vector(_pairwise(symbol, left, right, node.modifier))
        if isinstance(left, float):
            raise Unsupported(f"write the number on the right: {node}")
        assert isinstance(right, float)
        other = right
        return _vector(
            element
            for labels, value in left.items()
            for element in _applied(symbol, labels, value, other, node.modifier)
        )


def _group(labels: Labels, modifier: grammar.AggModifier | None) -> Labels:
    if modifier is None:
        return frozenset()
    if modifier.type == grammar.AggModifierType.By:
        return only(labels, *modifier.labels)
    return without(labels, NAME, *modifier.labels)


def _equalities(node: grammar.Expr) -> Labels:
    """What `absent` can tell of a series that is not there."""
    if not isinstance(node, grammar.VectorSelector):
        return frozenset()
    matchers = node.matchers.matchers
    equal = [matcher for matcher in matchers if matcher.op == grammar.MatchOp.Equal]
    return frozenset((matcher.name, matcher.value) for matcher in equal if matcher.name != NAME)


def _signature(labels: Labels, modifier: grammar.BinModifier | None) -> Labels:
    matching = None if modifier is None else modifier.matching
    if matching is None:
        return without(labels, NAME)
    if matching.type == grammar.LabelModifierType.Include:
        return only(labels, *matching.labels)
    return without(labels, NAME, *matching.labels)


def _combined(
    symbol: str, left: Vector, right: Vector, modifier: grammar.BinModifier | None
) -> Vector:
    there = {_signature(labels, modifier) for labels in right}
    if symbol == "or":
        known = {_signature(labels, modifier) for labels in left}
        more = {
            labels: value
            for labels, value in right.items()
            if _signature(labels, modifier) not in known
        }
        return left | more
    wanted = symbol == "and"
    return {
        labels: value
        for labels, value in left.items()
        if (_signature(labels, modifier) in there) == wanted
    }


def _pairwise(
    symbol: str, left: Vector, right: Vector, modifier: grammar.BinModifier | None
) -> Iterator[tuple[Labels, float]]:
    if modifier is not None and modifier.card != grammar.VectorMatchCardinality.OneToOne:
        raise Unsupported("group_left and group_right")
    others = _vector((_signature(labels, modifier), value) for labels, value in right.items())
    met: set[Labels] = set()
    for labels, value in left.items():
        signature = _signature(labels, modifier)
        if signature not in others:
            continue
        if signature in met:
            raise Ambiguous(f"several elements meet {dict(signature)}")
        met.add(signature)
        # Filtering keeps the left side whole only where no `on` or `ignoring` thins it out.
        kept = labels if modifier is None or modifier.matching is None else signature
        yield from _applied(symbol, kept, value, others[signature], modifier)


def _applied(
    symbol: str,
    labels: Labels,
    value: float,
    other: float,
    modifier: grammar.BinModifier | None,
) -> Iterator[tuple[Labels, float]]:
    if symbol in ARITHMETIC:
        yield without(labels, NAME), ARITHMETIC[symbol](value, other)
    elif symbol not in COMPARISONS:
        raise Unsupported(symbol)
    elif modifier is not None and modifier.return_bool:
        yield without(labels, NAME), float(COMPARISONS[symbol](value, other))
    elif COMPARISONS[symbol](value, other):
        yield labels, value


def extrapolated(points: list[Point], after: float, until: float, *, is_counter: bool) -> float:
    """How much a series changed in a range, as Prometheus estimates it from its samples."""
    change = points[-1][1] - points[0][1]
    if is_counter:
        change += sum(before for (_, before), (_, now) in pairwise(points) if now < before)
    sampled = points[-1][0] - points[0][0]
    between = sampled / (len(points) - 1)
    to_start, to_end = points[0][0] - after, until - points[-1][0]
    threshold = between * 1.1
    to_start = between / 2 if to_start >= threshold else to_start
    if is_counter and change > 0 and points[0][1] >= 0:
        # A counter cannot have been below zero.
        to_start = min(to_start, sampled * points[0][1] / change)
    to_end = between / 2 if to_end >= threshold else to_end
    return change * (sampled + to_start + to_end) / sampled
