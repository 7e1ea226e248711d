"""Signals: what happened, as values. Logs, metrics and crash tests subscribe to them."""
