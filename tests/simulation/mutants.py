"""Bugs on purpose: each takes one rule away, and the simulation has to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from penstock.core.mac import MacKeys
from penstock.core.wire import Entry
from penstock.errors import MalformedEntry
from penstock.pipeline import workplace
from penstock.pipeline.judgement import Judgement
from penstock.pipeline.lane import Lane
from penstock.pipeline.looser import AtLeastOnce
from penstock.pipeline.parking import Parking
from penstock.pipeline.reader import Stretch, TierReader
from penstock.pipeline.window import StreamWindow
from penstock.stores.queries import Queries
from tests.simulation import inbox_statements, lease_statements, log_statements, parked_statements
from tests.simulation.database import STATEMENTS, Database, Parameters, Rows, Transaction
from tests.simulation.inbox_statements import array, mark, numbers
from tests.simulation.rows import DeadRow, LeaseRow, OutboxRow

Mutant = Callable[[], AbstractContextManager[Any]]


def _instead(file_name: str, name: str, statement: Any) -> AbstractContextManager[Any]:
    return patch.dict(STATEMENTS, {Queries(file_name)[name]: statement})


def fence_that_lets_everybody_pass() -> AbstractContextManager[Any]:
    """Nobody compares owner, term and checkpoint."""

    def fence(transaction: Transaction, parameters: Parameters) -> Rows:
        database, role = transaction.database, parameters["role"]
        row = database.leases.get(role)
        if row is not None:
            checkpoint = parameters["new_checkpoint"]
            lease_statements.set_checkpoint(database, role, row, checkpoint)
        return []

    return _instead("consumer.sql", "fence", fence)


def claim_without_deduplication() -> AbstractContextManager[Any]:
    """Everything that is read counts as new."""

    def claim(transaction: Transaction, parameters: Parameters) -> Rows:
        mark(transaction, parameters)
        positions = numbers(parameters["positions"])
        outcomes = array(parameters["outcomes"])
        for event_uuid, position, outcome in zip(
            array(parameters["event_uuids"]), positions, outcomes, strict=True
        ):
            transaction.write(transaction.database.processed, event_uuid, (position, outcome))
        fresh = [p for p, outcome in zip(positions, outcomes, strict=True) if outcome != "parked"]
        transaction.seal = (parameters["seal_id"], len(fresh))
        return [(fresh, [p for p in positions if p not in fresh])]

    return _instead("consumer.sql", "claim_batch", claim)


def effects_in_a_transaction_of_their_own() -> AbstractContextManager[Any]:
    """What the handler writes is there before the books are."""

    def write(transaction: Transaction, effect: Any) -> None:
        apart = Transaction(transaction.database)
        apart.effects.append(effect)
        apart.commit()

    return patch.object(inbox_statements, "write_effect", write)


def dead_letter_in_a_second_transaction() -> AbstractContextManager[Any]:
    """The letter is written a little later, unless the process dies."""

    def bury(transaction: Transaction, parameters: Parameters) -> Rows:
        database = transaction.database
        machine = database.machine

        def later() -> None:
            machine.sleep(0.05)
            row = DeadRow(parameters["position"], parameters["reason"])
            database.dead[parameters["event_uuid"]] = row

        assert machine.current is not None
        machine.start(machine.current.process, "bury", later)
        return []

    return _instead("parked.sql", "bury", bury)


def numbering_without_a_lock() -> AbstractContextManager[Any]:
    """The head is read in one moment and moved in another."""

    def number(transaction: Transaction, parameters: Parameters) -> Rows:
        database = transaction.database
        log_statements.require_publisher(database, parameters)
        head = database.head
        database.machine.sleep(database.machine.dice())
        return log_statements.assign(database, head, parameters)

    return _instead("outbox.sql", "number", number)


def numbering_behind_a_watermark() -> AbstractContextManager[Any]:
    """Rows whose ids are smaller than the last one's count as numbered."""

    def unnumbered(database: Database) -> list[OutboxRow]:
        last = max((row.id for row in database.by_position.values()), default=0)
        return [database.outbox[row_id] for row_id in sorted(database.outbox) if row_id > last]

    return patch.object(Database, "unnumbered", unnumbered)


@contextmanager
def successors_that_overtake() -> Iterator[None]:
    """Live events do not wait behind parked ones of their key."""
    claim = inbox_statements.claim_batch
    with (
        _instead("consumer.sql", "claim_among_parked", claim),
        patch.object(Parking, "waiting", lambda *_: frozenset()),
    ):
        yield


