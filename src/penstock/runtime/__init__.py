"""Processes: loops, waiting, signals, leases and crashes; knows nothing of events."""
