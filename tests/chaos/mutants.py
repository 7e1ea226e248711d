"""Planted bugs, one at a time: a harness that does not catch them proves nothing.

`python -m tests.chaos.mutants [--only NAME …] [--seed N]`: for each, a copy of the sources with the
bug in it, and chaos runs against that copy until one of them fails, for ten minutes at most. A bug
that another layer of defence hides is caught by the probe of its own layer (`probes.py`), which
every chaos run ends with.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import penstock

SOURCES = Path(penstock.__file__).parent.parent
LIMIT_SECONDS = 600.0
SECONDS = 40.0
RATE = "150"
CONTROL = "(no bug)"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: a text of one file, and what stands there instead."""

    name: str
    path: str
    text: str
    instead: str
    profile: str = "everything"
    seconds: float = SECONDS

    def plant(self, sources: Path) -> None:
        """Put the bug into a copy of the sources."""
        file = sources / "penstock" / self.path
        file.write_text(self.planted_in(file.read_text()))

    def planted_in(self, source: str) -> str:
        """The source with the bug in it, if the place is there that it was written for."""
        assert source.count(self.text) == 1, f"{self.name}: its place in {self.path} has changed"
        return source.replace(self.text, self.instead)


MUTANTS = (
    Mutant(
        "no-term-check",
        "stores/lua/append.lua",
        "if tonumber(term) > tonumber(ARGV[3]) then return {'STALE', term} end\n",
        "",
    ),
    Mutant(
        "no-position-skip",
        "stores/lua/append.lua",
        "for position = is_hole and math.max(final, last + 1) or last + 1, final do",
        "for position = is_hole and final or first, final do",
    ),
    Mutant(
        "no-compare-and-set",
        "stores/migrations/0001_the_line.sql",
        "       AND checkpoint = old_checkpoint AND lease_until > clock_timestamp();",
        "       ;",
    ),
    Mutant(
        "no-fence-by-owner",
        "stores/migrations/0001_the_line.sql",
        " AND owner_id = owner AND term = held_term\n       AND checkpoint = old_checkpoint",
        "\n       AND checkpoint = old_checkpoint",
    ),
    Mutant(
        "no-lock-before-numbering",
        "stores/migrations/0005_tiers.sql",
        "WHERE name = of_stream FOR UPDATE;",
        "WHERE name = of_stream;",
    ),
    Mutant(
        "no-gap-check",
        "pipeline/reader.py",
        "                if position != expected:\n                    # Until there",
        "                expected = position\n                if False:\n"
        "                    # Until there",
    ),
    Mutant(
        "no-read-through",
        "pipeline/reader.py",
        "        return self._read_instead(after, count)\n\n    def _read_instead",
        "        return Stretch([], after)\n\n    def _read_instead",
    ),
    Mutant(
        "mac-unchecked",
        "core/wire.py",
        "    if not keys.is_signed(stream_name, position, body, key_id=parts[1], mac=parts[2]):\n"
        '        raise EntryForged(f"{stream_name}/{position}: not signed for this place")\n',
        "",
    ),
    Mutant(
        "checkpoint-in-a-second-transaction",
        "stores/inbox.py",
        "            worker.commit_after(*statements)\n",
        "            worker.commit_after((\n"
        '                "DELETE FROM events.seal WHERE id = %(seal_id)s", {"seal_id":'
        " claim.seal_id}\n            ))\n            worker.begin(\n"
        '                "INSERT INTO events.seal (id, fresh) VALUES (%(seal_id)s, %(fresh)s)"\n'
        '                " RETURNING id",\n'
        '                {"seal_id": claim.seal_id, "fresh": len(claim.fresh)},\n            )\n'
        "            worker.first_row()\n"
        "            worker.commit_after(*statements)\n",
    ),
    Mutant(
        "dead-letter-in-a-second-transaction",
        "pipeline/setting_aside.py",
        "            if claim.fresh or claim.waiting:\n                write()\n"
        "            self._ledger.commit(batch, lease, claim, batch.last, handled=0)\n",
        "            self._ledger.commit(batch, lease, claim, batch.last, handled=0)\n"
        "            if claim.fresh or claim.waiting:\n                write()\n"
        '                self._worker.commit_after(("SELECT 1", {}))\n',
    ),
    Mutant(
        "given-up-connection-unnoticed",
        "stores/guard.py",
        "        self.given_up = RollbackInTransactionError(",
        "        _ = RollbackInTransactionError(",
    ),
    Mutant(
        "lost-connection-taken-for-a-bug",
        "stores/postgres.py",
        "    if isinstance(error, _OF_CONNECTIONS) or type(error) is psycopg.DatabaseError:",
        "    if isinstance(error, psycopg.InterfaceError):",
    ),
    Mutant(
        "no-sealing",
        "stores/migrations/0001_the_line.sql",
        "    IF EXISTS (SELECT 1 FROM events.seal WHERE id = NEW.id) THEN",
        "    IF false THEN",
    ),
    Mutant(
        "commit-order-ignored",
        "stores/migrations/0001_the_line.sql",
        "    PERFORM pg_advisory_xact_lock(slots.stream_hash, slots.slot) FROM (",
        "    PERFORM slots.stream_hash FROM (",
    ),
    Mutant(
        "predecessor-not-ended",
        "stores/sql/lease.sql",
        "SELECT pid, pg_terminate_backend(pid)",
        "SELECT pid, true",
    ),
    Mutant(
        "crash-count-not-recorded",
        "stores/sql/suspect.sql",
        "   SET starts = suspect.starts || excluded.starts,",
        "   SET starts = excluded.starts,",
    ),
    Mutant(
        "refill-forgotten",
        "pipeline/log_writer.py",
        "        return last if found == last else None\n",
        "        return last\n",
    ),
    Mutant(
        "successors-not-parked",
        "pipeline/ledger.py",
        '        return "parked" if entry.position in waiting else "handled"\n',
        '        return "handled"\n',
    ),
)


