"""Connections to PostgreSQL: any URL in, psycopg out, errors in Penstock's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.core.masking import masked_url
from penstock.errors import ServerUnavailable, ServerUnsuitable, SettingsError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

VERSION_MIN = 140000
# A server that vanished without a word is noticed within these limits instead of hours.
_LIVENESS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


def sqlalchemy_url(url: str) -> URL:
    """The URL for SQLAlchemy with psycopg, whatever driver it named."""
    # Here: commands that only look do without SQLAlchemy, and its import is most of their time.
    from sqlalchemy.engine import make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise SettingsError(
            "database_url cannot be parsed. Write postgresql://user:password@host:port/name"
        ) from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingsError(
            f"database_url names {parsed.get_backend_name()!r}; Penstock keeps its truth in "
            "PostgreSQL. Write postgresql://user:password@host:port/name"
        )
    return parsed.set(drivername="postgresql+psycopg")


def conninfo(url: str) -> str:
    """The same address for libpq. Raises SettingsError for anything else."""
    if _is_libpqs(url):
        return url
    plain = sqlalchemy_url(url).set(drivername="postgresql")
    address, _, options = plain.render_as_string(hide_password=False).partition("?")
    # SQLAlchemy writes a space in an option as +, which libpq takes for a plus.
    return f"{address}?{options.replace('+', '%20')}" if options else address


def _is_libpqs(url: str) -> bool:
    """Whether libpq takes a URL for what SQLAlchemy would; a + is a space to only one of them."""
    if not url.startswith("postgresql://") or "+" in url:
        return False
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return False
    return True


def connect_arguments(application_name: str) -> dict[str, Any]:
    """What every connection of Penstock's own sets."""
    return {**_LIVENESS, "application_name": application_name[:63]}


def connect(
    url: str, application_name: str, *, autocommit: bool = True
) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection of Penstock's own. Raises ServerUnavailable where there is no server."""
    try:
        connection = psycopg.connect(
            conninfo(url), autocommit=autocommit, **connect_arguments(application_name)
        )
    except psycopg.OperationalError as error:
        raise unreachable(url, error) from error
    if connection.info.server_version < VERSION_MIN:
        version = connection.info.server_version // 10000
        connection.close()
        raise ServerUnsuitable(f"PostgreSQL {version} is too old: Penstock needs 14 or newer.")
    return connection


def unreachable(url: str, error: Exception) -> ServerUnavailable:
    """The one sentence for a server that does not answer."""
    return ServerUnavailable(
        f"PostgreSQL at {masked_url(url)} cannot be reached: {str(error).strip()} "
        "Nothing was lost; check the address, then that the server accepts connections."
    )


_LOST_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03"})
"""Ended by an administrator, a crash, a shutdown or an idle limit; 57014 is only a cancel."""


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the connection is gone, rather than that a statement is wrong."""
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        sqlstate = error.sqlstate or ""
        return not sqlstate or sqlstate.startswith("08") or sqlstate in _LOST_STATES
    original = getattr(error, "orig", None)
    return original is not None and is_lost(original)
