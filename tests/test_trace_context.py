"""W3C trace context: what is valid is understood, and nothing else is."""

from __future__ import annotations

import pytest

from penstock.core.trace_context import TraceContext, from_metadata, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_header_comes_back_as_it_was() -> None:
    context = parse(VALID, "rojo=00f067aa0ba902b7,tenant@system=t61")
    assert context == TraceContext(TRACE, SPAN, 1, "rojo=00f067aa0ba902b7,tenant@system=t61")
    assert context.is_sampled
    assert context.as_metadata() == {"traceparent": VALID, "tracestate": context.state}
    assert from_metadata(context.as_metadata()) == context
    assert from_metadata(context.as_metadata(), with_state=False) == TraceContext(TRACE, SPAN, 1)


def test_a_trace_that_nobody_records_is_carried_on_all_the_same() -> None:
    context = parse(f"00-{TRACE}-{SPAN}-00")
    assert context is not None
    assert not context.is_sampled
    assert context.as_metadata() == {"traceparent": f"00-{TRACE}-{SPAN}-00"}


def test_a_later_version_may_say_more() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-what-ever") == TraceContext(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "header",
    [
        None,
        7,
        "",
        "00-1-2-01",
        VALID.upper(),
        f"{VALID}\n",
        f" {VALID}",
        f"{VALID}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-zz",
    ],
)
def test_anything_else_is_no_context(header: object) -> None:
    assert parse(header) is None


@pytest.mark.parametrize(
    "state",
    [
        7,
        "no equals sign",
        "UPPER=1",
        "a=1,a=2",
        "a=b=c",
        "a=\x00",
        ",".join(f"k{n}=1" for n in range(33)),
        "a=" + "x" * 600,
    ],
)
def test_a_state_that_is_not_valid_is_left_out(state: object) -> None:
    assert parse(VALID, state) == TraceContext(TRACE, SPAN, 1)


def test_empty_members_of_a_state_do_not_count() -> None:
    context = parse(VALID, " a=1 , ,b=2\t")
    assert context is not None
    assert context.state == "a=1,b=2"
