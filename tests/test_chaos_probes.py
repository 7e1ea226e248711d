"""The probes of the chaos run: silent where every layer is there, and not where one is missing."""

from __future__ import annotations

import psycopg
import pytest

from tests.chaos.mutants import MUTANTS, SOURCES, Mutant
from tests.chaos.probes import Probes

NO_FENCE = """
CREATE OR REPLACE FUNCTION events.fence(
    seal_id bigint, taken_for_fresh bigint, of_stream text, lease_role text, owner text,
    held_term bigint, old_checkpoint bigint, new_checkpoint bigint
) RETURNS void LANGUAGE sql AS $$ DELETE FROM events.seal WHERE id = seal_id $$
"""
MISSING = {
    "fence": (NO_FENCE, "fence_refuses"),
    "seal": ("ALTER TABLE events.seal DISABLE TRIGGER ALL", "seal_refuses"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_planted_bug_still_has_its_place(mutant: Mutant) -> None:
    source = (SOURCES / "penstock" / mutant.path).read_text()
    assert mutant.planted_in(source) != source


def test_every_layer_holds(database_url: str, redis_url: str) -> None:
    assert list(Probes(database_url, redis_url).run()) == []


@pytest.mark.parametrize("layer", MISSING)
def test_a_missing_layer_is_found(database_url: str, redis_url: str, layer: str) -> None:
    statement, probe = MISSING[layer]
    with psycopg.connect(database_url) as connection:
        connection.execute(statement.encode())
    faults = list(Probes(database_url, redis_url).run())
    assert [fault for fault in faults if probe in fault], faults
