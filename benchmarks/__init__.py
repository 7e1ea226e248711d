"""Measures Penstock beside one transaction per event, in the same run: `python -m benchmarks`."""
