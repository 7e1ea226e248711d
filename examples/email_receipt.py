"""Mails a receipt for every order: rather two receipts than none."""

import os
import smtplib
from email.message import EmailMessage

from penstock import Context, Event, Guarantee, Pipeline

pipeline = Pipeline("post")  # PENSTOCK_DATABASE_URL, PENSTOCK_REDIS_URL, or arguments


class OrderPaid(Event, type="orders.paid", version=1, key="order_id"):
    order_id: int
    address: str
    cents: int


def send_mail(address: str, subject: str, text: str, *, message_id: str) -> None:
    message = EmailMessage()
    message["From"] = "shop@example.com"
    message["To"] = address
    message["Subject"] = subject
    # A mail that comes twice is recognised by its id, and shown once by many programs.
    message["Message-ID"] = f"<{message_id}@example.com>"
    message.set_content(text)
    with smtplib.SMTP(os.environ.get("SMTP_HOST", "localhost"), 25, timeout=10) as server:
        server.send_message(message)


@pipeline.consumer(
    "orders",
    name="mail_receipt",
    guarantee=Guarantee.AT_LEAST_ONCE,  # nothing is written to the database
    start="latest",  # nobody wants a receipt for last year's order
    batch_size=1,
)
def mail_receipt(event: OrderPaid, context: Context) -> None:
    context.once(
        "receipt",
        send_mail,
        event.address,
        f"Your order {event.order_id}",
        f"We have received {event.cents / 100:.2f}. Thank you!",
        message_id=context.idempotency_key("receipt"),
    )


if __name__ == "__main__":
    paid = OrderPaid(order_id=1, address="anna@example.com", cents=990)
    pipeline.send_now("orders", paid)
