"""Stages: each moves one bounded batch per step and knows nothing of processes."""
