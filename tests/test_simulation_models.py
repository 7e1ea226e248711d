"""The models of the simulation answer what the servers answer, call by call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from penstock.errors import PenstockError
from penstock.stores.hot_log import Fence
from penstock.stores.redis_log import RedisLog
from tests.publishing import log_key
from tests.simulation.hot_log import HotServer, Id, ModelHotLog
from tests.simulation.machine import Machine
from tests.simulation.twins import Twins

ORIGINS = ("here", "elsewhere")
INCARNATIONS = ("7/1/00000001", "7/1/00000002", "8/1/00000001")
OLD_SECONDS = 1000

terms = st.integers(1, 3)
positions = st.integers(1, 8)
origins = st.sampled_from((*ORIGINS[:1] * 4, ORIGINS[1]))
incarnations = st.sampled_from((*INCARNATIONS[:1] * 4, *INCARNATIONS[1:]))
fences = st.builds(Fence, origins, incarnations, terms)
bases = st.integers(0, 7)
foreign_ids = st.one_of(
    st.tuples(positions, st.integers(0, 2)), st.sampled_from([(10**15, 0), (10**15, 1)])
)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))]
)
def test_the_model_of_postgresql_answers_like_postgresql(database_url: str, seed: int) -> None:
    with closing(Twins(database_url, seed)) as twins:
        twins.walk(steps=800)


def test_the_model_of_the_hot_log_answers_like_redis(redis_url: str) -> None:
    names = map("s{}".format, count())
    with closing(RedisLog(redis_url)) as log, closing(redis.Redis.from_url(redis_url)) as client:
        run_state_machine_as_test(
            lambda: HotLogs(log, client, next(names)),  # type: ignore[arg-type]
            settings=settings(max_examples=60, stateful_step_count=30, deadline=None),
        )


class HotLogs(RuleBasedStateMachine):
    """A hot log on a server and in the model, written to and damaged in the same ways."""

    def __init__(self, log: RedisLog, client: Any, name: str) -> None:
        super().__init__()
        self._client = client
        self._name = name
        self._server = HotServer(Machine(0))
        self._logs = (log, ModelHotLog(self._server))

    def _both(self, call: Callable[[Any], Any]) -> None:
        real, model = (_answer(call, log) for log in self._logs)
        assert real == model, f"the server says {real}, the model {model}"

    @initialize(base=bases)
    def begin(self, base: int) -> None:
        fence = Fence(ORIGINS[0], INCARNATIONS[0], 1)
        self._both(lambda log: log.open(self._name, fence, base=base))

    @rule(fence=fences, base=bases)
    def open(self, fence: Fence, base: int) -> None:
        self._both(lambda log: log.open(self._name, fence, base=base))

    @rule(fence=fences, base=bases)
    def restart(self, fence: Fence, base: int) -> None:
        self._both(lambda log: log.restart(self._name, fence, base=base))

    @rule(fence=fences, first=positions, length=st.integers(1, 4))
    def append(self, fence: Fence, first: int, length: int) -> None:
        entries = [b"entry %d" % position for position in range(first, first + length)]
        self._both(lambda log: log.append(self._name, fence, first=first, entries=entries))

    @rule(length=st.integers(1, 4))
    def append_next(self, length: int) -> None:
        """What a publisher would append that knows everything."""
        meta = self._server.meta
        if meta is not None:
            first = (self._server.tail() or meta.base) + 1
            self.append(meta.fence, first, length)

    @rule(fence=fences, first=positions, width=st.integers(1, 5))
    def append_hole(self, fence: Fence, first: int, width: int) -> None:
        self._both(
            lambda log: log.append(
                self._name,
                fence,
                first=first,
                entries=[b"hole"],
                hole_last=first + width - 1,
            )
        )

    @rule(after=st.integers(0, 8), length=st.integers(1, 5))
    def read(self, after: int, length: int) -> None:
        self._both(lambda log: log.read(self._name, after=after, count=length, wait_seconds=0.0))

    @rule(fence=st.none() | fences)
    def last(self, fence: Fence | None) -> None:
        self._both(lambda log: log.last(self._name, fence))

    @rule(through=positions)
    def trim(self, through: int) -> None:
        self._both(lambda log: log.trim(self._name, through=through))

    # ── damage ────────────────────────────────────────────────────────────────────────────────

    @property
    def _log_key(self) -> str:
        return log_key(self._name)

    @property
    def _meta_key(self) -> str:
        return self._log_key.removesuffix("log") + "meta"

    @rule(entry_id=foreign_ids)
    def add(self, entry_id: Id) -> None:
        was_added = self._server.add(entry_id, b"foreign")
        try:
            self._client.xadd(self._log_key, {"e": b"foreign"}, id="{}-{}".format(*entry_id))
        except redis.ResponseError:
            assert not was_added
        else:
            assert was_added

    @rule(index=st.integers(0, 5))
    def delete_entry(self, index: int) -> None:
        if index < len(self._server.entries):
            (position, sequence), _ = self._server.entries.pop(index)
            self._client.xdel(self._log_key, f"{position}-{sequence}")

    @rule()
    def delete_log(self) -> None:
        self._server.delete_log()
        self._client.delete(self._log_key)

    @rule()
    def delete_record(self) -> None:
        self._server.meta = None
        self._client.delete(self._meta_key)

    @rule()
    def fall_silent(self) -> None:
        """Nobody has published for a while."""
        if self._server.meta is not None:
            seen = self._server.machine.now - OLD_SECONDS
            self._server.meta = self._server.meta._replace(seen=seen)
            self._client.hincrby(self._meta_key, "seen", -OLD_SECONDS)


def _answer(call: Callable[[Any], Any], log: Any) -> Any:
    try:
        return call(log)
    except PenstockError as error:
        return type(error).__name__
