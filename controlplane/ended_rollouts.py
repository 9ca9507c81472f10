"""The rollouts that are known as taken back, and the stable pool behind each. Pure.

Receivers and snapshots name them. A leader that lost the documents learns so that a promotion was undone, and which pool
was stable behind the undo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from kvmesh.snapshot.published import NO_NAME, Published, Term

KEPT: Final = 256
"""Rollouts that are remembered. The oldest is forgotten first."""

_UNKNOWN: Final = (NO_NAME.order, "")


class EndedRollouts(Mapping[str, str]):
    """Stable pool by rollout: that of the highest snapshot that names the rollout; empty while no snapshot was seen."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[Term, int], str]] = {}

    def __getitem__(self, rollout: str) -> str:
        return self._found[rollout][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def note(self, rollouts: Iterable[str]) -> None:
        """Take rollouts that a receiver names as taken back."""
        for rollout in rollouts:
            self._found.setdefault(rollout, _UNKNOWN)
        self._forget()

    def see(self, snapshot: Published) -> None:
        """Take the rollouts that `snapshot` names. The promotion of a rollout says nothing of the pool behind its undo."""
        content = snapshot.content
        promoted = content.rollout if content.rollout_state.is_promoted else ""
        found = (snapshot.name.order, content.stable.pool)
        for rollout in content.ended_rollouts:
            before = self._found.get(rollout, _UNKNOWN)
            self._found[rollout] = before if rollout == promoted else max(before, found)
        self._forget()

    def _forget(self) -> None:
        while len(self._found) > KEPT:
            del self._found[next(iter(self._found))]
