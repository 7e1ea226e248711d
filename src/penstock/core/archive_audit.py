"""Whether an archive is whole: every position once, in objects that are what was archived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from penstock.core.archive import ArchivedObject, ArchivePlan
from penstock.core.wire import Entry, Hole
from penstock.core.wrapped_keys import WrappedKey


def chain_faults(objects: Sequence[ArchivedObject], checkpoint: int) -> list[str]:
    """Where objects, in order, leave positions out, overlap, or end elsewhere than they should."""
    faults = []
    for former, latter in pairwise(objects):
        if latter.first > former.last + 1:
            faults.append(f"positions {former.last + 1}..{latter.first - 1} are in no object")
        if latter.first <= former.last:
            faults.append(f"{former.name} and {latter.name} overlap")
    if objects and objects[-1].last != checkpoint:
        faults.append(
            f"the last object ends at {objects[-1].last}, and the archiver's checkpoint is "
            f"{checkpoint}"
        )
    return faults


def listing_faults(
    objects: Iterable[ArchivedObject], found: Mapping[str, int], planned: ArchivePlan | None
) -> list[str]:
    """Where the store's list, names with their sizes, differs from the books."""
    faults = []
    strays = dict(found)
    for known in objects:
        size = strays.pop(known.name, None)
        if size is None:
            faults.append(f"{known.name} is not in the store")
        elif size != known.stored_bytes:
            faults.append(f"{known.name} has {size:,} bytes instead of {known.stored_bytes:,}")
    if planned is not None:
        strays.pop(planned.name, None)
    return faults + [f"{name} is in the store and not in the books" for name in strays]


def content_faults(plan: ArchivePlan, records: Iterable[Entry | Hole]) -> list[str]:
    """Where the events and holes of an object are not exactly the positions of its range."""
    expected, events = plan.first, 0
    for record in records:
        first, last = (
            (record.first, record.last)
            if isinstance(record, Hole)
            else (record.position, record.position)
        )
        if first != expected:
            return [f"{plan.name} goes on at {first} where {expected} should be"]
        expected = last + 1
        events += isinstance(record, Entry)
    faults = []
    if expected != plan.last + 1:
        faults.append(f"{plan.name} ends at {expected - 1} instead of {plan.last}")
    if events != plan.events:
        faults.append(f"{plan.name} holds {events:,} events instead of {plan.events:,}")
    return faults


def manifest_faults(
    objects: Sequence[ArchivedObject], listed: Sequence[ArchivedObject]
) -> list[str]:
    """Where the manifest differs from the books. It may lack the last object for a moment."""
    if list(listed) in (list(objects), list(objects[:-1])):
        return []
    reached, due = (found[-1].last if found else 0 for found in (listed, objects))
    fault = (
        f"the manifest lists {len(listed):,} objects up to {reached}, and the books "
        f"{len(objects):,} up to {due}, or they describe them differently"
    )
    return [fault]


def key_faults(
    used: Collection[str], keys: Iterable[WrappedKey], copied: Iterable[WrappedKey]
) -> list[str]:
    """Where the keys beside an archive do not open what is in it, or outlive being shredded.

    A key that nothing archived is sealed with may be on its way there.
    """
    beside = {key.key_id: key for key in copied}
    faults = []
    for key in keys:
        copy = beside.get(key.key_id)
        if copy is None and key.key_id in used:
            faults.append(f"keys.json lacks version {key.version}, which archived events need")
        elif copy is not None and key.is_shredded and not copy.is_shredded:
            faults.append(f"keys.json still holds version {key.version}, which was shredded")
        elif copy is not None and key.key_id in used and copy != key:
            faults.append(f"keys.json does not have version {key.version} as the database has it")
    return faults
