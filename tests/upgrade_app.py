"""One application in two versions of its code; the environment says which one this process runs.

`python -m tests.upgrade_app FIRST COUNT` sends so many events, one per commit.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg

from penstock import Event, Pipeline

VERSION = "UPGRADE_APP_VERSION"
TABLES = "CREATE TABLE bill (number integer PRIMARY KEY, cents integer, customer text, seq serial)"
CUSTOMERS = 7

pipeline = Pipeline("shop")


def cents_of(number: int) -> int:
    """What the nth order costs, in either version of the code."""
    return number * 101 % 9973


if os.environ.get(VERSION) == "1":

    class Ordered(Event, type="upgrade.ordered", version=1, key="customer"):
        """As it was: money as text."""

        number: int
        customer: str
        price: str

    def make(number: int) -> Ordered:
        """The nth order."""
        price = f"{cents_of(number) // 100}.{cents_of(number) % 100:02}"
        return Ordered(number=number, customer=f"c{number % CUSTOMERS}", price=price)

    def cents_in(event: Ordered) -> int:
        """What the order costs."""
        euros, cents = event.price.split(".")
        return int(euros) * 100 + int(cents)

else:

    class Ordered(Event, type="upgrade.ordered", version=2, key="customer"):  # type: ignore[no-redef]
        """As it is: money in cents."""

        number: int
        customer: str
        cents: int

    @Ordered.upcast(from_version=1)
    def in_cents(old: dict[str, Any]) -> dict[str, Any]:
        """From text to cents."""
        euros, cents = old.pop("price").split(".")
        return {**old, "cents": int(euros) * 100 + int(cents)}

    def make(number: int) -> Ordered:
        """The nth order."""
        customer, cents = f"c{number % CUSTOMERS}", cents_of(number)
        return Ordered(number=number, customer=customer, cents=cents)  # type: ignore[call-arg]

    def cents_in(event: Ordered) -> int:
        """What the order costs."""
        return event.cents  # type: ignore[attr-defined, no-any-return]


@pipeline.consumer("orders", name="bill", lanes=2)
def bill(event: Ordered, cursor: psycopg.Cursor[Any]) -> None:
    """One row for each order."""
    cursor.execute(
        "INSERT INTO bill (number, cents, customer) VALUES (%s, %s, %s)",
        (event.number, cents_in(event), event.customer),
    )


def main() -> None:
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        pipeline.send_now("orders", make(number))


if __name__ == "__main__":
    main()
