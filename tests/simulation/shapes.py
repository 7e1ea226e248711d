"""What kind of line a history is about: its guarantee, its order, its lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from penstock.core.options import ConsumerOptions, Guarantee, OnExhausted, Order
from penstock.core.retry import Retry
from tests.simulation.database import Database

RETRY = Retry.fixed(seconds=0.2, attempts_max=3)
# Most rules are about the strictest kind of line.
PLAIN_SHARE = 0.6
OTHERS: tuple[tuple[Guarantee, Order], ...] = (
    (Guarantee.EXACTLY_ONCE, "stream"),
    (Guarantee.EXACTLY_ONCE, "none"),
    (Guarantee.AT_LEAST_ONCE, "key"),
    (Guarantee.AT_LEAST_ONCE, "key"),
    (Guarantee.AT_LEAST_ONCE, "stream"),
    (Guarantee.AT_LEAST_ONCE, "none"),
    (Guarantee.AT_MOST_ONCE, "key"),
    (Guarantee.AT_MOST_ONCE, "key"),
)
QUIET_SHARE = 0.08
HOLD_SHARE = 0.1
# Those who keep somebody for it let him decide.
OPERATOR_SHARE, OPERATOR_SHARE_AT_LEAST = 0.25, 0.6
HOLD_SHARE_OPERATED = 0.6
LANES_MAX = 3


class Shape(NamedTuple):
    """How a consumer is deployed."""

    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    order: Order = "key"
    on_exhausted: OnExhausted = "bury"
    batch_size: int = 3
    lanes: int = 1
    has_operator: bool = False
    is_quiet: bool = False
    """Whether it has handled something and rests when the history begins, so that it may begin
    early with what is sent then."""

    @property
    def lanes_max(self) -> int:
        """What a later deploy may choose."""
        return 1 if self.order == "stream" else LANES_MAX


def draw(dice: Callable[[], float]) -> Shape:
    """The shape of one history."""
    if dice() < QUIET_SHARE:
        return Shape(batch_size=2 + int(dice() * 3), is_quiet=True)
    batch_size, lanes = 1 + int(dice() * 4), 1 + int(dice() * 2)
    guarantee, order = Shape().guarantee, Shape().order
    if dice() > PLAIN_SHARE:
        guarantee, order = OTHERS[int(dice() * len(OTHERS))]
    is_tried_once = guarantee is Guarantee.AT_MOST_ONCE
    is_called_first = guarantee is Guarantee.AT_LEAST_ONCE
    share = OPERATOR_SHARE_AT_LEAST if is_called_first else OPERATOR_SHARE
    has_operator = dice() < share and not is_tried_once
    is_held = dice() < (HOLD_SHARE_OPERATED if has_operator else HOLD_SHARE)
    return Shape(
        guarantee,
        order,
        "hold" if is_held and not is_tried_once else "bury",
        batch_size,
        1 if order == "stream" else lanes,
        has_operator,
    )


@cache
def options_of(shape: Shape) -> ConsumerOptions:
    """The same as its registration says it."""
    is_tried_once = shape.guarantee is Guarantee.AT_MOST_ONCE
    return ConsumerOptions(
        stream_name=Database.stream_name,
        name="bill",
        guarantee=shape.guarantee,
        order=shape.order,
        allow_reordering=shape.order == "none",
        lanes=shape.lanes,
        batch_size=shape.batch_size,
        retry=Retry.none() if is_tried_once else RETRY,
        on_exhausted=shape.on_exhausted,
    )
