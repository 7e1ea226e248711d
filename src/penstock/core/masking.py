"""Addresses as anybody may see them."""

from __future__ import annotations

import re
from urllib.parse import unquote

# From the first colon to the last @: an unescaped sign inside a password must not leave a part of
# it readable.
_PASSWORD = re.compile(r"(://[^:]*):.*@", re.DOTALL)
_OPTION = re.compile(r"([?&])([^=&]*)=[^&]*")
_SECRET_NAME = re.compile(r"pass|secret|token|key|credential", re.IGNORECASE)


def masked_url(url: str) -> str:
    """The URL without its secrets, also where it is malformed."""
    return _PASSWORD.sub(r"\1:***@", _OPTION.sub(_masked_option, url))


def _masked_option(option: re.Match[str]) -> str:
    is_secret = _SECRET_NAME.search(unquote(option[2])) is not None
    return f"{option[1]}{option[2]}=***" if is_secret else option[0]
