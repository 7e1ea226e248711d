"""What handlers share and no transaction holds, HTTP clients say: one of each in a worker process.

It is opened before the first event of whoever asks for it, and closed when its worker ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from penstock.core.failures import describe
from penstock.errors import ResourceUnavailable
from penstock.stores.async_worker_connection import enter_loop, leave_loop

_logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Opened:
    """What handlers are given, and what closes it."""

    value: Any
    close: Callable[[], object]
    has_ended: Callable[[], bool] = lambda: False
    """Whether it is closed though nobody asked for that: its own task group failed, say."""


class Resource:
    """Something that handlers ask for by its annotation, and the generator that makes it."""

    def __init__(self, name: str, annotation: Any, function: Callable[[], Any]) -> None:
        self.name = name
        self.annotation = annotation
        self.is_async = inspect.isasyncgenfunction(function)
        """Whether it lives on the event loop, where plain handlers cannot use it."""
        self._function = function
        self._users = 0
        self._opened: Opened | None = None
        self._lock = threading.Lock()

    @property
    def value(self) -> Any:
        """What handlers are given."""
        opened = self._opened
        if opened is None:
            raise ResourceUnavailable(self.name, "it has ended")
        return opened.value

    def enter(self) -> None:
        """Use it from now on. Raises ResourceUnavailable; nothing is in use then."""
        with self._lock:
            self._require_open()
            self._users += 1

    def require_open(self) -> None:
        """Open it anew where it has ended by itself. Raises ResourceUnavailable."""
        opened = self._opened
        if opened is None or opened.has_ended():
            with self._lock:
                self._require_open()

    def leave(self) -> None:
        """Use it no more; the last one closes it. An error of its own is logged."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._close("failed while it was closed")

    def _require_open(self) -> None:
        if self._opened is not None and self._opened.has_ended():
            self._close("ended by itself; it is opened anew")
        if self._opened is None:
            try:
                make = _opened_on_loop if self.is_async else _opened
                self._opened = make(self._function)
            except Exception as error:
                raise ResourceUnavailable(self.name, describe(error)) from error

    def _close(self, what_happened: str) -> None:
        opened, self._opened = self._opened, None
        try:
            if opened is not None:
                opened.close()
        except Exception:
            _logger.exception("the resource %s %s", self.name, what_happened)


class Holdings:
    """The resources that one worker uses, until it ends."""

    def __init__(self) -> None:
        self._held: list[Resource] = []
        self._lock = threading.Lock()

    def hold(self, resources: Iterable[Resource]) -> None:
        """Use these too. Raises ResourceUnavailable; then say it again."""
        for resource in resources:
            # Outside of the lock: it may take its time, and others ask for others.
            resource.enter()
            with self._lock:
                is_held = resource in self._held
                if not is_held:
                    self._held.append(resource)
            if is_held:
                resource.leave()

    def close(self) -> None:
        """Use none of them any more."""
        with self._lock:
            while self._held:
                self._held.pop().leave()


def require_open(resources: Iterable[Resource]) -> None:
    """Before handlers are called. Not on their event loop. Raises ResourceUnavailable."""
    for resource in resources:
        resource.require_open()


def find(resources: Sequence[Resource], annotation: Any) -> Resource | None:
    """The resource that a parameter asks for."""
    return next((each for each in resources if each.annotation == annotation), None)


def given(values: Mapping[Any, Any]) -> list[Resource]:
    """Values, by annotation, in the place of what an application's generators would make."""
    made = [
        Resource(str(annotation), annotation, lambda value=value: (yield value))  # type: ignore[misc]
        for annotation, value in values.items()
    ]
    for resource in made:
        resource.enter()
    return made


def bound(function: Callable[..., Any], places: Mapping[int, Resource]) -> Callable[..., Any]:
    """The handler, to be called without the parameters in these places."""
    if not places:
        return function

    def arguments(others: tuple[Any, ...]) -> list[Any]:
        complete = list(others)
        for place in sorted(places):
            complete.insert(place, places[place].value)
        return complete

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*others: Any) -> Any:
            return await function(*arguments(others))

        return call_async

    @wraps(function)
    def call(*others: Any) -> Any:
        return function(*arguments(others))

    return call


def _opened(function: Callable[[], Any]) -> Opened:
    manager = contextmanager(function)()
    return Opened(manager.__enter__(), lambda: manager.__exit__(None, None, None))


def _opened_on_loop(function: Callable[[], Any]) -> Opened:
    loop = enter_loop()
    opened: Future[Any] = Future()
    is_over = asyncio.Event()
    held = asyncio.run_coroutine_threadsafe(
        _hold(asynccontextmanager(function)(), opened, is_over), loop
    )

    def close() -> None:
        loop.call_soon_threadsafe(is_over.set)
        try:
            held.result()
        finally:
            leave_loop()

    try:
        return Opened(opened.result(), close, held.done)
    except BaseException:
        leave_loop()
        raise


async def _hold(
    manager: AbstractAsyncContextManager[Any], opened: Future[Any], is_over: asyncio.Event
) -> None:
    """Open and close in one task, as task groups and cancel scopes want it."""
    try:
        async with manager as value:
            opened.set_result(value)
            await is_over.wait()
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)
