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
from functools import wraps
from typing import Any, TypeAlias

from penstock.core.failures import describe
from penstock.errors import ResourceUnavailable
from penstock.stores.async_worker_connection import enter_loop, leave_loop

Opened: TypeAlias = tuple[Any, Callable[[], object]]
"""What handlers are given, and what closes it."""
_logger = logging.getLogger("penstock")


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
        assert opened is not None, "opened before any handler is called"
        return opened[0]

    def enter(self) -> None:
        """Use it from now on. Raises ResourceUnavailable; nothing is in use then."""
        with self._lock:
            if self._opened is None:
                try:
                    make = _opened_on_loop if self.is_async else _opened
                    self._opened = make(self._function)
                except Exception as error:
                    raise ResourceUnavailable(self.name, describe(error)) from error
            self._users += 1

    def leave(self) -> None:
        """Use it no more; the last one closes it. An error of its own is logged."""
        with self._lock:
            self._users -= 1
            if self._users or self._opened is None:
                return
            (_, close), self._opened = self._opened, None
            try:
                close()
            except Exception:
                _logger.exception("the resource %s failed while it was closed", self.name)


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
    return manager.__enter__(), lambda: manager.__exit__(None, None, None)


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
        return opened.result(), close
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
