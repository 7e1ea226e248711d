"""Key management services: they wrap data keys, and unwrap them for whoever has the right.

Which one holds a key, its id says: `arn:aws:kms:…`, `alias/…` or `aws:…` is AWS KMS, `file:/path`
a key file on this machine, for development.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final

from penstock.errors import UsageError
from penstock.stores.kms.aws import AwsKms
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.kms.protocol import Kms, NewKey, wrapping_context

__all__ = ["Kms", "NewKey", "is_file", "kms_for", "wrapping_context"]

FILE_PREFIX: Final = "file:"
_AWS_PREFIXES: Final = ("arn:aws", "alias/", "aws:")
_CLIENTS_MAX: Final = 64


def is_file(kms_key_id: str) -> bool:
    """Whether the key is a file on this machine."""
    return kms_key_id.startswith(FILE_PREFIX)


@lru_cache(maxsize=_CLIENTS_MAX)
def kms_for(kms_key_id: str) -> Kms:
    """What wraps and unwraps with this key. Raises UsageError for an id of no known kind.

    Nothing is asked yet, so nothing is known of the key either.
    """
    if is_file(kms_key_id):
        return KeyFile(kms_key_id.removeprefix(FILE_PREFIX))
    if kms_key_id.startswith(_AWS_PREFIXES):
        return AwsKms(kms_key_id.removeprefix("aws:"))
    raise UsageError(
        f"{kms_key_id!r} is no key that data keys can be wrapped with. Write arn:aws:kms:…, "
        "alias/NAME or aws:KEY-ID for AWS KMS, or file:/path for a key file in development."
    )


# Two processes on one connection would get each other's answers.
os.register_at_fork(after_in_child=kms_for.cache_clear)
