"""W3C trace context: which trace an event belongs to, as its metadata carries it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACESTATE_LENGTH_MAX: Final = 512
TRACESTATE_MEMBERS_MAX: Final = 32

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SIMPLE_KEY = r"[a-z][_0-9a-z\-*/]{0,255}"
_TENANT_KEY = r"[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(rf"({_SIMPLE_KEY}|{_TENANT_KEY})=({_VALUE})")
_VERSION_FORBIDDEN = "ff"
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace, seen from elsewhere: whatever is caused by it names it as its parent."""

    trace_id: str
    """32 hexadecimal digits, not all of them zero."""
    span_id: str
    """16 hexadecimal digits, not all of them zero."""
    flags: int = 0
    state: str = ""
    """What vendors pass along, as the header `tracestate` has it."""

    @property
    def is_sampled(self) -> bool:
        """Whether whoever began the trace records it."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """As the header `traceparent` has it."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def as_metadata(self) -> dict[str, str]:
        """What an event carries of it."""
        carried = {TRACEPARENT: self.traceparent}
        return carried | ({TRACESTATE: self.state} if self.state else {})


def parse(traceparent: object, tracestate: object = None) -> TraceContext | None:
    """The context that two headers describe; None where the first is not valid.

    An invalid tracestate is left out, as the recommendation asks.
    """
    if not isinstance(traceparent, str) or not (found := _PARENT.fullmatch(traceparent)):
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # A later version may have more fields; this one has four.
    if version == _VERSION_FORBIDDEN or (version == "00" and more is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16), _valid_state(tracestate))


def from_metadata(metadata: Mapping[str, Any], *, with_state: bool = True) -> TraceContext | None:
    """The context that an event's metadata carries, if it carries a valid one."""
    return parse(metadata.get(TRACEPARENT), metadata.get(TRACESTATE) if with_state else None)


def _valid_state(tracestate: object) -> str:
    if not isinstance(tracestate, str) or len(tracestate) > TRACESTATE_LENGTH_MAX:
        return ""
    members = [part.strip(" \t") for part in tracestate.split(",")]
    members = [member for member in members if member]
    found = [_MEMBER.fullmatch(member) for member in members]
    if len(members) > TRACESTATE_MEMBERS_MAX or not all(found):
        return ""
    keys = [each[1] for each in found if each]
    return ",".join(members) if len(set(keys)) == len(keys) else ""
