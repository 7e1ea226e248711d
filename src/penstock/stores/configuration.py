"""Where settings come from: arguments, environment, pyproject.toml, `penstock dev`, defaults."""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.core.masking import masked_url
from penstock.core.outgoing import UNSET
from penstock.core.settings import Settings
from penstock.errors import SettingsError
from penstock.stores.postgres import conninfo

PREFIX = "PENSTOCK_"
DEV_ENV = Path(".penstock", "dev.env")
# Unless somebody says otherwise.
RENEWALS_PER_LEASE = 3
EXTRA_NAMES = frozenset(
    {
        "PENSTOCK_APP",
        "PENSTOCK_FAILPOINT",
        "PENSTOCK_LOG_FORMAT",
        "PENSTOCK_LOG_LEVEL",
        "PENSTOCK_NO_USERNS",
    }
)
"""Names of the environment that are Penstock's without being settings."""

# Kubernetes announces a service called penstock-… to every pod in these words.
_ANNOUNCED = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_ANNOUNCED_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_REDIS_URL = re.compile(r"(rediss?(\+\w+)?|unix)://.")
_ARCHIVE_URL = re.compile(r"s3://.|file://.|memory://$|(?!.*://).")

_TYPES = get_type_hints(Settings)
NAMES = tuple(field.name for field in fields(Settings))


_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SECRETS = frozenset({"mac_key"})


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings, and for each the place that decided it."""

    settings: Settings
    origins: Mapping[str, str]

    def shown(self) -> dict[str, Any]:
        """Every value as it may be seen by anybody: passwords are masked."""
        return {name: _shown(name, getattr(self.settings, name)) for name in NAMES}


@dataclass(frozen=True, slots=True)
class Given:
    """A value and the place that gave it."""

    value: Any
    origin: str


def resolve(
    arguments: Mapping[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    needs_database: bool = True,
) -> ResolvedSettings:
    """The settings, from the strongest source that names each. Raises SettingsError.

    For whoever needs no database, database_url is empty where nobody names it.
    """
    given = gather(arguments, environ=environ, folder=folder)
    if "database_url" not in given and needs_database:
        raise SettingsError(
            "No setting says where PostgreSQL is. Set PENSTOCK_DATABASE_URL=postgresql://…, or "
            'write database_url = "postgresql://…" under [tool.penstock] in pyproject.toml, or '
            "pass Pipeline(…, database_url=…). While `penstock dev` runs a server in this folder, "
            "none of them is needed."
        )
    values = {"database_url": "", **{name: found.value for name, found in given.items()}}
    lease_seconds = values.get("lease_seconds", default_of("lease_seconds"))
    values.setdefault("lease_renew_seconds", lease_seconds / RENEWALS_PER_LEASE)
    settings = Settings(**values)
    origins = {name: given[name].origin if name in given else "default" for name in NAMES}
    return ResolvedSettings(settings, origins)


def gather(
    arguments: Mapping[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    with_dev_env: bool = True,
) -> dict[str, Given]:
    """What is given anywhere, parsed; settings left to their defaults are absent."""
    folder = folder or Path.cwd()
    sources = [_from_arguments(arguments), _from_environment(environ), _from_pyproject(folder)]
    if with_dev_env:
        sources.append(_from_dev_env(folder))
    found: dict[str, Given] = {}
    for name in NAMES:
        given = next((source[name] for source in sources if name in source), None)
        if given is not None:
            found[name] = Given(_parsed(name, given), given.origin)
    return found


def default_of(name: str) -> Any:
    """The default of a setting; only database_url has none."""
    default = Settings.__dataclass_fields__[name].default
    assert default is not MISSING, f"{name} has no default"
    return default


def write_dev_env(folder: Path, urls: Mapping[str, str]) -> Path:
    """Tell other terminals in this folder where the servers of `penstock dev` are, by setting."""
    path = folder / DEV_ENV
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.joinpath(".gitignore").write_text("*\n", encoding="utf-8")
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    # Readable by its owner alone from the first byte, and complete from the first moment.
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("# Written by `penstock dev`, removed when it ends.\n")
        file.writelines(f"{PREFIX}{name.upper()}={url}\n" for name, url in urls.items())
    unfinished.replace(path)
    return path


def remove_dev_env(folder: Path) -> None:
    """Forget the servers of `penstock dev`; safe to repeat."""
    folder.joinpath(DEV_ENV).unlink(missing_ok=True)


# ── sources ────────────────────────────────────────────────────────────────────────────────────


def _from_arguments(arguments: Mapping[str, Any]) -> dict[str, Given]:
    given = {name: value for name, value in arguments.items() if value is not UNSET}
    for name in given:
        _refuse_unknown(name, NAMES, "an argument")
    return {name: Given(value, "argument") for name, value in given.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    return dict(
        _from_variables(
            {name: value for name, value in environ.items() if not _is_announced(name, value)},
            where="the environment",
        )
    )


def _from_variables(
    variables: Mapping[str, str], *, where: str, origin: str | None = None
) -> Iterator[tuple[str, Given]]:
    known = {PREFIX + name.upper(): name for name in NAMES}
    for variable, value in variables.items():
        if not variable.startswith(PREFIX) or variable in EXTRA_NAMES:
            continue
        _refuse_unknown(variable, [*known, *EXTRA_NAMES], where)
        yield known[variable], Given(value, origin or variable)


def _is_announced(variable: str, value: str) -> bool:
    if not variable.startswith(PREFIX):
        return False
    is_address = variable.endswith("_PORT") and _ANNOUNCED_ADDRESS.match(value) is not None
    return is_address or _ANNOUNCED.search(variable) is not None


def _from_pyproject(folder: Path) -> dict[str, Given]:
    above = (
        parent / "pyproject.toml" for parent in (folder.absolute(), *folder.absolute().parents)
    )
    path = next((path for path in above if path.is_file()), None)
    if path is None:
        return {}
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(
            f"{path} cannot be read: {error}. Correct it and start again."
        ) from None
    table = tool.get("penstock", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: tool.penstock must be a table, [tool.penstock].")
    for name in table:
        _refuse_unknown(name, NAMES, f"[tool.penstock] in {path}")
    return {name: Given(value, str(path)) for name, value in table.items()}


def _from_dev_env(folder: Path) -> dict[str, Given]:
    path = folder / DEV_ENV
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"{path} cannot be read: {error}. Remove it and start again.") from None
    pairs = [line.strip().partition("=") for line in lines]
    variables = {
        name.strip(): value.strip()
        for name, equals, value in pairs
        if equals and not name.startswith("#")
    }
    return dict(_from_variables(variables, where=str(path), origin=str(DEV_ENV)))


def _refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, list(known), n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(known))}."
    raise SettingsError(f"{where} gives {name}, which is no setting; {advice}")


# ── values ─────────────────────────────────────────────────────────────────────────────────────


def _parsed(name: str, given: Given) -> Any:
    """The value in the setting's type. Raises SettingsError naming setting, origin and form."""
    value = given.value.strip() if isinstance(given.value, str) else given.value
    if name.endswith("_url"):
        return _parsed_url(name, value, given.origin)
    expected = _TYPES[name]
    if isinstance(expected, UnionType):
        if _is_none(value):
            return None
        expected = get_args(expected)[0]
    parsed = _converted(expected, value)
    if parsed is None:
        # Masked: the value may be a URL that went to the wrong name.
        shown = _shown(name, masked_url(repr(value)))
        raise SettingsError(f"{name} is {shown} (from {given.origin}); expected {_form(expected)}.")
    return parsed


