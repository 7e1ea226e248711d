"""Charges cards and pays sellers: one provider knows idempotency keys, the other does not."""

import json
import os
import urllib.request
from typing import Any
from urllib.error import HTTPError, URLError

from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Context, EffectUnknown, Event, Pipeline

pipeline = Pipeline("payments")  # PENSTOCK_DATABASE_URL, PENSTOCK_REDIS_URL, or arguments


class Base(DeclarativeBase): ...


class Payment(Base):
    __tablename__ = "payment"
    order_id: Mapped[int] = mapped_column(primary_key=True)
    charge_id: Mapped[str]
    cents: Mapped[int]


class Payout(Base):
    __tablename__ = "payout"
    order_id: Mapped[int] = mapped_column(primary_key=True)
    transfer_id: Mapped[str]


class OrderPlaced(Event, type="orders.placed", version=1, key="order_id"):
    order_id: int
    cents: int


class OrderDelivered(Event, type="orders.delivered", version=1, key="order_id"):
    order_id: int
    seller_account: str
    cents: int


class Charge(BaseModel):
    id: str
    cents: int


def post(url: str, body: dict[str, Any], **headers: str) -> Any:
    encoded = json.dumps(body).encode()
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, encoded, headers)  # noqa: S310 - the operator chose it
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


# ── a provider that knows idempotency keys: asked twice, it charges once ───────────────────────


def charge_card(order_id: int, cents: int, *, key: str) -> Charge:
    body = {"order_id": order_id, "cents": cents}
    answer = post(os.environ["CARD_URL"], body, **{"Idempotency-Key": key})
    return Charge.model_validate(answer)


@pipeline.consumer("orders", name="charge_order", batch_size=1)
def charge_order(event: OrderPlaced, session: Session, context: Context) -> None:
    key = context.idempotency_key("charge")
    charge = context.once(
        "charge", charge_card, event.order_id, event.cents, key=key, returns=Charge
    )
    session.add(Payment(order_id=event.order_id, charge_id=charge.id, cents=charge.cents))


# ── a bank that does not: asked twice, it pays twice ───────────────────────────────────────────


def transfer(account: str, cents: int) -> str:
    try:
        answer = post(os.environ["BANK_URL"], {"account": account, "cents": cents})
        return str(answer["id"])
    except Exception as error:
        if is_refusal(error):
            raise  # not paid, so it is tried again
        raise EffectUnknown(f"The bank was asked for {cents} cents and may have paid") from error


def is_refusal(error: Exception) -> bool:
    """Whether the bank has certainly not paid; any doubt means no."""
    if isinstance(error, HTTPError):
        return 400 <= error.code < 500
    return isinstance(error, URLError) and isinstance(error.reason, ConnectionRefusedError)


@pipeline.consumer("orders", name="pay_seller", batch_size=1)
def pay_seller(event: OrderDelivered, session: Session, context: Context) -> None:
    transfer_id = context.once(
        "payout", transfer, event.seller_account, event.cents, interrupted="bury"
    )
    session.add(Payout(order_id=event.order_id, transfer_id=transfer_id))


if __name__ == "__main__":
    Base.metadata.create_all(pipeline.engine)
    pipeline.send_now("orders", OrderPlaced(order_id=1, cents=990))
    pipeline.send_now("orders", OrderDelivered(order_id=1, seller_account="DE02", cents=900))
