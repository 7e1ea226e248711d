"""A process that runs both servers until its input ends: `python -m tests.server_host FOLDER`.

It prints one line of JSON with the servers' process ids and addresses. With a second argument,
`thread`, the servers are started from a thread that ends at once.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey


def main() -> None:
    folder = Path(sys.argv[1])
    postgres = EmbeddedPostgres(folder / "postgres", durable=False)
    valkey = EmbeddedValkey(folder / "valkey", persistence="none")

    def start() -> None:
        postgres.start()
        valkey.start()

    if sys.argv[2:] == ["thread"]:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    else:
        start()
    report = {
        "pids": [postgres.pid, valkey.pid],
        "database_url": postgres.url,
        "redis_url": valkey.url,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    postgres.stop()
    valkey.stop()


if __name__ == "__main__":
    main()
