"""Addresses as anybody may see them."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^:/@?]*):.*@")
_PASSWORD_IN_QUERY = re.compile(r"([?&][^=&]*pass[^=&]*=)[^&]*", re.IGNORECASE)


def masked_url(url: str) -> str:
    """The URL without its password, also where it is malformed."""
    without_query = _PASSWORD_IN_QUERY.sub(r"\1***", url)
    # To the last @: an unescaped one inside a password must not leave its tail readable.
    return _PASSWORD.sub(r"\1:***@", without_query)
