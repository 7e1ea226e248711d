"""Real servers from wheels, for development, tests and demonstrations."""

from penstock.stores.servers.pair import Servers, running_servers
from penstock.stores.servers.postgres import EmbeddedPostgres
from penstock.stores.servers.process import claimed
from penstock.stores.servers.valkey import EmbeddedValkey

__all__ = ["EmbeddedPostgres", "EmbeddedValkey", "Servers", "claimed", "running_servers"]
