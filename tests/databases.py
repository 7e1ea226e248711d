"""Databases of tests, made as the pytest plugin makes them."""

from penstock.testing.databases import name_of, new_database, server_folder

__all__ = ["name_of", "new_database", "server_folder"]
