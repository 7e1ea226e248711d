"""The examples of effects do what their page says, and so does the SQL on it."""

from __future__ import annotations

import json
import re
import smtplib
import threading
from collections.abc import Iterator
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from examples import email_receipt, payment
from penstock.core.effects import idempotency_key
from penstock.errors import EffectUnknown
from penstock.testing import deliver
from tests.effects_at_work import EffectBench, Outside

PAGE = Path(__file__).parent.parent / "docs" / "EFFECTS.md"
PLACED = payment.OrderPlaced(order_id=1, cents=990)
DELIVERED = payment.OrderDelivered(order_id=1, seller_account="DE02", cents=900)


class Provider(ThreadingHTTPServer):
    """Answers as it is told, and remembers the keys it was given."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status = 200
        self.keys: list[str | None] = []
        self.is_silent = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Answer(BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self) -> None:
        provider = self.server
        assert isinstance(provider, Provider)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        provider.keys.append(self.headers["Idempotency-Key"])
        if provider.is_silent:
            # Cut off after it was asked: nobody can tell what it did.
            self.close_connection = True
            return
        self.send_response(provider.status)
        self.end_headers()
        self.wfile.write(json.dumps({"id": "no 1", "cents": body["cents"]}).encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    with Provider() as server:
        monkeypatch.setenv("CARD_URL", server.url)
        monkeypatch.setenv("BANK_URL", server.url)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def session() -> Iterator[Session]:
    engine = create_engine("sqlite://")
    payment.Base.metadata.create_all(engine)
    with Session(engine) as made:
        yield made
    engine.dispose()


def test_a_card_is_charged_with_a_key_and_the_payment_is_booked(
    provider: Provider, session: Session
) -> None:
    deliver(payment.charge_order, PLACED, session=session)
    (booked,) = session.scalars(select(payment.Payment)).all()
    assert (booked.charge_id, booked.cents) == ("no 1", 990)
    (key,) = provider.keys
    assert len(key or "") == len(idempotency_key("", "", ""))


def test_a_seller_is_paid(provider: Provider, session: Session) -> None:
    deliver(payment.pay_seller, DELIVERED, session=session)
    assert session.scalars(select(payment.Payout.transfer_id)).all() == ["no 1"]


def test_a_bank_that_may_have_paid_is_not_asked_again(provider: Provider, session: Session) -> None:
    provider.is_silent = True
    with pytest.raises(EffectUnknown, match="may have paid"):
        deliver(payment.pay_seller, DELIVERED, session=session)
    provider.is_silent = False
    provider.status = 502
    with pytest.raises(EffectUnknown, match="may have paid"):
        deliver(payment.pay_seller, DELIVERED, session=session)


def test_a_bank_that_has_refused_is_asked_again(
    provider: Provider, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.status = 409
    with pytest.raises(HTTPError) as refusal:
        deliver(payment.pay_seller, DELIVERED, session=session)
    refusal.value.close()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as closed:
        nobody = f"http://127.0.0.1:{closed.server_address[1]}/"
    monkeypatch.setenv("BANK_URL", nobody)
    with pytest.raises(URLError):
        deliver(payment.pay_seller, DELIVERED, session=session)


def test_a_receipt_is_mailed_with_an_id_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mails: list[EmailMessage] = []

    class Post:
        def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

        def __enter__(self) -> Post:
            return self

        def __exit__(self, *_error: object) -> None: ...

        def send_message(self, message: EmailMessage) -> None:
            mails.append(message)

    monkeypatch.setattr(smtplib, "SMTP", Post)
    paid = email_receipt.OrderPaid(order_id=7, address="anna@example.com", cents=990)
    deliver(email_receipt.mail_receipt, paid)
    (mail,) = mails
    assert mail["To"] == "anna@example.com"
    assert "9.90" in mail.get_content()
    assert re.fullmatch(r"<[0-9a-f]{64}@example\.com>", mail["Message-ID"])


def test_an_operator_settles_an_unknown_outcome_as_the_page_says(database_url: str) -> None:
    page = PAGE.read_text()
    listing, has_not, has = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    bench = EffectBench(database_url)
    try:
        for statement, calls, result in ((has_not, 1, "paid now"), (has, 0, "transfer 4711")):
            bench.event = str(uuid4())
            bench.die_in_call("payout", consumer="payments.pay_seller")
            assert [row[1] for row in bench.ask(listing)] == [UUID(bench.event)]
            bench.ask(statement.replace("…", bench.event))
            assert bench.ask(listing) == []
            outside = Outside("paid now")
            process = bench.process("payments.pay_seller")
            assert process.once(bench.event, "payout", outside, interrupted="bury") == result
            assert outside.calls == calls
    finally:
        bench.close()
