"""`python -m penstock` is the command `penstock`, and begins here."""

import os
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    _fill_closed_streams()
    try:
        from penstock.cli import main as run  # noqa: PLC0415 - this takes a while
    except KeyboardInterrupt:
        # Nothing has begun, and where Python was at that moment is no news.
        sys.exit(EXIT_INTERRUPTED)
    run()


def _fill_closed_streams() -> None:
    """Give this process and its children all three standard streams.

    What is opened takes the lowest free number: a pipe of ours would get what is said on stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        # Whoever asks whether there is somebody to ask.
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


if __name__ == "__main__":
    main()
