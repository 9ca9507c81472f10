"""A check: one row of the table, and what it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.offer import Offer
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict

CHECK_S: Final = 60.0
"""Timeout of one check."""


@dataclass(frozen=True, slots=True)
class Need:
    """A need of a check: the model must offer something."""

    is_offered: Callable[[Offer], bool]
    lacks: str
    """The missing tensor or parameter of a model that does not offer it."""
    fallback: str
    """The behaviour of kvmesh without it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. It judges with `run` if the model offers what it needs."""

    capability: str
    name: str
    run: Callable[[Trial], Awaitable[Verdict]]
    need: Need | None = None
    """None: every model must pass."""
    needs_pair: bool = False
    needs_watch: bool = False
    """It needs load reports or metrics."""
    is_hostile: bool = False
    """Its input may end an engine that does not check it."""
    timeout_s: float = CHECK_S


def input_need(name: str, fallback: str) -> Need:
    """Return the need for one input tensor."""
    return Need(lambda offer: name in offer.inputs, f"input {name}", fallback)


def capability_need(name: str, lacks: str) -> Need:
    """Return the need for a capability, by its name in `capabilities.Capabilities`."""
    return Need(lambda offer: bool(getattr(offer.capabilities, name)), lacks, FALLBACKS[name])
