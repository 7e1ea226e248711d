"""Cuts ranges out of the outbox: each row is compressed as it comes, none is kept."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import psycopg

from penstock.core.archive import ArchivePlan, CutLimits
from penstock.core.wire import is_hole
from penstock.errors import ArchiveConflict, PositionMissing
from penstock.stores.archive import ArchiveTable
from penstock.stores.archive_objects import PackedObject, Packer

# How many rows one question asks for, and how many of them are in memory at a time.
PAGE_ROWS = 2000
CHUNK_ROWS = 25

Connection = psycopg.Connection[Any]
Rows = list[tuple[int, str]]


class Cutter:
    """Makes objects of what follows a position, contiguous, and the same again for one plan."""

    def __init__(self, table: ArchiveTable, limits: CutLimits) -> None:
        self._table = table
        self._limits = limits

    def cut(self, connection: Connection, stream_name: str, after: int) -> PackedObject | None:
        """An object as large as the limits allow; None where nothing follows.

        Raises PositionMissing where something follows that leaves a position out.
        """
        packer = Packer(stream_name, after)
        with closing(self._chunks(connection, stream_name, after)) as chunks:
            for rows in chunks:
                _add(packer, rows[: self._limits.count_max - packer.lines])
                if self._limits.are_full(count=packer.lines, size_bytes=packer.raw_bytes):
                    break
        return packer.finish() if packer.last > after else None

    def cut_again(self, connection: Connection, plan: ArchivePlan) -> PackedObject:
        """The object of a plan. Raises PositionMissing, or ArchiveConflict for another content."""
        packer = Packer(plan.stream_name, plan.first - 1)
        with closing(self._chunks(connection, plan.stream_name, plan.first - 1)) as chunks:
            for rows in chunks:
                _add(packer, [row for row in rows if row[0] <= plan.last])
                if rows[-1][0] >= plan.last:
                    break
        packed = packer.finish()
        if packed.plan != plan:
            raise ArchiveConflict(
                f"{plan.name} was planned with other content than the outbox holds: it should be "
                f"{plan.events:,} events up to {plan.last}, and is {packed.plan.events:,} up to "
                f"{packed.plan.last}. Nothing was stored, nothing is pruned. Somebody has "
                "changed the outbox by hand; restore its rows."
            )
        return packed

    def _chunks(self, connection: Connection, stream_name: str, after: int) -> Generator[Rows]:
        """What follows a position, a few rows at a time."""
        while True:
            last = after
            for rows in self._table.rows(
                connection, stream_name, after, count=PAGE_ROWS, at_once=CHUNK_ROWS
            ):
                last = rows[-1][0]
                yield rows
            if last == after:
                return
            after = last


def _add(packer: Packer, rows: Rows) -> None:
    expected = packer.last + 1
    for position, body in rows:
        first = int(body.split("\n", 3)[2]) if is_hole(body) else position
        if first != expected:
            raise PositionMissing(
                f"The outbox does not hold position {expected} any more; it goes on at {first}. "
                "Nothing was left out: the archive ends before it, and nothing is pruned."
            )
        expected = position + 1
    if rows:
        packer.add(rows)
