"""The only code that leaves the process: PostgreSQL, Redis, embedded servers."""
