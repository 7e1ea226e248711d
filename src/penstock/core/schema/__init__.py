"""JSON Schemas as values: one form for each meaning, and who can read what whom wrote."""

from penstock.core.schema.breaks import Break, Cause, Rule
from penstock.core.schema.canonical import canonical, schema_hash
from penstock.core.schema.compare import can_read, check
from penstock.core.schema.differences import Difference, differences

__all__ = [
    "Break",
    "Cause",
    "Difference",
    "Rule",
    "can_read",
    "canonical",
    "check",
    "differences",
    "schema_hash",
]
