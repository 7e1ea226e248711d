"""One way to state a precondition."""

from __future__ import annotations

from penstock.errors import PenstockError, SettingsError


def require(claim: bool, message: str, error: type[PenstockError] = SettingsError) -> None:
    """Raise `error(message)` unless the claim holds."""
    if not claim:
        raise error(message)
