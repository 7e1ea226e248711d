"""What is known of all values that pass several schemas at once, kind by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Final

from penstock.core.schema.nodes import Node, node_text
from penstock.core.schema.values import accepts, counted_in, exact, is_named, length_of, matches

Parts = tuple[dict[str, Any], ...]
Together = tuple[Node, ...]
IsEmpty = Callable[[Together], bool]
Bound = tuple[Fraction, bool]
"""A limit, and whether it is itself excluded."""

CHOICES_MAX: Final = 64


def stated(parts: Parts, keyword: str) -> list[Any]:
    """What the parts say under a keyword."""
    return [part[keyword] for part in parts if keyword in part]


def distinct(nodes: Iterable[Node]) -> Together:
    """The schemas without repetitions and without those that take anything."""
    return tuple({node_text(node): node for node in nodes if node is not True}.values())


@dataclass(frozen=True, slots=True)
class NumberFacts:
    """The range of a number and what it is a multiple of."""

    low: Bound | None
    high: Bound | None
    step: Fraction | None
    is_whole: bool

    @classmethod
    def of(cls, parts: Parts, kind: str, values: tuple[Any, ...] | None) -> NumberFacts:
        """The facts of numbers of that kind; of the values alone, where they are listed."""
        is_whole = kind == "integer"
        if values:
            numbers = [exact(value) for value in values]
            return cls((min(numbers), False), (max(numbers), False), None, is_whole)
        lows = [(exact(limit), False) for limit in stated(parts, "minimum")]
        lows += [(exact(limit), True) for limit in stated(parts, "exclusiveMinimum")]
        highs = [(exact(limit), False) for limit in stated(parts, "maximum")]
        highs += [(exact(limit), True) for limit in stated(parts, "exclusiveMaximum")]
        steps = [exact(step) for step in stated(parts, "multipleOf")]
        return cls(
            low=max((_inside(low, is_whole, up=True) for low in lows), default=None),
            high=min(
                (_inside(high, is_whole, up=False) for high in highs),
                key=lambda high: (high[0], not high[1]),
                default=None,
            ),
            step=_common_multiple([*steps, Fraction(1)] if is_whole else steps),
            is_whole=is_whole,
        )

    @property
    def is_impossible(self) -> bool:
        """Whether no number is in the range."""
        if not self.is_whole and self.step is not None and self.step.denominator == 1:
            return True
        if self.low is None or self.high is None:
            return False
        (low, low_open), (high, high_open) = self.low, self.high
        return low > high or (low == high and (low_open or high_open))

    def integers(self, count_max: int) -> list[int] | None:
        """The whole numbers in the range, if they are few."""
        if self.low is None or self.high is None or self.high[0] - self.low[0] >= count_max:
            return None
        return list(range(int(self.low[0]), int(self.high[0]) + 1))


def _inside(bound: Bound, is_whole: bool, *, up: bool) -> Bound:
    """The bound; for whole numbers the outermost one that is allowed."""
    limit, is_open = bound
    if not is_whole:
        return bound
    if up:
        return Fraction(math.floor(limit) + 1 if is_open else math.ceil(limit)), False
    return Fraction(math.ceil(limit) - 1 if is_open else math.floor(limit)), False


def _common_multiple(steps: list[Fraction]) -> Fraction | None:
    if not steps:
        return None
    result = steps[0]
    for step in steps[1:]:
        numerator = math.lcm(result.numerator, step.numerator)
        result = Fraction(numerator, math.gcd(result.denominator, step.denominator))
    return result


BYTES_PER_CHARACTER_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class StringFacts:
    """The lengths a string can have, in characters unless the reader counts otherwise."""

    shortest: int
    longest: int | None

    @classmethod
    def of(cls, parts: Parts, values: tuple[Any, ...] | None, counted: str = "") -> StringFacts:
        """The facts of strings; of the values alone, where they are listed.

        `counted` is what the reader counts, see `counted_in`.
        """
        if values:
            lengths = [length_of(value, counted) for value in values]
            return cls(min(lengths), max(lengths))
        known = [_lengths(part, counted) for part in parts]
        return cls(
            max((low for low, _ in known), default=0),
            min((high for _, high in known if high is not None), default=None),
        )

    @property
    def is_impossible(self) -> bool:
        """Whether no length fits."""
        return self.longest is not None and self.shortest > self.longest


def _lengths(part: dict[str, Any], counted: str) -> tuple[int, int | None]:
    """The lengths that a part allows, as somebody else counts; the part may count otherwise."""
    low, high = part.get("minLength", 0), part.get("maxLength")
    match counted_in(part), counted:
        case own, other if own == other:
            return low, high
        case "binary", "":
            return -(-low // BYTES_PER_CHARACTER_MAX), high
        case "", "binary":
            return low, None if high is None else high * BYTES_PER_CHARACTER_MAX
    return 0, None


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """How many members an array can have, and of what."""

    parts: Parts
    fewest: int
    most: int | None
    prefix: int
    """From this place on, all members are alike."""

    @classmethod
    def of(cls, parts: Parts, is_empty: IsEmpty) -> ArrayFacts:
        """The facts of arrays."""
        prefix = max((len(items) for items in stated(parts, "prefixItems")), default=0)
        most: int | None = min(stated(parts, "maxItems"), default=None)
        # It ends before the first place that nothing fits.
        for place in range(prefix + 1):
            if most is not None and place >= most:
                break
            if is_empty(_member(parts, place)):
                most = place
        fewest = max(stated(parts, "minItems"), default=0)
        return cls(parts, fewest, most, prefix)

    @property
    def is_impossible(self) -> bool:
        """Whether no count fits."""
        return self.most is not None and self.fewest > self.most

    def member(self, place: int) -> Together:
        """What holds for the member at a place."""
        return _member(self.parts, place)


def _member(parts: Parts, place: int) -> Together:
    return distinct(_member_of(part, place) for part in parts)


def _member_of(part: dict[str, Any], place: int) -> Node:
    prefix = part.get("prefixItems", ())
    node: Node = prefix[place] if place < len(prefix) else part.get("items", True)
    return node


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """The fields an object can have."""

    parts: Parts
    definitions: Mapping[str, Node]
    required: frozenset[str]
    declared: frozenset[str]
    """The names that `properties` speak of."""
    names: frozenset[str] | None
    """All names there can be, where they can be listed."""

    @classmethod
    def of(cls, parts: Parts, definitions: Mapping[str, Node]) -> ObjectFacts:
        """The facts of objects."""
        listed = [names for part in parts if (names := _listed_names(part)) is not None]
        return cls(
            parts,
            definitions,
            frozenset(name for names in stated(parts, "required") for name in names),
            frozenset(name for names in stated(parts, "properties") for name in names),
            frozenset.intersection(*listed) if listed else None,
        )

    def value(self, name: str) -> Together:
        """What holds for the field of that name, if it is there."""
        if self.names is not None and name not in self.names:
            return (False,)
        rules = map(name_rule, stated(self.parts, "propertyNames"))
        if any(accepts(rule, name, self.definitions) is False for rule in rules):
            return (False,)
        return distinct(node for part in self.parts for node in _values_of(part, name))

    def fewest(self) -> int:
        """How many fields there are at least."""
        fewest: int = max([len(self.required), *stated(self.parts, "minProperties")])
        return fewest

    def most(self) -> int | None:
        """How many fields there are at most; None: there is no limit."""
        limits = stated(self.parts, "maxProperties")
        limits += [] if self.names is None else [len(self.names)]
        return min(limits, default=None)

    def is_impossible(self, is_empty: IsEmpty) -> bool:
        """Whether surely no object has these fields."""
        most = self.most()
        if most is not None and self.fewest() > most:
            return True
        return any(is_empty(self.value(name)) for name in self.required)

    def others_matching(self, pattern: str) -> Iterator[Together]:
        """What can hold for an undeclared field whose name matches the pattern."""
        for choice in product(*(_choices_of(part, pattern) for part in self.parts)):
            yield distinct(choice)

    def others_besides(self, patterns: Collection[str]) -> Iterator[Together]:
        """What can hold for an undeclared field whose name matches none of the patterns."""
        for choice in product(*(_choices_besides(part, patterns) for part in self.parts)):
            yield distinct(choice)

    def count_others(self) -> int:
        """How many choices there are at most for what holds for an undeclared field."""
        return math.prod(len(_choices_besides(part, ())) for part in self.parts)

    def name_rules(self) -> Iterator[Together]:
        """What can hold for the names of fields that are not declared."""
        rules = map(name_rule, stated(self.parts, "propertyNames"))
        closed = [
            part["patternProperties"]
            for part in self.parts
            if part.get("additionalProperties") is False and part.get("patternProperties")
        ]
        known = ({"type": "string"}, *rules)
        for choice in product(*closed):
            patterns = [{"pattern": pattern} for pattern in choice]
            yield distinct((*known, *patterns))


def name_rule(rule: Node) -> Node:
    """What `propertyNames` say of the texts that stand there: the keys of an IntEnum are digits."""
    if isinstance(rule, bool) or all(isinstance(name, str) for name in rule.get("enum", ())):
        return rule
    names = [name if isinstance(name, str) else node_text(name) for name in rule["enum"]]
    return {"enum": names}


def _listed_names(part: dict[str, Any]) -> frozenset[str] | None:
    """The names a part allows, if it lists them."""
    rule = name_rule(part.get("propertyNames", True))
    if isinstance(rule, dict) and "enum" in rule:
        return frozenset(rule["enum"])
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return frozenset(part.get("properties", ()))
    return frozenset() if rule is False else None


def _values_of(part: dict[str, Any], name: str) -> Iterator[Node]:
    if name in part.get("properties", ()):
        yield part["properties"][name]
    for pattern, node in part.get("patternProperties", {}).items():
        if matches(pattern, name):
            yield node
    if is_named(part, name) is False:
        yield part.get("additionalProperties", True)


def _choices_of(part: dict[str, Any], pattern: str) -> list[Node]:
    """The schemas of which one holds at least for an undeclared field that matches the pattern."""
    patterns = part.get("patternProperties", {})
    return [patterns[pattern]] if pattern in patterns else _choices_besides(part, ())


def _choices_besides(part: dict[str, Any], patterns: Collection[str]) -> list[Node]:
    own = part.get("patternProperties", {})
    choices = [node for pattern, node in own.items() if pattern not in patterns]
    return [*choices, part.get("additionalProperties", True)]
