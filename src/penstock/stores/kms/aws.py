"""AWS KMS over its own API. Endpoint, region and credentials are taken as AWS' tools take them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.core.sealing import KEY_BYTES
from penstock.errors import ExtraMissing, KeyRefused, KeyUnavailable
from penstock.stores.kms.protocol import Context, NewKey

if TYPE_CHECKING:
    from mypy_boto3_kms import KMSClient

CONNECT_SECONDS: Final = 2.0
READ_SECONDS: Final = 3.0
# One more try for a connection that was lost; whoever waits here may be in a transaction.
_ATTEMPTS_MAX: Final = 2
# Answers that say nothing about the right to use a key.
_PASSING_CODES: Final = frozenset(
    {
        "DependencyTimeoutException",
        "ExpiredTokenException",
        "KMSInternalException",
        "KeyUnavailableException",
        "LimitExceededException",
        "RequestTimeTooSkewed",
        "ThrottlingException",
    }
)
_PASSING_STATUSES: Final = frozenset({429, *range(500, 600)})


class AwsKms:
    """One key of AWS KMS, by its ARN, id or alias."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._made: KMSClient | None = None

    def generate(self, context: Context) -> NewKey:
        """A new data key, wrapped for the context."""
        answer = self._ask(
            "kms:GenerateDataKey",
            lambda kms: kms.generate_data_key(
                KeyId=self._key, KeySpec="AES_256", EncryptionContext=context
            ),
        )
        return self._new(self._secret_of(answer), answer)

    def wrap(self, secret: bytes, context: Context) -> NewKey:
        """A data key that exists, wrapped for the context."""
        answer = self._ask(
            "kms:Encrypt",
            lambda kms: kms.encrypt(KeyId=self._key, Plaintext=secret, EncryptionContext=context),
        )
        return self._new(secret, answer)

    def unwrap(self, wrapped: bytes, context: Context) -> bytes:
        """The data key. Only for the context that it was wrapped for."""
        answer = self._ask(
            "kms:Decrypt",
            lambda kms: kms.decrypt(
                KeyId=self._key, CiphertextBlob=wrapped, EncryptionContext=context
            ),
        )
        return self._secret_of(answer)

    def _ask(self, right: str, question: Callable[[KMSClient], Any]) -> dict[str, Any]:
        try:
            from botocore.exceptions import (  # noqa: PLC0415 - an extra
                BotoCoreError,
                ClientError,
                NoRegionError,
            )
            from botocore.parsers import ResponseParserError  # noqa: PLC0415
        except ImportError:
            raise ExtraMissing("AWS KMS", "boto3", "aws") from None
        try:
            answer: dict[str, Any] = question(self._client())
        except ClientError as error:
            raise self._translated(error, right) from error
        except NoRegionError as error:
            raise KeyRefused(
                f"Nothing tells in which region {self._key} is, so KMS was not asked. Nothing was "
                "sealed or opened; set AWS_REGION or AWS_DEFAULT_REGION, or name the key by its "
                "ARN."
            ) from error
        except (BotoCoreError, ResponseParserError) as error:
            raise self._unavailable(str(error)) from error
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            # The parser meets a body that is no answer of a KMS with whatever that comes to.
            raise self._no_answer(f"{type(error).__name__}: {error}") from error
        return answer

    def _new(self, secret: bytes, answer: dict[str, Any]) -> NewKey:
        wrapped, key_id = answer.get("CiphertextBlob"), answer.get("KeyId")
        if not (isinstance(wrapped, bytes) and wrapped):
            raise self._no_answer("it has no wrapped key")
        # Recorded with the data key, which is lost if nobody can be asked by that name.
        if not (isinstance(key_id, str) and key_id.startswith("arn:aws")):
            raise self._no_answer("it names no key by its ARN")
        return NewKey(secret, wrapped, key_id)

    def _secret_of(self, answer: dict[str, Any]) -> bytes:
        secret = answer.get("Plaintext")
        if not (isinstance(secret, bytes) and len(secret) == KEY_BYTES):
            raise self._no_answer(f"it has no key of {KEY_BYTES} bytes")
        return secret

    def _client(self) -> KMSClient:
        # Making a client is not safe in several threads at once; using one is.
        with self._lock:
            if self._made is None:
                import boto3  # noqa: PLC0415 - an extra
                from botocore.config import Config  # noqa: PLC0415

                session = boto3.session.Session()
                # AWS_REGION is what AWS' other tools read, and boto3 does not.
                region = (
                    _region_of(self._key) or session.region_name or os.environ.get("AWS_REGION")
                )
                self._made = session.client(
                    "kms",
                    region_name=region,
                    config=Config(
                        connect_timeout=CONNECT_SECONDS,
                        read_timeout=READ_SECONDS,
                        retries={"total_max_attempts": _ATTEMPTS_MAX, "mode": "standard"},
                    ),
                )
            return self._made

    def _translated(self, error: Any, right: str) -> KeyRefused | KeyUnavailable:
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # Without a code of its own it is no word of the KMS, but of something on the way to it.
        is_foreign = code in ("", str(status))
        if is_foreign or code in _PASSING_CODES or status in _PASSING_STATUSES:
            return self._unavailable(str(error))
        return KeyRefused(
            f"KMS refuses to use {self._key}: {str(error).rstrip('.')}. Nothing was sealed or "
            f"opened. Give this program's role {right} on the key, or enable the key again; a "
            "wrapped key that was altered, or belongs to another stream or version, is refused too."
        )

    def _no_answer(self, why: str) -> KeyUnavailable:
        return self._unavailable(
            f"what came back is no answer of a KMS ({why}); see whether AWS_ENDPOINT_URL leads to "
            "one, and whether a proxy answers in its place"
        )

    def _unavailable(self, why: str) -> KeyUnavailable:
        return KeyUnavailable(
            f"KMS cannot be asked about {self._key} now: {why.rstrip('.')}. Keys that are in use "
            "go on for a while; for others it has to be back."
        )


def _region_of(key: str) -> str | None:
    """The region that an ARN names; None: the one that is configured."""
    parts = key.split(":")
    return parts[3] if key.startswith("arn:") and len(parts) > 3 else None
