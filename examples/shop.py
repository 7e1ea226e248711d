"""A shop that bills its orders: the whole of a service that uses Penstock."""

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Event, Pipeline

pipeline = Pipeline("shop")  # PENSTOCK_DATABASE_URL, PENSTOCK_REDIS_URL, or arguments


class Base(DeclarativeBase): ...


class Invoice(Base):
    __tablename__ = "invoice"
    order_id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


class OrderPlaced(Event, type="orders.placed", version=1, key="order_id"):
    order_id: int
    cents: int


@pipeline.consumer("orders", name="bill_order")  # exactly once unless told otherwise
def bill_order(event: OrderPlaced, session: Session) -> None:
    session.add(Invoice(order_id=event.order_id, cents=event.cents))


if __name__ == "__main__":
    Base.metadata.create_all(pipeline.engine)
    with Session(pipeline.engine) as session, session.begin():
        pipeline.send(session, "orders", OrderPlaced(order_id=1, cents=990))
