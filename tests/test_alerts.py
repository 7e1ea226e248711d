"""The alert rules: each is sound, fires at its limit and not before, and has a page to turn to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as grammar
import pytest
from typer.main import get_command

from penstock.cli import application
from penstock.telemetry.metrics import INSTRUMENTS, Kind
from tests import promtool
from tests.alert_rules import FUNCTIONS, PLACEHOLDER, Rule, Watch, read_rules
from tests.alert_scenes import SCENES
from tests.promql import Ambiguous, Store, Unsupported, parse_exposition

OPERATIONS = Path(__file__).parent.parent / "docs" / "OPERATIONS.md"
RULES = {rule.name: rule for rule in read_rules()}
BY_PROMETHEUS_NAME = {instrument.prometheus_name: instrument for instrument in INSTRUMENTS}
OF_COUNTERS, OF_GAUGES = {"increase", "rate"}, {"delta", "min_over_time", "max_over_time"}
ALL_IS_WELL = {
    'events_pipeline_consumer_lag_ms{consumer="shop.bill",stream="orders"}': 0,
    'events_pipeline_consumer_lag_events_count{consumer="shop.bill",stream="orders"}': 0,
    'events_pipeline_consumer_is_paused{consumer="shop.bill",stream="orders"}': 0,
    'events_pipeline_consumer_held_keys{consumer="shop.bill",stream="orders"}': 0,
    'events_pipeline_consumer_dead_letters{consumer="shop.bill",stream="orders"}': 3,
    'events_pipeline_outbox_age_ms{stream="orders"}': 0,
    'events_pipeline_archive_lag_ms{stream="orders"}': 0,
    "events_pipeline_timers_late_ms": 0,
    "events_pipeline_timers_held": 0,
    "supervisor_worker_quarantined_total": 0,
    "supervisor_workers_quarantined": 0,
    "supervisor_workers_running": 3,
    "supervisor_workers_wanted": 3,
}
GAUGE = 'events_pipeline_consumer_{}{{consumer="shop.bill",stream="orders"}}'
LAG_MS, LAG_EVENTS = GAUGE.format("lag_ms"), GAUGE.format("lag_events_count")
LATE = {"PenstockConsumerLate"}
Targets = dict[str, Callable[[], str | None]]
Opener = Callable[[Targets], Watch]
Case = tuple[str, float | None, float, float, str]
"""A series, its value below and beyond the limit, the minutes to wait, and the alert."""


class Told:
    """A supervisor that says whatever it is told to say."""

    def __init__(self) -> None:
        self.values: dict[str, float | None] = {**ALL_IS_WELL}
        self.is_up = True

    def scrape(self) -> str | None:
        told = ((name, value) for name, value in self.values.items() if value is not None)
        text = "".join(f"{name} {value}\n" for name, value in told)
        return text if self.is_up else None


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watching() -> Iterator[Opener]:
    """Prometheus beside some targets; where the real one is installed, it has to agree."""
    watches: list[Watch] = []

    def open_watch(targets: Targets) -> Watch:
        watches.append(Watch(targets))
        return watches[-1]

    yield open_watch
    assert [each for watch in watches for each in promtool.objections(watch)] == []


@pytest.fixture
def watch(told: Told, watching: Opener) -> Watch:
    """Prometheus beside two supervisors that say the same, after a good while."""
    watch = watching({"a": told.scrape, "b": told.scrape})
    assert watch.pass_minutes(16) == set()
    return watch


# ── when they fire ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "case",
    [
        (LAG_MS, 60_000, 60_001, 5, "ConsumerLate"),
        (LAG_EVENTS, 10_000, 10_001, 5, "ConsumerBacklog"),
        (GAUGE.format("is_paused"), 0, 1, 60, "ConsumerPaused"),
        (GAUGE.format("held_keys"), 0, 1, 0, "KeysHeld"),
        (GAUGE.format("dead_letters"), 3, 4, 0, "DeadLettersRising"),
        (GAUGE.format("buried_total"), 0, 1, 0, "DeadLettersRising"),
        ('events_pipeline_outbox_age_ms{stream="orders"}', 60_000, 60_001, 1, "OutboxOld"),
        ('events_pipeline_hot_log_lost_total{stream="orders"}', 0, 1, 0, "HotLogRefilled"),
        ('events_pipeline_hot_log_lost_total{stream="orders"}', None, 1, 0, "HotLogRefilled"),
        ('events_pipeline_hot_log_refilled_total{stream="orders"}', 5, 9, 0, "HotLogRefilled"),
        ('events_pipeline_archive_lag_ms{stream="orders"}', 3.6e6, 3.7e6, 5, "ArchiveLate"),
        ("events_pipeline_timers_late_ms", 60_000, 60_001, 1, "TimersLate"),
        ("events_pipeline_timers_held", 0, 1, 0, "TimersHeld"),
        ("supervisor_worker_quarantined_total", 0, 1, 0, "CrashLoop"),
        ("supervisor_workers_running", 3, 2, 5, "WorkersMissing"),
    ],
)
def test_an_alert_fires_beyond_its_limit_and_when_its_time_is_up(
    watch: Watch, told: Told, case: Case
) -> None:
    name, below, above, minutes, alert = case
    told.values[name] = below
    assert watch.pass_minutes(minutes + 1) <= alert_of_birth(case)
    watch.pass_minutes(16 if alert_of_birth(case) else 0)
    told.values[name] = above
    assert watch.pass_minutes(minutes) == set()
    assert watch.step() == {f"Penstock{alert}"}
    told.values |= {name: below, LAG_EVENTS: 0}
    watch.pass_minutes(16)
    assert watch.firing == set()


def alert_of_birth(case: Case) -> set[str]:
    """A counter that is there all of a sudden has counted something before anybody looked."""
    return {f"Penstock{case[4]}"} if "refilled" in case[0] else set()


def test_a_very_late_consumer_is_paged_for_after_a_minute(watch: Watch, told: Told) -> None:
    told.values[LAG_MS] = 300_001
    assert watch.pass_minutes(1) == set()
    assert watch.step() == {"PenstockConsumerVeryLate"}
    assert watch.pass_minutes(5) == {"PenstockConsumerVeryLate", *LATE}
    told.values[LAG_MS] = 300_000
    assert watch.step() == LATE


def test_a_pause_is_no_lag_and_another_consumers_pause_excuses_nobody(
    watch: Watch, told: Told
) -> None:
    told.values[LAG_MS] = 600_000
    told.values[GAUGE.format("is_paused").replace("bill", "ship")] = 1
    assert watch.pass_minutes(10) == {"PenstockConsumerVeryLate", *LATE}
    told.values[GAUGE.format("is_paused")] = 1
    assert watch.step() == set()


def test_replays_may_be_late(watch: Watch, told: Told) -> None:
    for name in (LAG_MS, LAG_EVENTS):
        told.values[name.replace("shop.bill", "shop.bill@replay")] = 10**9
    assert watch.pass_minutes(30) == set()


def test_no_lag_at_all_is_paged_for_after_five_minutes(watch: Watch, told: Told) -> None:
    told.values = {name: told.values[name] for name in told.values if "events_pipeline" not in name}
    assert watch.pass_minutes(5) == set()
    assert watch.step() == {"PenstockLagUnknown"}


def test_one_supervisor_that_tells_no_lag_is_enough(watch: Watch, told: Told) -> None:
    silent = Told()
    silent.values = {"supervisor_workers_wanted": 1, "supervisor_workers_running": 1}
    silent.values["supervisor_workers_quarantined"] = 0
    watch.targets["c"] = silent.scrape
    assert watch.pass_minutes(6) == {"PenstockLagUnknown"}
    assert watch.alerts.said == {
        "PenstockLagUnknown": "Nobody knows how late a consumer is",
    }


def test_the_age_of_what_another_service_sends_need_not_be_known(watch: Watch, told: Told) -> None:
    told.values[LAG_EVENTS], told.values[LAG_MS] = 5, None
    assert watch.pass_minutes(9) == {"PenstockLagUnknown"}
    told.values['events_pipeline_outbox_age_ms{stream="orders"}'] = None
    assert watch.step() == set()


def test_who_handles_something_is_not_stuck(watch: Watch, told: Told) -> None:
    handled = GAUGE.format("handled_total")
    told.values[LAG_EVENTS] = 5
    for number in range(30):
        told.values[handled] = number
        assert watch.pass_minutes(1) == set()
    assert watch.pass_minutes(13) == set()
    assert watch.pass_minutes(3) == {"PenstockConsumerStuck"}


def test_a_quarantine_is_paged_for_once_and_warned_of_while_it_lasts(
    watch: Watch, told: Told
) -> None:
    told.values |= {
        "supervisor_worker_quarantined_total": 1,
        "supervisor_workers_quarantined": 1,
        "supervisor_workers_running": 2,
    }
    assert watch.step() == {"PenstockCrashLoop", "PenstockWorkersQuarantined"}
    watch.pass_minutes(6)
    assert watch.firing == {"PenstockWorkersQuarantined"}


def test_a_quarantine_before_the_first_scrape_is_noticed(told: Told, watching: Opener) -> None:
    told.values["supervisor_worker_quarantined_total"] = 1
    watch = watching({"a": told.scrape})
    assert watch.step() == {"PenstockCrashLoop"}
    watch.pass_minutes(6)
    assert watch.firing == set()


def test_a_supervisor_that_is_down_is_told_apart_from_none_at_all(
    told: Told, watching: Opener
) -> None:
    other = Told()
    watch = watching({"a": told.scrape, "b": other.scrape})
    watch.pass_minutes(5)
    told.is_up = False
    assert watch.pass_minutes(2) == set()
    assert watch.step() == {"PenstockSupervisorDown"}
    del watch.targets["a"]
    assert watch.pass_minutes(6) == {"PenstockSupervisorDown"}
    assert watch.firing == set(), "who is not scraped any more is not missed"
    other.is_up = False
    everything = {"PenstockSupervisorDown", "PenstockNoSupervisor", "PenstockLagUnknown"}
    assert watch.pass_minutes(6) == everything


def test_a_service_without_a_supervisor_is_missed_though_others_have_theirs(
    told: Told, watching: Opener
) -> None:
    watch = watching({"shop/a": told.scrape, "depot/a": Told().scrape})
    assert watch.pass_minutes(5) == set()
    told.is_up = False
    assert watch.pass_minutes(10) == {"PenstockSupervisorDown", "PenstockNoSupervisor"}


def test_somebody_elses_target_that_is_down_is_no_business_of_ours(watch: Watch) -> None:
    watch.targets["web"] = lambda: None
    assert watch.pass_minutes(30) == set()


# ── what they are made of ──────────────────────────────────────────────────────────────────────


def test_every_alert_fires_in_a_scene() -> None:
    assert set().union(*(scene.fires for scene in SCENES)) == set(RULES)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_asks_for_metrics_that_exist_in_a_way_that_fits_them(rule: Rule) -> None:
    for name, function in asked_for(grammar.parse(rule.expression)):
        if name == "up":
            continue
        is_counter = BY_PROMETHEUS_NAME[name].kind is Kind.COUNTER
        assert not (function in OF_COUNTERS and not is_counter), f"{function}({name})"
        assert not (function in OF_GAUGES and is_counter), f"{function}({name})"


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_says_how_bad_it_is_and_what_to_read(rule: Rule) -> None:
    assert rule.labels.keys() == {"severity"}
    assert rule.labels["severity"] in {"warning", "page"}
    assert rule.annotations.keys() == {"summary", "description", "runbook_url"}
    assert rule.annotations["runbook_url"] == f"docs/OPERATIONS.md#{rule.name.lower()}"
    for placeholder in PLACEHOLDER.findall("".join(rule.annotations.values())):
        words = re.findall(r"(?<![$.`])\b[a-z]\w*\b(?!`)", re.sub(r"`[^`]*`", "", placeholder))
        assert {word for word in words if word not in FUNCTIONS} <= {"labels", "value"}


def test_the_guide_has_a_section_for_each_alert_with_what_it_means_and_what_to_do() -> None:
    sections = dict(
        re.findall(r"^### (Penstock\w+)\n(.*?)(?=^##)", guide() + "\n##", re.MULTILINE | re.DOTALL)
    )
    assert list(sections) == list(RULES)
    for name, text in sections.items():
        assert [
            label for label in ("**Means**", "**Check**", "**Do**") if label not in text
        ] == [], name
        assert "`penstock " in text, f"{name}: which command shows it?"


def test_every_command_of_the_guide_exists_with_its_options() -> None:
    called = re.findall(r"`penstock ([^`]+)`", guide())
    called += re.findall(r"^ *penstock (.+)$", guide(), re.MULTILINE)
    assert len(called) > 20
    whole: Any = get_command(application)
    for line in called:
        command = whole
        words = line.replace("…", "").split()
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            command = command.get_command(None, words.pop(0))
            assert command is not None, f"penstock {line}"
        options = {option for each in command.params for option in each.opts + each.secondary_opts}
        assert {word for word in words if word.startswith("--")} <= options, f"penstock {line}"


def guide() -> str:
    return OPERATIONS.read_text()


def asked_for(expression: grammar.Expr) -> list[tuple[str, str | None]]:
    """The metrics of an expression, each with the function that is given its range, if any."""
    found: list[tuple[str, str | None]] = []

    def visit(node: grammar.Expr) -> None:
        if isinstance(node, grammar.VectorSelector):
            found.append((str(node.name), None))
        elif isinstance(node, grammar.Call):
            found.extend(
                (str(argument.vector_selector.name), node.func.name)
                for argument in node.args
                if isinstance(argument, grammar.MatrixSelector)
            )

    grammar.walk(expression, visit)
    return found


# ── the evaluator ──────────────────────────────────────────────────────────────────────────────


def test_increase_and_rate_are_what_prometheus_says_they_are() -> None:
    """The figures are those of Prometheus' own tests."""
    store = Store()
    foo = [10.0 * number for number in range(11)]
    bar = [18.0 * (number % 6) for number in range(11)]
    for number, (one, other) in enumerate(zip(foo, bar, strict=True)):
        store.scrape(300.0 * number, f'x{{p="foo"}} {one}\nx{{p="bar"}} {other}\n')
    by_path = {frozenset({("p", "foo")}): 100.0, frozenset({("p", "bar")}): 160.0}
    assert store.query("increase(x[50m])", 3000) == pytest.approx(by_path)
    rates = {labels: value / 3000 for labels, value in by_path.items()}
    assert store.query("rate(x[50m])", 3000) == pytest.approx(rates)
    assert store.query("increase(x[4m])", 3000) == {}


