"""Variants of a mesh that one run compares: sections of the configuration by label. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

Tables = Mapping[str, Mapping[str, Any]]
Item = TypeVar("Item")


class Variant(NamedTuple):
    """A label and the sections of the configuration that make the variant."""

    label: str
    tables: Tables

    def over(self, tables: Tables) -> dict[str, dict[str, Any]]:
        """Return `tables` with the keys of the variant. A key of the variant wins."""
        sections = dict.fromkeys((*tables, *self.tables))
        return {name: {**tables.get(name, {}), **self.tables.get(name, {})} for name in sections}


OLD: Final = Variant(
    "old", {"frontend": {"edge": "grpcio"}, "mesh": {"hops": "grpcio"}, "engine": {"step_frames": False}}
)
NEW: Final = Variant(
    "new", {"frontend": {"edge": "batched"}, "mesh": {"hops": "batched"}, "engine": {"step_frames": True}}
)
VARIANTS: Final = (OLD, NEW)


def interleaved(items: Sequence[Item], rounds: int) -> list[Item]:
    """Return `items` once per round, in reverse order in every second round: A B B A for two of each.

    A slow drift of the machine then burdens all items alike.
    """
    return [item for number in range(rounds) for item in (items[::-1] if number % 2 else items)]