def _converted(expected: Any, value: Any) -> Any:
    """The value in the expected type; None where it does not fit."""
    if get_origin(expected) is Literal:
        return value if value in get_args(expected) else None
    if expected is str:
        return value if isinstance(value, str) and value else None
    if expected is bool:
        return _SWITCH.get(str(value).lower())
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value) if expected is int else float(value)
    except (ValueError, OverflowError):
        return None
    is_exact = math.isfinite(number) and (isinstance(value, str) or number == value)
    return number if is_exact else None


def _parsed_url(name: str, value: Any, origin: str) -> str | None:
    """URLs hold passwords, so their errors do not repeat them."""
    if isinstance(_TYPES[name], UnionType) and _is_none(value):
        return None
    if not isinstance(value, str) or not value:
        raise SettingsError(f"{name} is empty or no text (from {origin}); expected {_form(name)}.")
    if name in ("redis_url", "timer_redis_url"):
        if _REDIS_URL.match(value) is None:
            raise SettingsError(
                f"{name} cannot be understood (from {origin}); expected {_form(name)}."
            )
        return value
    if name == "archive_url":
        if _ARCHIVE_URL.match(value) is None:
            raise SettingsError(
                f"archive_url cannot be understood (from {origin}); expected {_form(name)}."
            )
        return value
    try:
        conninfo(value)
    except SettingsError as error:
        raise SettingsError(f"{error} (from {origin}).") from None
    return value


def _shown(name: str, value: Any) -> Any:
    """A value as it may be seen by anybody."""
    if value is None:
        return None
    if name in _SECRETS:
        return "***"
    return masked_url(value) if name.endswith("_url") else value


def _is_none(value: Any) -> bool:
    return value is None or value == "" or str(value).lower() == "none"


def _form(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(expected))
    forms = {
        int: "a whole number such as 500",
        float: "a number such as 2.5",
        str: "a text that is not empty",
        bool: "true or false",
        "database_url": "postgresql://user:password@host:port/name",
        "redis_url": 'redis://host:port/0, rediss://… or "none"',
        "timer_redis_url": 'redis://host:port/0, rediss://… or "none" (the same as redis_url)',
        "archive_url": 's3://bucket/prefix, file:///folder, the path of a folder or "none"',
    }
    return forms[expected]
