"""Connections to PostgreSQL: any URL in, psycopg out, errors in Penstock's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result

from penstock.core.masking import masked_url
from penstock.errors import PenstockError, ServerUnavailable, ServerUnsuitable, SettingsError
from penstock.stores.queries import Queries

if TYPE_CHECKING:
    from sqlalchemy.engine import URL
    from sqlalchemy.exc import DBAPIError

VERSION_MIN = 140000
_ESCAPE = (
    "Signs in a password that mean something in a URL have to be escaped: %40 for @, %2F for /, "
    "%3A for :, %23 for #, %3F for ?, %25 for %, %20 for a space."
)
STAGE_LOCK_SECONDS = 5.0
ISOLATION = psycopg.IsolationLevel.READ_COMMITTED
"""Of all transactions that Penstock begins, also behind a pooler: locks decide, and an older
snapshot would not see what was committed while one was waited for."""
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
    address = f"{address}?{options.replace('+', '%20')}" if options else address
    try:
        conninfo_to_dict(address)
    except psycopg.ProgrammingError:
        # What libpq says quotes what it could not read: a password, as a rule.
        raise SettingsError(f"database_url cannot be read. {_ESCAPE}") from None
    return address


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
    return {
        **_LIVENESS,
        "application_name": application_name[:63],
        # Not what the role or the database says: what others sent has to come through.
        "client_encoding": "UTF8",
    }


def accustom(connection: psycopg.BaseConnection[Any], *, relies_on_locks: bool = False) -> None:
    """Have a new connection of Penstock's own speak as psycopg reads: no role's DateStyle.

    And prepare nothing where a pooler may let another backend answer, which knows nothing of it.
    With `relies_on_locks`, have whoever has waited for one see what was committed meanwhile,
    whatever isolation the role is set to. Behind a pooler the next client would inherit that.
    """
    if is_pooled(connection):
        connection.prepare_threshold = None
    elif relies_on_locks:
        _set(connection, b"SET default_transaction_isolation = 'read committed'")
    if not (connection.pgconn.parameter_status(b"DateStyle") or b"ISO").startswith(b"ISO"):
        _set(connection, b"SET DateStyle = 'ISO'")


def _set(connection: psycopg.BaseConnection[Any], statement: bytes) -> None:
    # Past the connection's own ways: outside of any transaction, which could take it back.
    answer = connection.pgconn.exec_(statement)
    if answer.status != pq.ExecStatus.COMMAND_OK:
        # A server that is just going away, as a rule; to psycopg that is an error of no kind.
        raise psycopg.OperationalError(str(error_from_result(answer)))


def is_pooled(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether who answers is another backend than the one that this connection was told of."""
    # Past the connection's own ways: it begins no transaction.
    answer = connection.pgconn.exec_(b"SELECT pg_backend_pid()")
    pid = answer.get_value(0, 0) if answer.status == pq.ExecStatus.TUPLES_OK else None
    return pid is not None and int(pid) != connection.pgconn.backend_pid


def connect(
    url: str, application_name: str, *, autocommit: bool = True
) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection of Penstock's own. Raises ServerUnavailable where there is no server."""
    try:
        connection = psycopg.connect(
            conninfo(url), autocommit=autocommit, **connect_arguments(application_name)
        )
        accustom(connection, relies_on_locks=True)
    except psycopg.OperationalError as error:
        raise unreachable(url, error) from error
    connection.isolation_level = ISOLATION
    if connection.info.server_version < VERSION_MIN:
        version = connection.info.server_version // 10000
        connection.close()
        raise ServerUnsuitable(f"PostgreSQL {version} is too old: Penstock needs 14 or newer.")
    return connection


