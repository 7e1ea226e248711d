"""Help for the tests of applications: run a handler, look at what was sent."""

from penstock.testing.handlers import deliver, sent

__all__ = ["deliver", "sent"]
