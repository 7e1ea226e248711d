"""Replaces data keys that have been in use for long enough, while everybody goes on."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.errors import ExtraMissing, KeyRefused, KeyUnavailable, OperationRefused
from penstock.stores.data_keys import DataKeys
from penstock.telemetry import signals
from penstock.telemetry.bus import emit


def rotate_due(connection: psycopg.Connection[Any], schema: str) -> None:
    """Make new keys where they are due. What a KMS refuses is said, and tried in the next round.

    Senders take a new key up within half a minute; until then, and for reading, the old one holds.
    """
    data_keys = DataKeys(schema)
    for stream_name in data_keys.due_for_rotation(connection):
        try:
            version = data_keys.rotate(connection, stream_name)
        except KeyUnavailable as error:
            emit(signals.KeyRotationFailed(stream_name, str(error)))
            # The others' KMS is likely the same, and each question would wait for it in vain.
            return
        except (KeyRefused, ExtraMissing, OperationRefused) as error:
            emit(signals.KeyRotationFailed(stream_name, str(error)))
        else:
            emit(signals.KeyRotated(stream_name, version))
