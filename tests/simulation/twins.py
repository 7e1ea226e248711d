"""The same calls on PostgreSQL and on its model: whatever one answers, the other has to answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, LiteralString, TypeVar
from unittest.mock import patch

import psycopg

from penstock.core.forensics import Forensics
from penstock.core.isolation import Batch
from penstock.core.lanes import LaneView, key_hash
from penstock.core.leases import PUBLISHER, Lease
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry, decode_body
from penstock.errors import PenstockError
from penstock.stores import operations
from penstock.stores.inbox import Claim, Inbox, Registration
from penstock.stores.lanes import Lanes
from penstock.stores.leases import LeaseTable
from penstock.stores.operations import Kind, Operation
from penstock.stores.outbox import Outbox
from penstock.stores.parked import Letter, Look, Parked, ParkedRow, Setback
from penstock.stores.streams import Streams
from penstock.stores.suspects import Suspects
from penstock.stores.worker_connection import SyncWorkerConnection
from tests.simulation.connections import ModelConnection, ModelWorker, Wire
from tests.simulation.database import Database
from tests.simulation.machine import Machine, Process
from tests.simulation.rows import OutboxRow

T = TypeVar("T")
STREAM, CONSUMER = Database.stream_name, Database.consumer
LONG_SECONDS = 1000.0
# A statement that waits for this long on the server waits in the model as well.
LOCK_TIMEOUT = "options=-clock_timeout%3D60"
OWNERS = ("one", "two")
LETTER = Letter(forensics=Forensics("E", "", "", ""), error="", handler="h")
SETTLED: LiteralString = "SELECT event_uuid::text, position, outcome FROM events.processed_event"
PARKED: LiteralString = (
    "SELECT position, attempts, held, next_attempt_at IS NULL, depth,"
    " jsonb_array_length(history), operation_id IS NOT NULL FROM events.parked_event"
)
DEAD: LiteralString = (
    "SELECT event_uuid::text, position, reason, jsonb_array_length(attempts)"
    " FROM events.dead_letter"
)
LEASES: LiteralString = "SELECT role, term, checkpoint, clean, epoch, lane FROM events.stream_lease"
STREAMS: LiteralString = "SELECT head, timeline = events.timeline() FROM events.stream"
# Fields of a body that tell the time.
TOLD_TIMES = (8, 10)


class Server:
    """One of the two: connections to it, and a worker connection for each of two rivals."""

    def __init__(
        self, connection: Any, open_worker: Callable[[], Any], end: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.open_worker = open_worker
        self.end = end
        self.workers = [open_worker(), open_worker()]
        self.claims: list[Claim | None] = [None, None]

    def reopen(self, slot: int) -> None:
        self.workers[slot].close()
        self.workers[slot] = self.open_worker()
        self.claims[slot] = None

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.end()


class Twins:
    """A seeded walk over all statements of the stores, on both servers."""

    def __init__(self, database_url: str, seed: int) -> None:
        self.machine = Machine(seed)
        self.model = Database(self.machine)
        wire = Wire(self.model)
        real = psycopg.connect(f"{database_url}?{LOCK_TIMEOUT}", autocommit=True)
        self.real = real
        self.servers = (
            Server(
                real,
                lambda: SyncWorkerConnection(f"{database_url}?{LOCK_TIMEOUT}", "twin"),
                real.close,
            ),
            Server(
                ModelConnection(wire),
                lambda: ModelWorker(wire, Process("model")),
                lambda: None,
            ),
        )
        self._limits = patch.object(operations, "LOCK_SECONDS", 0.06)
        self._limits.start()
        self._senders = [psycopg.connect(database_url) for _ in range(2)]
        self._unsent: list[list[OutboxRow]] = [[], []]
        self._walked: list[str] = []
        self._leases: dict[tuple[str, str], Lease] = {}
        self._held: list[Lease | None] = [None, None]
        self._early: list[Entry | None] = [None, None]
        self._deploys = 0
        self.committed = self.refused = 0
        """How many batches ended how: a walk without either would prove little."""
        self.outbox, self.streams, self.table = Outbox(), Streams(), LeaseTable()
        self.lanes, self.suspects, self.inbox, self.parked = Lanes(), Suspects(), Inbox(), Parked()
        self.streams.register(real, STREAM)
        self.model.origin = self.streams.read(real, STREAM).origin
        self.table.ensure(real, STREAM, PUBLISHER)
        self.known = self._register()

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._limits.stop)
            for server in self.servers:
                stack.callback(server.close)
            for sender in self._senders:
                stack.callback(sender.close)

    # ── comparing ─────────────────────────────────────────────────────────────────────────────

    def both(self, what: str, call: Callable[[Server], T]) -> T | None:
        """Call both, and demand the same answer or the same kind of refusal."""
        self._walked.append(what)
        self.machine.now += 0.001
        real, model = (self._answer(server, call) for server in self.servers)
        shown = "\n  ".join(self._walked[-25:])
        assert _plain(real) == _plain(model), (
            f"they differ at {what}:\n real {_plain(real)}\nmodel {_plain(model)}\n  {shown}"
        )
        return None if isinstance(real, Exception) else real

    @staticmethod
    def _answer(server: Server, call: Callable[[Server], T]) -> Any:
        try:
            return call(server)
        except (psycopg.Error, PenstockError) as error:
            return error

    def chance(self, share: float) -> bool:
        return self.machine.dice() < share

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.machine.dice() * len(choices))]

    def number(self, least: int, most: int) -> int:
        return least + int(self.machine.dice() * (most - least + 1))

    # ── publishing ────────────────────────────────────────────────────────────────────────────

    def send(self) -> None:
        """Two senders with transactions that stay open for a while."""
        slot = self.number(0, 1)
        rows, sender = self._unsent[slot], self._senders[slot]
        if rows and self.chance(0.6):
            self._walked.append(f"sender {slot} decides")
            if self.chance(0.8):
                sender.commit()
                self.model.send(rows)
            else:
                sender.rollback()
            self._unsent[slot] = []
            return
        row_id = self.model.next_id
        self.model.next_id += 1
        row = OutboxRow(row_id, f"00000000-0000-7000-8000-{row_id:012x}", f"k{slot}", row_id)
        event = {"event_uuid": row.event_uuid, "stream_name": STREAM, "event_type": "T"}
        batch = json.dumps([{**event, "key": row.key, "payload": row.number}])
        self._walked.append(f"sender {slot} sends {row_id}")
        sender.execute("SELECT events.send_many(%s::jsonb)", [batch])
        rows.append(row)

    def number_events(self) -> None:
        lease, count, sweep = self._lease(PUBLISHER), self.number(1, 3), self.chance(0.5)
        self.both(
            f"number {count} for {lease.owner_id} in term {lease.term}",
            lambda s: self.outbox.number(s.connection, lease, count, sweep=sweep),
        )

    def look_at_outbox(self) -> None:
        after, count = self.number(0, self.model.head + 1), self.number(1, 4)
        self.both("unnumbered", lambda s: self.outbox.unnumbered_streams(s.connection))
        self.both("has_unnumbered", lambda s: self.outbox.has_unnumbered(s.connection, [STREAM]))
        self.both(
            f"read {count} after {after}",
            lambda s: self.outbox.read(s.connection, STREAM, after, count),
        )

    def look_at_stream(self) -> None:
        position, length = self.number(0, self.model.head), self.pick((2, 10**6))
        self.both("confirm", lambda s: self.streams.confirm(s.connection, STREAM, position))
        self.both("read stream", lambda s: self.streams.read(s.connection, STREAM))
        self.both("refill_base", lambda s: self.streams.refill_base(s.connection, STREAM, length))
        place = self.number(0, self.model.head + 1)
        if self.model.holes and self.chance(0.8):
            hole = self.pick(self.model.holes)
            place = self.pick((hole.first, hole.last)) + self.number(-1, 1)
        self.both(
            f"is_in_hole {place}", lambda s: self.streams.is_in_hole(s.connection, STREAM, place)
        )
        worker = self.pick(OWNERS)
        self.both("unleased", lambda s: self.streams.unleased(s.connection, worker))

    def step_over(self) -> None:
        if not self.chance(0.1):
            return
        lease, reached = self._lease(PUBLISHER), self.number(0, self.model.head + 3)
        if self.chance(0.5):
            self._walked.append("another timeline")
            self.real.execute("UPDATE events.stream SET timeline = 'another'")
            self.model.stream_timeline = "another"
            self.number_events()
        self.both(
            "step_over",
            lambda s: self.streams.step_over(s.connection, lease, reached=reached, reason=""),
        )

    # ── leases and lanes ──────────────────────────────────────────────────────────────────────

    def _role(self) -> str:
        return self.pick((PUBLISHER, self.known.role(self.number(0, self.known.lanes - 1))))

    def _lease(self, role: str) -> Lease:
        """One that somebody has, or had; most of the time the present one."""
        known = [lease for (of, _), lease in self._leases.items() if of == role]
        if not known:
            return Lease(STREAM, role, self.pick(OWNERS), 1, 0)
        latest = max(known, key=lambda lease: lease.term)
        return latest if self.chance(0.9) else self.pick(known)

    def acquire(self, role: str | None = None) -> None:
        role, worker = role or self._role(), self.pick(OWNERS)
        former = [self._lease(role).owner_id] if self.chance(0.3) else []
        owner = f"{worker}-{self.number(0, 10**9)}"
        lease = self.both(
            f"acquire {role} as {owner}",
            lambda s: self.table.acquire(
                s.connection,
                STREAM,
                role,
                owner_id=owner,
                worker_id=worker,
                lease_seconds=LONG_SECONDS,
                abandoned_owner_ids=former,
            ),
        )
        if lease is not None:
            self._leases[role, worker] = replace(lease, epoch=self.known.epoch)
            if self.chance(0.5):
                self._end_predecessor(lease)

    def _end_predecessor(self, lease: Lease) -> None:
        self.both(
            f"end_predecessor of {lease.role}",
            lambda s: self.table.end_predecessor(s.connection, lease, ()),
        )
        for slot, held in enumerate(self._held):
            if held is not None and held.role == lease.role:
                self._reopen(slot)

    def expire(self, role: str | None = None) -> None:
        role = role or self._role()
        self._walked.append(f"{role} runs out")
        self.real.execute(
            "UPDATE events.stream_lease SET lease_until = clock_timestamp() - interval '1 s'"
            " WHERE role = %s",
            [role],
        )
        row = self.model.leases.get(role)
        if row is not None:
            self.model.leases[role] = row._replace(until=self.machine.now - 1)

    def keep_leases(self) -> None:
        leases = [self._lease(self._role()), self._lease(PUBLISHER)]
        leases = leases[:1] if leases[0].role == leases[1].role else leases
        self.both("renew", lambda s: self.table.renew(s.connection, leases, LONG_SECONDS))
        self.both("read lease", lambda s: self.table.read(s.connection, leases[0]))

    def give_back(self) -> None:
        lease, worker = self._lease(self._role()), self.pick(OWNERS)
        if self.chance(0.2):
            seen = self.number(0, 9)
            self.both(
                f"release {lease.role} behind term {seen}",
                lambda s: self.table.release(s.connection, lease, term_seen=seen),
            )
        elif self.chance(0.1):
            self.both(
                f"release_worker {worker}",
                lambda s: sorted(self.table.release_worker(s.connection, worker)),
            )

    def share_lanes(self) -> None:
        worker = self.pick(OWNERS)
        lease = self._lease(self._role())
        match self.number(0, 2):
            case 0:
                self.both(
                    "join", lambda s: self.lanes.join(s.connection, CONSUMER, worker, LONG_SECONDS)
                )
            case 1:
                self.both("stay", lambda s: self.lanes.stay(s.connection, worker, LONG_SECONDS))
            case _:
                self.both("leave", lambda s: self.lanes.leave(s.connection, CONSUMER, worker))
        self.both("watch", lambda s: self.lanes.watch(s.connection, CONSUMER, worker))
        if lease.role != PUBLISHER:
            self._advance(lease)

    def _advance(self, lease: Lease) -> None:
        checkpoint = lease.checkpoint + self.number(0, 2)
        if self.both(
            f"advance {lease.role} from {lease.checkpoint} to {checkpoint}",
            lambda s: self.lanes.advance(s.connection, lease, checkpoint),
        ):
            self._moved(lease, checkpoint)

    def _moved(self, lease: Lease, checkpoint: int) -> None:
        for key, known in self._leases.items():
            if known.owner_id == lease.owner_id:
                self._leases[key] = known.at(checkpoint)

    def change_lanes(self) -> None:
        if self.chance(0.2) and self._held == [None, None]:
            self._leases = {key: v for key, v in self._leases.items() if key[0] == PUBLISHER}
            self.known = self._register(self.number(1, 3))

    def _register(self, lanes: int = 1) -> Registration:
        self._deploys += self.number(0, 1)
        deployed_at = datetime.fromtimestamp(self._deploys, UTC)
        options = ConsumerOptions(
            stream_name=STREAM,
            name="bill",
            lanes=lanes,
            order=self.pick(("key", "key", "none")),
            allow_reordering=True,
        )
        known = self.both(
            f"register with {lanes} lanes",
            lambda s: self.inbox.register(s.connection, CONSUMER, options, deployed_at),
        )
        assert known is not None
        return known

    def suspect(self) -> None:
        entry, worker = self._entry(), self.pick(OWNERS)
        if entry is not None and self._held == [None, None]:
            self.both(
                f"suspect {entry.position} starts",
                lambda s: [
                    start["worker_id"]
                    for start in self.suspects.start(s.connection, CONSUMER, entry, worker)
                ],
            )
            if self.chance(0.4):
                self.both(
                    "suspect finishes",
                    lambda s: self.suspects.finish(s.connection, CONSUMER, entry.position),
                )
            self.both(
                "unfinished starts", lambda s: self.suspects.unfinished(s.connection, CONSUMER)
            )

    # ── batches ───────────────────────────────────────────────────────────────────────────────

    def _entry(self) -> Entry | None:
        rows = sorted(self.model.by_position.items())
        parked = [item for item in rows if item[0] in self.model.parked]
        if not rows:
            return None
        # Those that are parked, or new, are where most can go wrong.
        position, row = self.pick((parked or rows) if self.chance(0.5) else rows[-6:])
        return decode_body(STREAM, position, row.body.encode())

    def _batch(self, *, is_parked: bool) -> Batch | None:
        entries = {entry.position: entry for _ in range(3) if (entry := self._entry()) is not None}
        if not entries:
            return None
        ordered = tuple(entries[position] for position in sorted(entries))
        return Batch(ordered, ordered[-1].position, is_parked=is_parked)

    def claim(self) -> None:
        """One of two rivals begins a transaction, unless it has one open."""
        slot, is_parked = self.number(0, 1), self.chance(0.4)
        batch = self._batch(is_parked=is_parked)
        if self._held[slot] is not None or batch is None:
            return
        role = self.known.role(self.number(0, self.known.lanes - 1))
        if self.chance(0.7):
            self.expire(role)
            self.acquire(role)
        lease = self._lease(role)
        outcomes = [self.pick(("handled", "skipped", "parked")) for _ in batch.entries]
        hashes = [key_hash(entry.key, entry.event_uuid) for entry in batch.entries]
        in_order, ahead = self.chance(0.5), self.chance(0.3)

        def begin(server: Server) -> Any:
            worker = server.workers[slot]
            if is_parked:
                claim = self.parked.claim(worker, CONSUMER, lease, batch, in_order=in_order)
            else:
                claim = self.inbox.claim(
                    worker,
                    CONSUMER,
                    lease,
                    batch,
                    outcomes,
                    ahead=ahead,
                    key_hashes=hashes if in_order else None,
                )
            server.claims[slot] = claim
            fresh, waiting = claim.fresh, claim.waiting
            if ahead and not is_parked:
                fresh, waiting = worker.first_row()
            return [sorted(fresh), sorted(waiting)]

        what = "parked.claim" if is_parked else f"claim {outcomes}"
        positions = [entry.position for entry in batch.entries]
        if self.both(f"{slot}: {what} {positions} as {lease.role}", begin) is None:
            self._rollback(slot)
        else:
            self._held[slot] = lease

    def claim_early(self) -> None:
        """One of the rivals begins with what has no position yet."""
        slot, after = self.number(0, 1), self.model.head - self.pick((0, 0, 0, 1))
        if self._held[slot] is not None:
            return
        lease = self._lease(self.known.role(self.number(0, self.known.lanes - 1)))

        def begin(server: Server) -> list[str | None]:
            worker = server.workers[slot]
            server.claims[slot] = self.inbox.claim_early(worker, CONSUMER, lease, after)
            row = worker.first_row()
            return [None if row is None else row[0]]

        found = self.both(f"{slot}: claim_early after {after} as {lease.role}", begin)
        if not found or found[0] is None:
            self._rollback(slot)
        else:
            self._held[slot] = lease
            self._early[slot] = decode_body(STREAM, after + 1, found[0].encode())

    def within(self) -> None:
        """A statement in an open transaction."""
        slot, entry = self.number(0, 1), self._entry()
        if self._held[slot] is None or entry is None:
            return
        setback = Setback(self.number(0, 3), "failed", self.pick((0.0, LONG_SECONDS, None)))
        what, call = self.pick(self._statements(entry, setback))
        if self.both(f"{slot}: {what} {entry.position}", lambda s: [call(s.workers[slot])]) is None:
            self._rollback(slot)

    def _statements(
        self, entry: Entry, setback: Setback
    ) -> list[tuple[str, Callable[[Any], object]]]:
        inbox: Any = self.inbox
        parked: Any = self.parked
        suspects: Any = self.suspects
        others = [e for _ in range(2) if (e := self._entry()) is not None]
        entries = list({e.position: e for e in (entry, *others)}.values())
        places, position, delay = (
            [e.position for e in entries],
            entry.position,
            setback.delay_seconds,
        )
        return [
            ("unclaim", lambda w: inbox.unclaim(w, CONSUMER, entries)),
            (f"park for {delay}", lambda w: parked.park(w, CONSUMER, [entry], setback)),
            (f"park {places} behind", lambda w: sorted(parked.park(w, CONSUMER, entries))),
            (f"postpone for {delay}", lambda w: parked.postpone(w, CONSUMER, position, setback)),
            (f"settle {places}", lambda w: parked.settle(w, CONSUMER, entries, "handled")),
            ("bury", lambda w: parked.bury(w, CONSUMER, entry, LETTER)),
            ("remove", lambda w: parked.remove(w, CONSUMER, position)),
            ("finish", lambda w: suspects.finish_within(w, CONSUMER, position)),
        ]

    def letter(self) -> None:
        """What failed after it was settled is buried, in a transaction of its own."""
        slot, entry = self.number(0, 1), self._entry()
        if self._held[slot] is not None or entry is None:
            return
        outcome = self.both(
            f"{slot}: begin_letter {entry.position}",
            lambda s: [self.parked.begin_letter(s.workers[slot], CONSUMER, entry)],
        )
        if outcome != ["handled"] or self.chance(0.5):
            self._rollback(slot)
            return

        def bury(server: Server) -> str:
            worker = server.workers[slot]
            self.parked.bury(worker, CONSUMER, entry, LETTER)
            self.parked.declare_dead(worker, CONSUMER, entry)
            return "buried"

        if self.both(f"{slot}: declare_dead {entry.position}", bury) is None:
            self._rollback(slot)
        self.look_at_books()

    def end_batch(self) -> None:
        slot = self.number(0, 1)
        lease = self._held[slot]
        if lease is None:
            return
        if self.chance(0.1):
            self._walked.append(f"{slot}: rollback")
            self._rollback(slot)
            return
        checkpoint = lease.checkpoint + self.number(0, 2)

        def commit(server: Server) -> str:
            claim = server.claims[slot]
            assert claim is not None
            early = self._early[slot]
            self.inbox.commit(server.workers[slot], claim, lease, checkpoint, early)
            return "committed"

        if self.both(f"{slot}: commit at {checkpoint}", commit) is None:
            self.refused += 1
            self._rollback(slot)
        else:
            self.committed += 1
            self._moved(lease, checkpoint)
            self._held[slot] = self._early[slot] = None
        self.look_at_books()

    def _rollback(self, slot: int) -> None:
        for server in self.servers:
            server.workers[slot].rollback()
        self._held[slot] = self._early[slot] = None

    def _reopen(self, slot: int) -> None:
        self._held[slot] = self._early[slot] = None
        for server in self.servers:
            with suppress(psycopg.Error):
                server.reopen(slot)

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def look_at_parked(self) -> None:
        lanes = self.number(1, 3)
        lane, count, in_order = self.number(0, lanes - 1), self.number(1, 6), self.chance(0.7)
        keys_max = self.pick((1, 100))
        times = [row.next_attempt_at for row in self.model.parked.values()]
        if len(set(times)) < len(times):
            # Those of one statement have an order on the server that nobody relies on.
            count = 100
        self.both(
            "look",
            lambda s: self.parked.look(
                s.connection, CONSUMER, lane=lane, lanes=lanes, keys_max=keys_max
            ),
        )
        self.both(
            f"due, at most {count}",
            lambda s: self.parked.due(
                s.connection,
                CONSUMER,
                STREAM,
                lane=lane,
                lanes=lanes,
                count=count,
                in_order=in_order,
            ),
        )

    def survey(self) -> None:
        """What a handler asks that is called before its events are claimed."""
        batch = self._batch(is_parked=self.chance(0.5))
        if batch is None:
            return
        hashes = [key_hash(entry.key, entry.event_uuid) for entry in batch.entries]
        in_order = self.chance(0.7)
        positions = [entry.position for entry in batch.entries]
        self.both(
            f"survey {positions}",
            lambda s: self.inbox.survey(
                s.connection, CONSUMER, batch, hashes if in_order else None
            ),
        )
        self.both(
            f"still_there {positions}",
            lambda s: self.parked.still_there(s.connection, CONSUMER, batch, in_order=in_order),
        )
        parked: Any = self.parked
        if self.chance(0.1):
            self.both("let_overtake", lambda s: [parked.let_overtake(s.connection, CONSUMER)])

    def operate(self) -> None:
        """An operator redrives, discards or releases some of what there is."""
        letters = [row.position for row in self.model.dead.values() if self.chance(0.6)]
        parked = sorted(p for p in self.model.parked if self.chance(0.6))
        kind: Kind = self.pick(("redrive", "redrive", "discard", "release"))
        is_stopped = self.chance(0.3)

        def run(server: Server) -> Any:
            operation = Operation(server.connection, kind, {}, consumer=CONSUMER, by="", reason="")
            ids = letters if server is self.servers[1] else self._ids(letters)
            match kind:
                case "redrive":
                    moved = operation.move(ids)
                    return moved, operation.take_back(100) if is_stopped else 0
                case "discard":
                    return operation.discard(ids)
                case "release":
                    return operation.release(CONSUMER, parked)

        self.both(f"{kind} {letters} or {parked}", run)
        self.look_at_books()

    def _ids(self, positions: list[int]) -> list[int]:
        query = "SELECT id FROM events.dead_letter WHERE position = ANY(%s)"
        return [row[0] for row in self.real.execute(query, [positions])]

    def pause(self) -> None:
        """Somebody pauses the consumer, or lets it go on."""
        self.model.is_paused = not self.model.is_paused
        self._walked.append(f"paused: {self.model.is_paused}")
        self.real.execute(
            "UPDATE events.consumer SET paused_at = CASE WHEN %s THEN clock_timestamp() END",
            [self.model.is_paused],
        )

    def look_at_books(self) -> None:
        """What is committed, row by row."""
        model = self.model
        parked = [
            (
                *(p, r.attempts, r.held, r.next_attempt_at is None, r.depth),
                *(r.setbacks, r.operation_id is not None),
            )
            for p, r in model.parked.items()
        ]
        leases = [
            (role, r.term, r.checkpoint, r.clean, r.epoch, r.lane)
            for role, r in model.leases.items()
        ]
        dead = [(u, r.position, r.reason, r.attempts) for u, r in model.dead.items()]
        self._same_rows(SETTLED, [(uuid, *row) for uuid, row in model.processed.items()])
        self._same_rows(PARKED, parked)
        self._same_rows(DEAD, dead)
        self._same_rows(LEASES, leases)
        self._same_rows(STREAMS, [(model.head, model.stream_timeline == model.timeline)])

    def _same_rows(self, query: LiteralString, rows: list[tuple[Any, ...]]) -> None:
        found = sorted(self.real.execute(query).fetchall())
        shown = "\n  ".join(self._walked[-25:])
        assert found == sorted(rows), f"{query}\n  {shown}"

    STEPS = (
        *(send, send, number_events, look_at_outbox, look_at_stream, step_over),
        *(acquire, expire, keep_leases, give_back, share_lanes, change_lanes, suspect),
        *(claim, claim, claim, claim_early, within, within, within, within, within, within),
        *(end_batch, end_batch, end_batch, look_at_parked, letter, survey),
        *(operate, operate, pause),
    )

    def walk(self, steps: int) -> None:
        """So many steps; any difference ends it."""
        for _ in range(steps):
            self.pick(self.STEPS)(self)
        self.look_at_books()


def _plain(answer: Any) -> Any:
    """An answer without what cannot be the same on both."""
    plain = answer
    match answer:
        case psycopg.Error():
            plain = ("refused", answer.sqlstate)
        case Exception():
            plain = type(answer).__name__
        case LaneView():
            plain = (replace(answer, next_end_seconds=None), _roughly(answer.next_end_seconds))
        case Look(has_any, keys, due_seconds):
            plain = (has_any, keys, _roughly(due_seconds))
        case ParkedRow():
            plain = (answer.entry.position, answer.entry.event_uuid, *answer[1:])
        case list() | tuple() if type(answer) in {list, tuple}:
            plain = [_plain(part) for part in answer]
        case str() if answer.startswith("event\n"):
            fields = answer.split("\n")
            plain = [field for index, field in enumerate(fields) if index not in TOLD_TIMES]
    return plain


def _roughly(seconds: float | None) -> str | None:
    """Whether it is now, or long."""
    if seconds is None:
        return None
    return "long" if seconds > LONG_SECONDS / 2 else "now"
