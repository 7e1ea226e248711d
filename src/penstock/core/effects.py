"""Effects on the outside as values: their names and keys, and their results as JSON."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final, Literal

import orjson
import pydantic_core
from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError

from penstock.core.encoding import encode_plain, is_unstorable_text, require_size, require_unmasked
from penstock.core.require import require
from penstock.core.sealing import Box
from penstock.core.settings import MEBIBYTE
from penstock.errors import ContractError, InvalidEvent, UsageError

EFFECT_LENGTH_MAX: Final = 200
RESULT_BYTES_MAX: Final = MEBIBYTE
ADAPTERS_MAX: Final = 256

Interrupted = Literal["retry", "bury"]
"""What an unknown outcome of an earlier call means: call again, or leave it to people."""


class ResultUnkeepable(Exception):
    """A result cannot be written as JSON and read back; its text says why, without the value."""


def idempotency_key(consumer: str, event_uuid: str, effect: str) -> str:
    """The same for every attempt at this effect of this event by this consumer."""
    identity = "\0".join((consumer, event_uuid, effect))
    return hashlib.sha256(identity.encode()).hexdigest()


def require_call(effect: object, fn: object, interrupted: object) -> None:
    """Raise UsageError for a call to the outside that could not be recorded."""
    require(
        isinstance(effect, str) and 1 <= len(effect) <= EFFECT_LENGTH_MAX,
        f"once() was given an effect that is not a text of 1 to {EFFECT_LENGTH_MAX} characters. "
        'Nothing was called; name it after what it does: once("receipt", send_receipt, …).',
        UsageError,
    )
    require(
        not is_unstorable_text(effect),
        "once() was given an effect whose name has a NUL character or half a surrogate pair, "
        "which PostgreSQL cannot store. Nothing was called; use plain text.",
        UsageError,
    )
    require(
        callable(fn),
        f"once({effect!r}, …) was given a {type(fn).__name__} instead of a function. Nothing was "
        f"called by once; pass the function and its arguments: once({effect!r}, send, address).",
        UsageError,
    )
    require(
        interrupted in ("retry", "bury"),
        f"once({effect!r}, …, interrupted={interrupted!r}) must say what an unknown outcome means. "
        'Nothing was called; write interrupted="retry" or interrupted="bury".',
        UsageError,
    )


def is_async(fn: object) -> bool:
    """Whether calling it gives something to await, also through functools.partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    # Of its type: calling a class makes an instance, whatever its instances do when called.
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def call_plain(fn: Callable[[], Any], effect: str) -> Any:
    """Call a plain function. Raises UsageError where it only made a coroutine, and ran nothing."""
    value = fn()
    if inspect.iscoroutine(value):
        value.close()
        raise UsageError(
            f"What once({effect!r}, …) called gave a coroutine, and nobody would await it. It was "
            "closed before it ran, so nothing happened; pass the async function itself instead of "
            f"a lambda, and await once({effect!r}, …)."
        )
    return value


class ResultFormat:
    """How a result is kept: as plain JSON, or as the JSON of a type; sealed, if its event was.

    Raises UsageError for something that is not a type, before anything is called.
    """

    def __init__(self, returns: Any = None, box: Box | None = None, purpose: str = "") -> None:
        self._box = box
        self._purpose = purpose
        self._adapter = None if returns is None else _adapter_of(returns)
        self._name = returns.__name__ if isinstance(returns, type) else str(returns)

    def encode(self, value: Any) -> str:
        """The result as JSON that can be read back. Raises ResultUnkeepable."""
        try:
            encoded = encode_plain(self._plain(value), "it", "result")
            require_unmasked(encoded, value, "it", "result")
            require_size(encoded, RESULT_BYTES_MAX, "it", "result")
            if self._adapter is not None:
                self._adapter.validate_json(encoded)
        except InvalidEvent as error:
            # What follows says what to do about an event that was not sent.
            raise ResultUnkeepable(str(error).partition(" Nothing was sent")[0]) from None
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything here
            # Without the cause: its text may quote the value.
            kind = "plain values" if self._adapter is None else self._name
            raise ResultUnkeepable(
                f"{type(value).__name__} cannot be written as JSON and read back as {kind} "
                f"({type(error).__name__})."
            ) from None
        text = encoded.decode()
        if self._box is None:
            return text
        return orjson.dumps(self._box.seal(text, self._purpose)).decode()

    def decode(self, text: str, what: str) -> Any:
        """The result from its JSON. Raises ContractError where the type has changed meanwhile."""
        if self._box is not None:
            text = self._box.open(orjson.loads(text), self._purpose)
        if self._adapter is None:
            return orjson.loads(text)
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            raise ContractError(
                f"{what} has happened, and its recorded result does not fit {self._name} "
                f"({error.error_count()} errors). It is not called again; deploy a type that reads "
                "the recorded result, then redrive the event."
            ) from None

    def _plain(self, value: Any) -> Any:
        if self._adapter is None:
            return pydantic_core.to_jsonable_python(value)
        # By alias, because that is how the type reads it back; and whether it does is what counts,
        # so a provider's plain dictionary may stand for a model.
        return self._adapter.dump_python(value, mode="json", by_alias=True, warnings=False)


def _adapter_of(returns: Any) -> TypeAdapter[Any]:
    try:
        try:
            return _cached_adapter(returns)
        except TypeError:
            # Not hashable, perhaps: then it is made anew each time.
            return _new_adapter(returns)
    except (PydanticUserError, PydanticUndefinedAnnotation, NameError, TypeError) as error:
        raise UsageError(
            f"once(…, returns={returns!r}) names no type that pydantic can read and write "
            f"({type(error).__name__}). Nothing was called; give a pydantic model, a dataclass or "
            "a type such as list[int]."
        ) from error


@functools.lru_cache(maxsize=ADAPTERS_MAX)
def _cached_adapter(returns: Any) -> TypeAdapter[Any]:
    return _new_adapter(returns)


def _new_adapter(returns: Any) -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(returns)
    # A name that is not defined would otherwise be missed at the first use: after the call.
    adapter.rebuild(raise_errors=True)
    return adapter
