"""One spare process on the bench, made ready while nothing else is going on."""

from __future__ import annotations

import logging
import time

from penstock.runtime.children import ProcessSpec, Spare

AGAIN_SECONDS = 10.0

_logger = logging.getLogger("penstock")


class Bench:
    """Keeps a spare where there is a spec for one; without, it is always empty."""

    def __init__(self, spec: ProcessSpec | None) -> None:
        self._spec = spec
        self._spare: Spare | None = None
        self._prepare_at = 0.0

    def prepare(self, *, is_quiet: bool) -> None:
        """Start a spare if there is none; not while others start, who need the processors."""
        if self._spec is None or not is_quiet or time.monotonic() < self._prepare_at:
            return
        if self._spare is not None and not self._spare.is_there:
            # It could not even import; whoever is started the ordinary way will say why.
            self.close()
            self._prepare_at = time.monotonic() + AGAIN_SECONDS
        elif self._spare is None:
            try:
                self._spare = Spare(self._spec)
            except OSError as error:
                _logger.warning("a spare cannot be started, trying again: %s", error)
                self._prepare_at = time.monotonic() + AGAIN_SECONDS

    def take(self, spec: ProcessSpec) -> Spare | None:
        """The spare, for one who may use it and must do so now."""
        if spec.assignment is None:
            return None
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_there:
            spare.end()
            return None
        return spare

    def close(self) -> None:
        """End whoever waits."""
        if self._spare is not None:
            self._spare.end()
            self._spare = None
