"""A known text that must not be where it could be read: looked for in files, servers and words."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import redis


def found_in_files(canary: str, *folders: Path) -> list[Path]:
    """The files below these folders that hold it, plainly or in base64."""
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and is_in(canary, path.read_bytes())
    ]


def found_in_database(canary: str, connection: psycopg.Connection[Any]) -> list[str]:
    """The files of the whole cluster that hold it: tables, indexes and WAL, all written out."""
    connection.execute("CHECKPOINT")
    ((folder,),) = connection.execute("SHOW data_directory").fetchall()
    return [str(path) for path in found_in_files(canary, Path(folder))]


def found_in_redis(canary: str, url: str) -> list[str]:
    """The keys whose name or value holds it."""
    with closing(redis.Redis.from_url(url)) as client:
        return [
            key.decode()
            for key in client.scan_iter()
            if is_in(canary, key) or any(is_in(canary, part) for part in _parts(client, key))
        ]


def is_in(canary: str, data: bytes) -> bool:
    """Whether the data has it, as it is or in any of the three alignments of base64."""
    raw = canary.encode()
    if raw in data:
        return True
    # Of each alignment the part that does not depend on what stands before and behind.
    encoded = (base64.b64encode(bytes(shift) + raw)[4:-4] for shift in (1, 2, 3))
    return any(part in data for part in encoded)


def found_in_words(canary: str, words: Iterable[object]) -> list[str]:
    """Whatever was said that has it."""
    return [str(said) for said in words if is_in(canary, str(said).encode())]


def _parts(client: Any, key: bytes) -> Iterator[bytes]:
    # Values and not DUMP: what a server compresses can still be read.
    kind = client.type(key)
    if kind == b"stream":
        for _, fields in client.xrange(key):
            yield from fields.values()
    elif kind == b"hash":
        yield from client.hgetall(key).values()
    elif kind == b"string":
        yield client.get(key) or b""
