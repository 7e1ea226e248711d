"""Help for the tests of applications: run a handler, look at what was sent, fire timers."""

from penstock.testing.handlers import deliver, sent
from penstock.testing.timers import fire_timers

__all__ = ["deliver", "fire_timers", "sent"]