def hunt(mutant: Mutant | None, seed: int, folder: Path) -> tuple[str | None, float]:
    """Run chaos against the bug. Returns what caught it, and after how many seconds."""
    sources = folder / "src"
    shutil.copytree(SOURCES / "penstock", sources / "penstock")
    seconds, profile = (SECONDS, "everything")
    if mutant is not None:
        mutant.plant(sources)
        seconds, profile = mutant.seconds, mutant.profile
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    started_at = time.monotonic()
    while (left := LIMIT_SECONDS - (time.monotonic() - started_at)) > 0:
        command = [sys.executable, "-m", "tests.chaos", "--seed", str(seed)]
        command += ["--seconds", f"{seconds:g}", "--profile", profile, "--rate", RATE]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            # Whatever such a run would have found, it was not in time.
            break
        if done.returncode:
            # Also where the run itself breaks off: with such a bug nothing may ever begin.
            return _reason(done.stdout + done.stderr), time.monotonic() - started_at
        if mutant is None:
            break
        seed += 1
    return None, time.monotonic() - started_at


def _reason(output: str) -> str:
    """The first line that says what does not hold."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("WRONG")), lines[-1] if lines else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Hunt them all; the exit code is 1 if one escapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[mutant.name for mutant in MUTANTS])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    escaped = 0
    for mutant in (None, *MUTANTS):
        if mutant is not None and options.only and mutant.name not in options.only:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            reason, seconds = hunt(mutant, options.seed, Path(folder))
        name = CONTROL if mutant is None else mutant.name
        sys.stdout.write(f"{name:<36} {seconds:4.0f} s  {reason or 'not caught'}\n")
        sys.stdout.flush()
        if mutant is None and reason is not None:
            sys.stdout.write("without a bug nothing may be caught: these runs would show nothing\n")
            return 1
        escaped += mutant is not None and reason is None
    sys.stdout.write(f"{escaped} escaped\n")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
