"""What `pipeline.source` takes, checked while the application is imported."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from penstock.core.outgoing import Unset, is_stream_name
from penstock.core.require import require
from penstock.core.sources import Source
from penstock.errors import RegistrationError, SettingsError
from penstock.stores.postgres import sqlalchemy_url
from penstock.stores.queries import with_schema
from penstock.stores.redis_log import RedisLog

REDIS_PREFIX = "penstock"
"""The producer's, unless it has set another."""
DATABASE_FORM = "postgresql://user:password@host:port/name"
REDIS_FORM = "redis://host:port/0"
ARCHIVE_FORM = "s3://bucket/prefix"
ARCHIVE_SCHEMES = ("", "s3", "file", "memory")


def checked_source(
    name: str,
    *,
    redis_url: str | Unset | None,
    redis_prefix: str,
    mac_key: str | None,
    source_url: str | None,
    source_schema: str,
    archive_url: str | None,
    brownout: bool,
) -> Source:
    """A source as the application wrote it. Raises RegistrationError with what to write."""
    _require(is_stream_name(name), name, "that cannot name a stream. Write the producer's name.")
    _require(
        mac_key is not None or source_url is not None,
        name,
        "without a key nobody could tell its entries from forged ones. Write mac_key=…, which "
        "`penstock streams share --show-secrets` prints on the producer's side, or source_url=…, "
        "whose database tells it.",
    )
    _require(
        redis_url is not None or source_url is not None,
        name,
        f'with redis_url=None nothing is left to read from. Write redis_url="{REDIS_FORM}", or '
        f'source_url="{DATABASE_FORM}".',
    )
    _require(
        not brownout or source_url is not None,
        name,
        "brownout=True reads the producer's database while Redis is away, and none is given. "
        f'Write source_url="{DATABASE_FORM}", or leave brownout out.',
    )
    source = Source(
        stream_name=name,
        redis_url=redis_url,
        redis_prefix=redis_prefix,
        mac_key=mac_key,
        source_url=source_url,
        source_schema=source_schema,
        archive_url=archive_url,
        brownout=brownout,
    )
    _require_forms(source)
    return source


def _require_forms(source: Source) -> None:
    """URLs and keys are secrets: what is wrong with them is said without repeating them."""
    name, redis_url, source_url = source.stream_name, source.redis_url, source.source_url
    prefix = source.redis_prefix
    _require(bool(prefix), name, "redis_prefix is empty. Write the producer's, or leave it out.")
    if redis_url is not None and not isinstance(redis_url, Unset):
        form = f'redis_url cannot be used. Write redis_url="{REDIS_FORM}", or rediss://….'
        _attempt(name, form, lambda: RedisLog(redis_url, prefix=prefix))
    if source_url is not None:
        form = f'source_url cannot be used. Write source_url="{DATABASE_FORM}".'
        _attempt(name, form, lambda: sqlalchemy_url(source_url))
    if source.archive_url is not None:
        form = f'archive_url cannot be used. Write archive_url="{ARCHIVE_FORM}", or a folder.'
        url = str(source.archive_url)
        _require(bool(url) and urlsplit(url).scheme in ARCHIVE_SCHEMES, name, form)
    form = (
        "mac_key cannot be used. Write it as `penstock streams share --show-secrets` prints it: "
        "id:secret, several with commas between them."
    )
    _attempt(name, form, lambda: source.keys)
    form = "source_schema is no plain lower-case name. Write the producer's schema."
    _attempt(name, form, lambda: with_schema("", source.source_schema))


def _attempt(name: str, problem: str, parse: Callable[[], object]) -> None:
    try:
        parse()
    except (SettingsError, AttributeError, TypeError):
        # From nothing: the error's own text or its traceback might show a secret.
        raise RegistrationError(f"pipeline.source({name!r}, …): {problem}") from None


def _require(claim: bool, name: str, problem: str) -> None:
    require(claim, f"pipeline.source({name!r}, …): {problem}", RegistrationError)
