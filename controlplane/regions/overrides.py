"""Operators' overrides of tenants on their way between regions: the higher version of each scope wins. Pure.

Every message has a slice of the own overrides, so a message has a bounded size however many tenants there are. Versions are
the milliseconds of each region's Redis: of two changes of one scope in two regions, the clocks decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.tenants.overrides import Override

SLICE_BYTES_MAX: Final = 64 << 10
"""Bytes of the overrides in one message."""

ENTRY_BYTES_MAX: Final = 8 << 10
"""Longest override, with its scope. A longer one stays in its region."""

ENTRIES_MAX: Final = 10_000
"""Most overrides that wait to be written."""


class OverrideExchange:
    """The own overrides to send, and those of other regions to write."""

    def __init__(self) -> None:
        self._own: dict[str, Override] = {}
        self._entries: list[pb.TenantOverride] = []
        self._next = 0
        self._learnt: dict[str, Override] = {}

    def set_own(self, overrides: Mapping[str, Override]) -> None:
        """Take the overrides in the own Redis."""
        if overrides == self._own:
            return
        self._own = dict(overrides)
        entries = (_message(scope, override) for scope, override in sorted(overrides.items()))
        self._entries = [each for each in entries if each.ByteSize() <= ENTRY_BYTES_MAX]
        self._learnt = {
            scope: override for scope, override in self._learnt.items() if self._is_later(scope, override)
        }

    def slice(self) -> list[pb.TenantOverride]:
        """Return the next overrides to send, in turn."""
        found: list[pb.TenantOverride] = []
        size = 0
        for _ in range(len(self._entries)):
            entry = self._entries[self._next % len(self._entries)]
            size += entry.ByteSize() + 8
            if size > SLICE_BYTES_MAX:
                break
            found.append(entry)
            self._next = (self._next + 1) % len(self._entries)
        return found

    def learn(self, entries: Iterable[pb.TenantOverride]) -> None:
        """Take overrides of another region. An unreadable or an older one is ignored."""
        for entry in entries:
            try:
                changes = msgspec.json.decode(entry.changes, type=dict[str, object])
            except msgspec.DecodeError:
                continue
            override = Override(version=entry.version, changes=changes)
            if entry.ByteSize() <= ENTRY_BYTES_MAX and self._is_later(entry.scope, override):
                self._learnt[entry.scope] = override
        while len(self._learnt) > ENTRIES_MAX:
            del self._learnt[next(iter(self._learnt))]

    def learnt(self) -> dict[str, Override]:
        """Return the overrides to write. Each is returned until `set_own` has it, or a later one."""
        return dict(self._learnt)

    def _is_later(self, scope: str, override: Override) -> bool:
        known = max(
            (each.version for each in (self._own.get(scope), self._learnt.get(scope)) if each), default=-1
        )
        own = self._own.get(scope)
        if self._learnt.get(scope) is override:
            return own is None or override.version > own.version
        return override.version > known


def _message(scope: str, override: Override) -> pb.TenantOverride:
    return pb.TenantOverride(
        scope=scope, version=override.version, changes=msgspec.json.encode(override.changes)
    )
