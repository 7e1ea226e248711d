"""A pipeline on other servers for a while: for tests, which bring their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from penstock.app.pipeline import Pipeline

# What is made of the settings at first use.
_MADE: Final = ("resolved", "engine", "async_engine", "timers", "scheduler", "_sender")


@contextmanager
def moved(pipeline: Pipeline, **settings: Any) -> Iterator[None]:
    """Use these settings instead of the application's, whatever has been made of those.

    A server that the application does without, by None, it does without here too. Streams of other
    services are its own meanwhile: what reads them tells their databases how far it is, and these
    would give up for it what the real consumers have not read.
    """
    state = vars(pipeline)
    former: dict[str, Any] = {name: state.pop(name) for name in _MADE if name in state}
    arguments = state["_arguments"]
    own = {name: value for name, value in settings.items() if arguments.get(name, "") is not None}
    state["_arguments"] = {**arguments, **own}
    try:
        with state["_registry"].owning_sources():
            yield
    finally:
        if "timers" in state:
            pipeline.timers.close()
        if "engine" in state:
            pipeline.engine.dispose()
        if "async_engine" in state:
            # They can be closed on their loop only, which may be gone.
            pipeline.async_engine.sync_engine.dispose(close=False)
        for name in _MADE:
            state.pop(name, None)
        state.update(former, _arguments=arguments)
