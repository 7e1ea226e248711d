"""Archiving a stream, out of PostgreSQL into objects, against zstd over the same bytes."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import zstandard

from benchmarks.bed import Bed
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from penstock.core.settings import Settings
from penstock.pipeline.archiver import Archiver
from penstock.runtime.leases import LeaseKeeper
from penstock.stores.archive import ArchiveTable
from penstock.stores.archive_objects import LEVEL, load
from penstock.stores.objects import open_store

# 30,000 events a second where zstd alone packs a million.
CLAIM = Claim("archive", "archive, by zstd alone", 0.03)
STREAM = "bench"
OBJECTS = 5
KIBIBYTES_PER_MIBIBYTE = 1024
FILL = """
INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, key, payload, metadata,
                                 position, term, published_at, created_at)
SELECT gen_random_uuid(), %(stream)s, 'bench.ordered', 'customer-' || n %% 1000,
       jsonb_build_object('order_id', n, 'customer', 'customer-' || n %% 1000, 'cents', n * 7,
                          'currency', 'EUR', 'note', md5(n::text)), '{"traceparent": "00-00"}',
       n, 1, clock_timestamp(), clock_timestamp() - interval '1 day'
  FROM generate_series(1, %(count)s) AS n
"""


class Archiving:
    """Measures both in turn; the archiver begins anew each time."""

    claim = CLAIM

    def __init__(self, database_url: str, folder: Path, scale: Scale) -> None:
        self._folder = folder
        self._count = scale.archived
        self._settings = Settings(
            database_url=database_url,
            archive_url=str(folder),
            archive_count_max=max(1, scale.archived // OBJECTS),
        )
        with psycopg.connect(database_url, autocommit=True) as connection:
            parameters = {"stream": STREAM, "count": scale.archived}
            connection.execute(
                "INSERT INTO events.stream (name, origin, head, published)"
                " SELECT %(stream)s, id, %(count)s, %(count)s FROM events.origin",
                parameters,
            )
            connection.execute(FILL, parameters)

    def measure(self) -> Round:
        """One round: everything archived, then everything compressed."""
        self._begin_anew()
        archived_seconds, grown_mib = self._archive()
        seconds = self._compress(self._contents())
        return Round(
            {"events/s": self._count / archived_seconds, "MiB more in memory": grown_mib},
            {"events/s": self._count / seconds},
        )

    def _begin_anew(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with psycopg.connect(self._settings.database_url, autocommit=True) as connection:
            connection.execute("DELETE FROM events.archive_object")
            connection.execute("DELETE FROM events.stream_lease WHERE role = 'archiver'")

    def _archive(self) -> tuple[float, float]:
        peak = _peak_mib()
        with closing(LeaseKeeper(self._settings)) as keeper:
            archiver = Archiver(self._settings, keeper)
            archiver.step()  # the probe, the lease and the first object
            started_at, left = time.perf_counter(), self._count - self._count // OBJECTS
            while left > 0:
                left -= archiver.step().moved
            seconds = time.perf_counter() - started_at
            archiver.close()
        return seconds * OBJECTS / (OBJECTS - 1), _peak_mib() - peak

    def _contents(self) -> list[bytes]:
        store = open_store(str(self._folder))
        with psycopg.connect(self._settings.database_url, autocommit=True) as connection:
            objects = ArchiveTable().objects(connection, STREAM)
        return [b"\n".join(load(store, each).lines) for each in objects]

    def _compress(self, contents: list[bytes]) -> float:
        started_at = time.perf_counter()
        for content in contents:
            zstandard.ZstdCompressor(level=LEVEL).compress(content)
        return time.perf_counter() - started_at


def _peak_mib() -> float:
    """The most memory that this process has ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        peak / KIBIBYTES_PER_MIBIBYTE / (KIBIBYTES_PER_MIBIBYTE if sys.platform == "darwin" else 1)
    )


@contextmanager
def opened_archiving(bed: Bed, scale: Scale) -> Iterator[Sequence[Archiving]]:
    """The one comparison, over a stream that waits in its outbox."""
    with tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        yield [Archiving(bed.database("archiving"), Path(folder, "archive"), scale)]
