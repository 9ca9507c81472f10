"""The stored record of trials on a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

KUBELET_S: Final = 5.0
"""Seconds beyond the grace in which a kubelet removes a pod whose processes have ended."""


class Step(msgspec.Struct, kw_only=True):
    """One disturbance under load."""

    name: str
    streams: int
    lost: list[str]
    """The lost streams, in words."""
    moved: int
    """Streams that went on at another frontend, router or replica."""
    pause_s: float
    """Longest wait of a client for its next message."""
    seconds: float
    """Until `kubectl rollout status` ended, or until all pods were ready again."""
    end_s: float | None = None
    """From the deletion to the end of the pod that used most of its grace. None: no pod was to end by itself."""
    grace_s: float | None = None
    """Grace of that pod."""
    killed: list[str]
    """Containers that SIGKILL ended, or that restarted."""
    exits: list[str] = msgspec.field(default_factory=list)
    """Other exit statuses than 0, of pods that were to end by themselves."""
    faults: list[str] = msgspec.field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Everything that must not have happened, in words."""
        found = [f"{self.name}: lost {each}" for each in self.lost]
        if not self.streams:
            found.append(f"{self.name}: no stream completed")
        found += [f"{self.name}: {each} was killed" for each in self.killed]
        found += [f"{self.name}: exit status of {each}" for each in self.exits]
        if self.end_s is not None and self.grace_s is not None and self.end_s > self.grace_s + KUBELET_S:
            found.append(
                f"{self.name}: a pod took {self.end_s:.1f} s to end, at most {self.grace_s:g} s of grace are allowed"
            )
        return found + [f"{self.name}: {each}" for each in self.faults]


class Trial(msgspec.Struct, kw_only=True):
    """One trial, from apply to the end of the namespace."""

    ready_s: float
    """From apply until all pods were ready."""
    first_token_s: float
    """From apply to the first token of a client."""
    steps: list[Step]

    @property
    def violations(self) -> list[str]:
        return [each for step in self.steps for each in step.violations]


class Record(msgspec.Struct, kw_only=True):
    """The trials of one call of the command."""

    command: str
    began: str
    """UTC, ISO 8601."""
    commit: str
    machine: str
    cluster: str
    """Versions and nodes."""
    images: str
    seconds: float
    trials: list[Trial]

    @property
    def violations(self) -> list[str]:
        return [each for trial in self.trials for each in trial.violations]


def by_name(trials: Sequence[Trial]) -> dict[str, list[Step]]:
    """Return the steps of all trials by their name, in the order of the first trial."""
    found: dict[str, list[Step]] = {}
    for trial in trials:
        for step in trial.steps:
            found.setdefault(step.name, []).append(step)
    return found
