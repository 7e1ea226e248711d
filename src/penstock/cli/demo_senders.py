"""The demo's senders: real transactions that write business rows and send events, some in vain."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from penstock import OutcomeUnknown, Pipeline
from penstock.cli.demo_app import STREAM, Customer, Order, OrderPlaced

CUSTOMERS = 200
THREADS = 3
SIZES = (1, 2, 3, 5, 8, 13, 21, 34)
REFUSED_SHARE = 0.05
IN_FLIGHT_MAX = 5_000
"""Senders wait while more events than this are unhandled, as any sane producer would."""
PAUSE_SECONDS = 0.02


@dataclass(slots=True)
class Journal:
    """What the senders know of their events."""

    acknowledged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    first_at: float = 0.0


class Senders:
    """Sends a number of events from several threads, at a pace, until done or stopped."""

    def __init__(
        self, pipeline: Pipeline, events: int, rate: float, seed: int, stop: threading.Event
    ) -> None:
        self.journal = Journal()
        self.handled: Callable[[], int] = lambda: 0
        self._pipeline = pipeline
        self._events = events
        self._rate = rate
        self._stop = stop
        self._begun = 0
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(seed + number,), name=f"sender-{number}")
            for number in range(THREADS)
        ]

    @property
    def sent(self) -> int:
        """How many events are committed."""
        return len(self.journal.acknowledged)

    def start(self) -> None:
        """Create the customers and begin."""
        with Session(self._pipeline.engine) as session, session.begin():
            names = [{"name": _customer(number), "orders": 0} for number in range(CUSTOMERS)]
            session.execute(insert(Customer), names)
        self.journal.first_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait for the threads; an error of one of them comes out here."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self._errors:
            raise self._errors[0]

    @property
    def failed(self) -> bool:
        """Whether a sender gave up."""
        return bool(self._errors)

    def _guarded(self, seed: int) -> None:
        try:
            self._send_all(random.Random(seed))  # noqa: S311 - a workload, not a secret
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            self._errors.append(error)
            self._stop.set()

    def _send_all(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            with self._lock:
                size = min(chance.choice(SIZES), self._events - self._begun)
                if size == 0:
                    return
                is_refused = chance.random() < REFUSED_SHARE
                self._begun += 0 if is_refused else size
                due_at = self.journal.first_at + self._begun / self._rate
            self._stop.wait(max(0.0, due_at - time.monotonic()))
            while self.sent - self.handled() > IN_FLIGHT_MAX and not self._stop.is_set():
                self._stop.wait(PAUSE_SECONDS)
            self._transact(chance, size, is_refused=is_refused)

    def _transact(self, chance: random.Random, size: int, *, is_refused: bool) -> None:
        uuids: set[str] = set()
        try:
            with Session(self._pipeline.engine) as session:
                uuids = self._place_orders(session, chance, size)
                if is_refused:
                    session.rollback()
                    self.journal.refused |= uuids
                    return
                session.commit()
        except OutcomeUnknown:
            self.journal.unknown |= uuids
        else:
            self.journal.acknowledged |= uuids

    def _place_orders(self, session: Session, chance: random.Random, size: int) -> set[str]:
        """Orders of one customer or two, with their business rows and their events."""
        # Sorted, so that two senders never wait for each other in a circle.
        names = sorted(_customer(number) for number in chance.sample(range(CUSTOMERS), 2))
        share = chance.randint(0, size)
        orders = [
            order
            for name, count in zip(names, (share, size - share), strict=True)
            if count
            for order in self._count_up(session, chance, name, count)
        ]
        sent = self._pipeline.send_many(session, STREAM, orders)
        session.connection().execute(
            insert(Order),
            [
                {"event_uuid": u, **order.model_dump()}
                for u, order in zip(sent, orders, strict=True)
            ],
        )
        return set(map(str, sent))

    def _count_up(
        self, session: Session, chance: random.Random, name: str, count: int
    ) -> list[OrderPlaced]:
        """Take the customer's next numbers, under its row lock, which is held to the commit."""
        last = session.execute(
            update(Customer)
            .where(Customer.name == name)
            .values(orders=Customer.orders + count)
            .returning(Customer.orders)
        ).scalar_one()
        return [
            OrderPlaced(customer=name, number=number, cents=chance.randint(100, 99_999))
            for number in range(last - count + 1, last + 1)
        ]


def _customer(number: int) -> str:
    return f"customer-{number:03}"
