"""Settings of the warm-up of replicas. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(Enum):
    """Parts of the warm-up that the control plane drives."""

    FULL = "full"
    """Shapes, seeding, golden prompts."""
    SHAPES = "shapes"
    """Shapes and golden prompts."""
    NONE = "none"
    """Nothing: replicas serve as soon as their engines answer."""


class Seeding(Enum):
    """Way of hot prefixes into the cache of a fresh replica."""

    PULL = "pull"
    """A warm replica of the pool hands the KV blocks over."""
    REPLAY = "replay"
    """The fresh replica computes the prompts."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class WarmUpSettings:
    """Parts and bounds; times in seconds."""

    mode: Mode = Mode.FULL
    seeding: Seeding = Seeding.PULL
    warming_max_s: float = 120.0
    seeding_max_s: float = 1.0
    """Longest time for which seeding holds a replica back."""
    background_max_s: float = 60.0
    """Longest seeding behind the start of service."""
    probing_max_s: float = 20.0
    package_every_s: float = 300.0
    """Time between two packages of a pool."""

    @property
    def drives_lives(self) -> bool:
        """True if replicas wait for orders of the control plane."""
        return self.mode is not Mode.NONE

    @property
    def seeds(self) -> bool:
        """True if hot prefixes are copied."""
        return self.mode is Mode.FULL and self.seeding is not Seeding.NONE
