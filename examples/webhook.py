"""A payment provider's webhook: delivered as often as it likes, booked once, told to everybody.

WEBHOOK_SECRET=… uvicorn webhook:app
"""

import hashlib
import hmac
import os
import time
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import AlreadyHandled, Event, LockContention, Pipeline, inbox

BODY_BYTES_MAX = 64 * 1024
# The inbox forgets after inbox_retention_days; a recorded delivery must not come back after that.
SIGNATURE_SECONDS_MAX = 300
RETRY_AFTER_SECONDS = 1

app = FastAPI()
pipeline = Pipeline("shop")  # PENSTOCK_DATABASE_URL, PENSTOCK_REDIS_URL, or arguments


class Base(DeclarativeBase): ...


class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    cents: Mapped[int]


class PaymentReceived(Event, type="payments.received", version=1, key="order_id"):
    order_id: int
    cents: int


class Delivery(BaseModel):
    """What the provider sends; `id` stays the same however often it sends it."""

    id: str
    order_id: int
    cents: int


def signature_of(timestamp: str, body: bytes) -> str:
    secret = os.environ["WEBHOOK_SECRET"].encode()
    return hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


async def signed_delivery(request: Request) -> Delivery:
    """The delivery, if the provider has signed these very bytes, and just now."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413)
    timestamp = request.headers.get("webhook-timestamp", "")
    signature = request.headers.get("webhook-signature", "")
    # In constant time, or the answer's delay would tell how much of a guess was right.
    is_signed = hmac.compare_digest(signature_of(timestamp, body).encode(), signature.encode())
    if not is_signed or abs(time.time() - int(timestamp)) > SIGNATURE_SECONDS_MAX:
        raise HTTPException(401)
    try:
        return Delivery.model_validate_json(body)
    except ValidationError:
        raise HTTPException(422) from None


@app.post("/webhooks/payments")
def receive_payment(delivery: Annotated[Delivery, Depends(signed_delivery)]) -> str:
    try:
        with Session(pipeline.engine) as session, session.begin():
            inbox.claim(session, "payments", delivery.id, schema=pipeline.settings.schema)
            session.add(Payment(order_id=delivery.order_id, cents=delivery.cents))
            paid = PaymentReceived(order_id=delivery.order_id, cents=delivery.cents)
            pipeline.send(session, "payments", paid)
    except AlreadyHandled:
        return "already handled"
    except LockContention:
        # Another delivery is at it and may still fail: a yes now could lose the payment.
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        raise HTTPException(503, headers=headers) from None
    # Only here, after the commit. An error above is a 500, and the provider delivers again.
    return "handled"


if __name__ == "__main__":
    Base.metadata.create_all(pipeline.engine)
