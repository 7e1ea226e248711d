"""`python -m penstock` is the command `penstock`, and begins here."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        from penstock.cli import main as run  # noqa: PLC0415 - this takes a while
    except KeyboardInterrupt:
        # Nothing has begun, and where Python was at that moment is no news.
        sys.exit(EXIT_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
