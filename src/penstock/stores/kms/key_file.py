"""A wrapping key in a file: for development, where everybody on the machine is oneself."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Final

import orjson

from penstock.core.sealing import KEY_BYTES, NONCE_BYTES, cipher_of
from penstock.errors import KeyRefused, KeyUnavailable
from penstock.stores.kms.protocol import Context, NewKey

_MODE: Final = 0o600
_OTHERS: Final = 0o077


class KeyFile:
    """A file with 32 random bytes in base64, for its owner's eyes only.

    It is read at every use: without the file, or without the right to read it, nothing opens.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def create(self) -> bool:
        """Make the file unless there is one; returns whether it was made. Raises KeyRefused.

        Raises ExtraMissing where nothing here could use it.
        """
        secret = os.urandom(KEY_BYTES)
        cipher_of(secret)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        except FileExistsError:
            return False
        except OSError as error:
            raise KeyRefused(
                f"The key file {self._path} cannot be made: {error.strerror}. Nothing was sealed "
                "or opened; name a place in a folder that is there and this user's."
            ) from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secret) + b"\n")
            file.flush()
            # A key that wraps others must not be lost to a power failure that those survive.
            os.fsync(descriptor)
        return True

    def generate(self, context: Context) -> NewKey:
        """A new data key, wrapped for the context."""
        return self.wrap(os.urandom(KEY_BYTES), context)

    def wrap(self, secret: bytes, context: Context) -> NewKey:
        """A data key that exists, wrapped for the context."""
        nonce = os.urandom(NONCE_BYTES)
        wrapped = nonce + cipher_of(self._read()).encrypt(nonce, secret, _bytes_of(context))
        return NewKey(secret, wrapped, f"file:{self._path}")

    def unwrap(self, wrapped: bytes, context: Context) -> bytes:
        """The data key. Only for the context that it was wrapped for."""
        # First: it says which package is missing.
        cipher = cipher_of(self._read())
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

        try:
            nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
            secret: bytes = cipher.decrypt(nonce, sealed, _bytes_of(context))
        except (InvalidTag, ValueError):
            raise KeyRefused(
                f"The key file {self._path} has not wrapped this data key for {_named(context)}: "
                "either was replaced or altered. Nothing was opened; restore the one that it was "
                "wrapped with."
            ) from None
        return secret

    def _read(self) -> bytes:
        try:
            mode = self._path.stat().st_mode
            text = self._path.read_bytes()
        except (FileNotFoundError, PermissionError) as error:
            raise KeyRefused(
                f"The key file {self._path} cannot be read: {error.strerror}. Nothing was sealed "
                "or opened; put it back, or let this user read it."
            ) from error
        except OSError as error:
            raise KeyUnavailable(
                f"The key file {self._path} cannot be read now: {error.strerror}. Nothing was "
                "sealed or opened."
            ) from error
        if mode & _OTHERS:
            raise KeyRefused(
                f"The key file {self._path} is open to others, so it is not used. Nothing was "
                f"sealed or opened; write chmod 600 {self._path}."
            )
        try:
            secret = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise KeyRefused(
                f"The key file {self._path} holds no key: that would be {KEY_BYTES} bytes in "
                "base64. Nothing was sealed or opened; restore it."
            )
        return secret


def _bytes_of(context: Context) -> bytes:
    return orjson.dumps(dict(context), option=orjson.OPT_SORT_KEYS)


def _named(context: Context) -> str:
    return ", ".join(f"{name}={value}" for name, value in context.items())