def connect_stage(url: str, application_name: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A stage's connection: whoever holds a table for longer has the stage try again later.

    One that waited on would be taken for hung, and leave its session waiting on the server.
    """
    connection = connect(url, application_name)
    try:
        limit(connection, lock_seconds=STAGE_LOCK_SECONDS)
    except psycopg.OperationalError as error:
        connection.close()
        raise unreachable(url, error) from error
    return connection


def limit(
    connection: psycopg.Connection[Any],
    *,
    lock_seconds: float | None = None,
    statement_seconds: float | None = None,
) -> None:
    """Let no statement wait for a lock, or run, for longer than this. Behind a pooler, no limit."""
    connection.execute(
        Queries("session.sql")["limit"],
        {
            "lock_timeout": _milliseconds(lock_seconds),
            "statement_timeout": _milliseconds(statement_seconds),
            "backend_pid": connection.pgconn.backend_pid,
        },
    )


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else str(int(seconds * 1000))


def unreachable(url: str, error: Exception) -> ServerUnavailable:
    """The one sentence for a server that does not answer."""
    # With two of these signs, what libpq takes for a host is a part of the password.
    reason = _ESCAPE if url.count("@") > 1 else str(error).strip()
    return ServerUnavailable(
        f"PostgreSQL at {masked_url(url)} cannot be reached: {reason} "
        "Nothing was lost; check the address, then that the server accepts connections."
    )


def raise_refusal(url: str, error: DBAPIError) -> NoReturn:
    """Say why SQLAlchemy got no connection: it wraps what psycopg says. For a bug of ours, that."""
    if isinstance(error.orig, psycopg.OperationalError):
        raise unreachable(url, error.orig) from error
    raise error


NO_ANSWER = (
    psycopg.OperationalError,
    psycopg.InternalError,
    psycopg.errors.InsufficientPrivilege,
)
"""What prevents an answer: the server, or what this role may see of it."""


_CUT_SHORT = {
    "40P01": "since other transactions waited for it in a circle",
    "55P03": "since another transaction was in its way",
    "57014": "at its time limit (statement_timeout) or because somebody cancelled it",
}


def trouble_in_words(error: BaseException) -> PenstockError | None:
    """What a server's error means to whoever gave a command; None: that is a bug of ours."""
    cause = error if isinstance(error, psycopg.Error) else getattr(error, "orig", None)
    if not isinstance(cause, psycopg.Error):
        return None
    told = str(cause).strip().partition("\n")[0]
    if is_lost(cause):
        return ServerUnavailable(
            f"The connection to PostgreSQL broke: {told}. What was committed before stays; give "
            "the command again once the server is back."
        )
    if is_outage(cause):
        return ServerUnavailable(
            f"PostgreSQL cannot do this now: {told}. What was committed before stays; try again "
            "once the server is well."
        )
    if cause.sqlstate in _CUT_SHORT:
        return ServerUnavailable(
            f"PostgreSQL broke this off, {_CUT_SHORT[cause.sqlstate]}: {told}. What was committed "
            "before stays, the rest did not happen; give the command again."
        )
    if isinstance(cause, psycopg.errors.InsufficientPrivilege):
        return ServerUnsuitable(
            f"PostgreSQL refuses this role: {told}. Use a role that may do this, or grant it what "
            "docs/POLICY.md lists for its task."
        )
    return None


_LOST_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})
"""Ended by an administrator, a crash, a shutdown, an idle limit or transaction_timeout; 57014 is
only a cancel."""

_OF_CONNECTIONS = (psycopg.OperationalError, psycopg.InterfaceError)


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the connection is gone, rather than that a statement is wrong.

    What has no SQLSTATE no server has said: of a connection that libpq could not write to, psycopg
    makes an error of no kind in particular. Of what the server says the state alone counts: some
    time limits end a connection with what psycopg calls an internal error.
    """
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return error.sqlstate.startswith("08") or error.sqlstate in _LOST_STATES
    if isinstance(error, _OF_CONNECTIONS) or type(error) is psycopg.DatabaseError:
        return True
    original = getattr(error, "orig", None)
    return original is not None and is_lost(original)


READ_ONLY_STATE = "25006"
_OUTAGE_STATES = frozenset({READ_ONLY_STATE, "53000", "53100", "53200", "53300", "58030"})
"""Takes no writes, has no room, memory or connections left, or cannot use its disk."""


def is_outage(error: BaseException) -> bool:
    """Whether the server is to blame for an error, and not the statement: waiting helps."""
    return is_lost(error) or state_of(error) in _OUTAGE_STATES


def state_of(error: BaseException) -> str | None:
    """The SQLSTATE of an error of psycopg's, also where SQLAlchemy has wrapped it."""
    cause = error if isinstance(error, psycopg.Error) else getattr(error, "orig", None)
    return cause.sqlstate if isinstance(cause, psycopg.Error) else None
