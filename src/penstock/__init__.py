"""Events from PostgreSQL to their handlers, each exactly once."""
