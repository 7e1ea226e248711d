"""What an error says about the event that it happened on."""

from __future__ import annotations

from pydantic import ValidationError

from penstock.errors import ContractError, RetryableError

# Lock timeouts, serialisation failures and deadlocks say nothing about the event.
NOBODYS_FAULT = frozenset({"40001", "40P01", "55P03"})
DESCRIPTION_LENGTH_MAX = 500


def is_nobodys_fault(error: BaseException) -> bool:
    """Whether trying again costs the event no attempt."""
    sqlstate = getattr(error, "sqlstate", None) or getattr(
        getattr(error, "orig", None), "sqlstate", None
    )
    return sqlstate in NOBODYS_FAULT


def asked_delay_seconds(error: BaseException) -> float | None:
    """The pause that a handler asked for."""
    return error.after_seconds if isinstance(error, RetryableError) else None


def as_contract_error(error: ValidationError, where: str) -> ContractError:
    """Which fields do not fit, without their values: those may be confidential."""
    fields = "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'payload'}: {problem['msg']}"
        for problem in error.errors(include_input=False, include_context=False, include_url=False)
    )
    return ContractError(f"The payload of {where} does not fit {error.title}: {fields}")


def describe(error: BaseException) -> str:
    """One line for people. Works for errors whose own text fails."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may raise anything here
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {' '.join(text.split())}"[:DESCRIPTION_LENGTH_MAX]
