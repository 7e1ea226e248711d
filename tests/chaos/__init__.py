"""Chaos: real servers and processes hurt by a seeded nemesis, and a checker of what they did."""