def test_what_is_gone_from_a_scrape_is_gone_at_once_and_silence_counts_five_minutes() -> None:
    store = Store()
    store.scrape(0, "a 1\nb 1\n", instance="i")
    store.scrape(30, "a 1\n", instance="i")
    assert store.query("b", 30) == {}
    assert store.query("absent(b)", 30) == {frozenset(): 1.0}
    assert store.query("a + a", 329) == {frozenset({("instance", "i")}): 2.0}
    assert store.query("a", 330) == {}
    assert store.query("a offset 5m", 600) == store.query("a", 300)


def test_sets_are_matched_by_the_labels_that_are_asked_for() -> None:
    store = Store()
    store.scrape(0, 'a{x="1",y="1"} 1\na{x="2",y="1"} 2\nb{x="1",y="2"} 3\n')
    one, two = (frozenset({("__name__", "a"), ("x", x), ("y", "1")}) for x in "12")
    assert store.query("a and on (x) b", 0) == {one: 1.0}
    assert store.query("a unless ignoring (y) b", 0) == {two: 2.0}
    assert store.query("a unless b", 0) == {one: 1.0, two: 2.0}
    assert store.query("sum by (y) (a)", 0) == {frozenset({("y", "1")}): 3.0}
    assert store.query("a * on (x) b", 0) == {frozenset({("x", "1")}): 3.0}
    with pytest.raises(Ambiguous):
        store.query("a * on (y) a", 0)


def test_what_it_does_not_know_is_refused() -> None:
    store = Store()
    store.scrape(0, "a 1\n")
    for expression in ("deriv(a[5m])", "topk(1, a)", "a[5m:1m]", "1 - a", "a @ 3"):
        with pytest.raises(Unsupported):
            store.query(expression, 0)
    with pytest.raises(ValueError, match="matrix"):
        store.query("increase(a)", 0)


@pytest.mark.parametrize("line", ["a", "a{b=c} 1", 'a{b="c} 1', "a b c", "1a 1", "a 1\na 2"])
def test_a_scrape_that_is_not_the_text_format_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"text format|twice|could not"):
        parse_exposition(line)


def test_labels_are_read_with_their_escapes() -> None:
    text = '# HELP a b\n# TYPE a gauge\na{x="\\"\\\\\\n,}",y=""} 1e3\n'
    labels = frozenset({("__name__", "a"), ("x", '"\\\n,}'), ("y", "")})
    assert parse_exposition(text) == {labels: 1000.0}
