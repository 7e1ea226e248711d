"""Penstock inside of other tools; each imports what it needs when it is used."""