def reader_without_a_gap_check() -> AbstractContextManager[Any]:
    """Whatever comes next on the hot log is taken for the next position."""

    def decode(self: Any, after: int, raw: Any) -> tuple[Stretch, MalformedEntry]:
        entries = []
        problem = MalformedEntry("the end")
        try:
            entries += [r for _, r in self._verified(raw) if isinstance(r, Entry)]
        except MalformedEntry as error:
            problem = error
        return Stretch(entries, entries[-1].position if entries else after), problem

    return patch.object(TierReader, "_decode_hot", decode)


def lane_that_never_rests() -> AbstractContextManager[Any]:
    """Behind the others it asks again and again for what a log has lost."""
    return patch.object(StreamWindow, "is_polling", lambda self, _: self._ahead.is_polling)


def reader_without_signatures() -> AbstractContextManager[Any]:
    """Anybody who can write to Redis is believed."""
    return patch.object(MacKeys, "is_signed", lambda *_, **__: True)


def epoch_that_starts_at_the_highest_checkpoint() -> AbstractContextManager[Any]:
    """A new lane count forgets what the slower lanes have not handled."""
    begin_epoch = lease_statements.begin_epoch

    def begin(database: Database, lanes: int) -> None:
        highest = max((row.checkpoint for _, row in database.consumer_leases()), default=0)
        begin_epoch(database, lanes)
        for role, row in list(database.consumer_leases()):
            database.leases[role] = LeaseRow(**{**row._asdict(), "checkpoint": highest})

    return patch.object(lease_statements, "begin_epoch", begin)


def parked_key_that_is_not_passed_on() -> AbstractContextManager[Any]:
    """Whoever leaves a parked key does not say that the next is due."""
    return patch.object(parked_statements, "_promote", lambda *_: None)


def parked_event_that_is_not_taken_away() -> AbstractContextManager[Any]:
    """A parked event that was handled stays where it is."""

    def settle(_: Transaction, __: Parameters) -> Rows:
        return [(None,)]

    return _instead("parked.sql", "settle", settle)


def stream_that_goes_on_behind_a_failing_event() -> AbstractContextManager[Any]:
    """What is parked blocks its key at most."""
    return patch.object(Parking, "blocks_stream", False)


def stream_that_waits_without_rest() -> AbstractContextManager[Any]:
    """It looks at the clock until its failed event is due."""
    wait = Lane.wait

    def impatient(self: Any, stop: Any) -> None:
        if not self._parking.blocks_stream:
            wait(self, stop)

    return patch.object(Lane, "wait", impatient)


def early_event_that_is_anywhere() -> AbstractContextManager[Any]:
    """What was guessed is committed."""
    return _instead("early.sql", "require_numbered", lambda *_: [])


def survey_that_asks_nobody() -> AbstractContextManager[Any]:
    """A handler that is called first is called for whatever was read."""
    return _instead(
        "consumer.sql", "survey", lambda _, parameters: [(numbers(parameters["positions"]),)]
    )


def handler_that_is_called_before_its_only_attempt_is_written_down() -> AbstractContextManager[Any]:
    """At most once as if it were at least once."""

    def at_least_once(consumer: str, *, on_failure: Any, **more: Any) -> AtLeastOnce:
        del on_failure
        return AtLeastOnce(consumer, **more)

    return patch.object(workplace, "AtMostOnce", at_least_once)


def failure_of_an_only_attempt_that_is_kept_quiet() -> AbstractContextManager[Any]:
    """Nobody writes its dead letter."""
    return patch.object(Judgement, "after_the_fact", lambda *_: None)


def operator_who_passes_nothing_on() -> AbstractContextManager[Any]:
    """What waits behind an event that was taken away is not told."""
    return _instead("redrive.sql", "promote_after", lambda *_: [])


MUTANTS: dict[str, Mutant] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        fence_that_lets_everybody_pass,
        claim_without_deduplication,
        effects_in_a_transaction_of_their_own,
        dead_letter_in_a_second_transaction,
        numbering_without_a_lock,
        numbering_behind_a_watermark,
        successors_that_overtake,
        reader_without_a_gap_check,
        lane_that_never_rests,
        reader_without_signatures,
        epoch_that_starts_at_the_highest_checkpoint,
        parked_key_that_is_not_passed_on,
        parked_event_that_is_not_taken_away,
        stream_that_goes_on_behind_a_failing_event,
        stream_that_waits_without_rest,
        early_event_that_is_anywhere,
        survey_that_asks_nobody,
        handler_that_is_called_before_its_only_attempt_is_written_down,
        failure_of_an_only_attempt_that_is_kept_quiet,
        operator_who_passes_nothing_on,
    )
}
