"""The Grafana board: every query can be asked, every metric is shown, nothing names a server."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser as grammar
import pytest

from penstock.telemetry.metrics import INSTRUMENTS, Kind

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "deploy" / "grafana" / "penstock.json").read_text()
)
PANELS: list[dict[str, Any]] = BOARD["panels"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in BOARD["templating"]["list"]}
QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in PANELS
    for target in panel.get("targets", [])
]
ANYWHERE = {"job", "instance"}
"""Labels that Prometheus adds to whatever it scrapes."""
OF_PROMETHEUS = {"ALERTS": {"alertname", "alertstate"}}


def labels_by_series() -> dict[str, set[str]]:
    found = {name: {*labels} for name, labels in OF_PROMETHEUS.items()}
    for each in INSTRUMENTS:
        labels = {*each.labels, *ANYWHERE}
        if each.kind is Kind.HISTOGRAM:
            found[f"{each.prometheus_name}_bucket"] = labels | {"le"}
            found |= {f"{each.prometheus_name}_{end}": labels for end in ("sum", "count")}
        else:
            found[each.prometheus_name] = labels
    return found


SERIES = labels_by_series()


def asked(query: str) -> list[grammar.Expr]:
    """All parts of a query, as Grafana would send it."""
    sent = query.replace("$__rate_interval", "5m")
    used = set(re.findall(r"\$\{?(\w+)", sent))
    assert used <= VARIABLES.keys(), query
    parts: list[grammar.Expr] = []
    grammar.walk(grammar.parse(re.sub(r"\$\w+", ".*", sent)), parts.append)
    return parts


@pytest.mark.parametrize(("title", "query", "legend"), QUERIES)
def test_every_query_asks_for_series_and_labels_that_exist(
    title: str, query: str, legend: str
) -> None:
    parts = asked(query)
    selectors = [part for part in parts if isinstance(part, grammar.VectorSelector)]
    selectors += [
        part.vector_selector for part in parts if isinstance(part, grammar.MatrixSelector)
    ]
    assert selectors, title
    for selector in selectors:
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= SERIES[str(selector.name)], query
    known = set.intersection(*(SERIES[str(selector.name)] for selector in selectors))
    for part in parts:
        if isinstance(part, grammar.AggregateExpr) and part.modifier is not None:
            assert {*part.modifier.labels} <= known, query
    left = {label for part in parts for label in kept_by(part)}
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= left, legend


def kept_by(part: grammar.Expr) -> list[str]:
    if isinstance(part, grammar.AggregateExpr) and part.modifier is not None:
        return part.modifier.labels
    return []


def test_every_metric_is_on_the_board() -> None:
    text = " ".join(query for _, query, _ in QUERIES)
    missing = [each.name for each in INSTRUMENTS if each.prometheus_name not in text]
    assert missing == []


def test_the_data_source_is_whichever_somebody_chooses() -> None:
    uids = re.findall(r'"uid": "([^"]*)"', json.dumps(BOARD))
    assert set(uids) == {"${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert all("datasource" in target for target in panel["targets"]), panel["title"]


def test_variables_are_filled_from_series_that_exist() -> None:
    for name in ("job", "stream", "consumer"):
        query = VARIABLES[name]["query"]["query"]
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match is not None, query
        (selector,) = asked(match[1])
        assert isinstance(selector, grammar.VectorSelector)
        assert {match[2], *(m.name for m in selector.matchers.matchers)} <= SERIES[
            str(selector.name)
        ]


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations(PANELS, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["type"] == "row" or panel["description"], panel["title"]


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )
