"""Jobs that warm a replica up, and their results. The core asks for them, the runner executes them. Pure.

Every job has a bound, and ends with a result. A job that cannot be done has an error in its result: it proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from controlplane.rollouts.golden import Answer, Prompt

ERROR_CHARACTERS_MAX: Final = 200
"""Longest error of a result."""

SOURCE_S: Final = 3.0
"""Longest time for the prompts of a batch at the prefill that computes them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that a job calls."""

    process_id: str
    boot_id: str
    engine_boot_id: str
    role: str
    """"prefill" or "decode"."""
    pool: str
    model_version: str
    block_tokens: int
    address: str
    kv_address: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of the work: `batch` prompts of `prompt_tokens` tokens beside each other."""

    prompt_tokens: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class PassJob:
    """Run each shape once: one pass. A prefill runs prompts, a decode batches of short answers.

    `end_s`: when the job has to end, on the process's monotonic clock.
    """

    target: Target
    shapes: tuple[Shape, ...]
    end_s: float
    vocabulary_size: int
    """Token ids of the prompts are below it."""
    seed: int = 0
    """Prompts of another seed share no block with these: a pass computes its prompts."""
    source: Target | None = None
    """Serving prefill that computes the prompts of a decode's batches. None: the target computes them."""
    source_rows_max: int = 64
    """Largest batch that the source computes. The target computes the prompts of a larger one."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass."""

    seconds: float = 0.0
    """Engine time of all shapes."""
    cold_steps: int | None = None
    """Cold steps of the engine during the pass. None: the engine does not report them."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class SeedJob:
    """Copy hot prefixes into the cache of `target`, from `sources` of the same digests by pull, else by replay.

    The runner asks `routers` what is hot. `package_prefixes` are replayed where no source holds them.
    """

    target: Target
    sources: tuple[Target, ...]
    """Serving prefill replicas of the pool. Empty for a decode: beside prefill replicas it is not seeded."""
    routers: tuple[tuple[str, str], ...]
    """Name and address of each router of the pool."""
    blocks_max: int
    """Blocks to copy at most."""
    end_s: float
    is_replay: bool = False
    """True: the target computes every prefix itself."""
    package_prefixes: tuple[bytes, ...] = field(default=(), repr=False)
    """Token ids, 32-bit little-endian, full blocks."""
    time_share: float = 1.0
    """Part of the target's time that the replay takes. Below 1 it computes one piece of a prefix after the other, with
    pauses: the target serves users."""
    starts_empty: bool = False
    """True: no seeding has copied a block yet. A router may still list the blocks of the engine process before."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Result of seeding."""

    is_complete: bool = False
    """True if nothing that is hot is left to copy, or `blocks_max` is reached."""
    prefixes: int = 0
    """Prefixes that were copied."""
    failed_prefixes: int = 0
    """Prefixes that were left out, because a source or the target refused or failed."""
    pulled_blocks: int = 0
    replayed_blocks: int = 0
    confirmed_blocks: int = 0
    """Growth of the target's cache, counted from the KV events of its engine."""
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Run golden prompts on `target`; check that a cancel frees blocks, and a handoff with each peer."""

    target: Target
    prompts: tuple[Prompt, ...]
    peers: tuple[Target, ...]
    """Serving replicas of the other role in the pool: decode replicas for a prefill, and the other way round."""
    end_s: float
    running_max: int
    """Prompts at a time."""
    source: Target | None = None
    """Serving prefill that computes the golden prompts of a decode. None: the target computes them."""
    source_s: float = SOURCE_S
    """Longest time for the prompts of a batch at the source."""
    checks_cancel: bool = True
    """True: check that a cancelled request frees its blocks."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe."""

    answers: tuple[Answer, ...] = ()
    """One for each prompt."""
    frees_blocks: bool | None = None
    """True if a cancelled request's blocks were free within a second. None: not checked."""
    handoffs_well: int = 0
    handoffs_failed: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceJob:
    """Run golden prompts on a serving decode replica: their tokens are what its version gives."""

    target: Target
    prompts: tuple[Prompt, ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Result of a reference run."""

    answers: tuple[Answer, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class RecordJob:
    """Ask the routers of a pool what is hot, for a package."""

    pool: str
    routers: tuple[tuple[str, str], ...]
    model_version: str
    block_tokens: int
    tenants_min: int
    """Tenants that must have sent a prefix."""
    end_s: float


@dataclass(frozen=True, slots=True)
class RecordResult:
    """Result of a record. The tokens stay in memory until a package takes those that may be kept."""

    shapes: tuple[Shape, ...] = ()
    """The heaviest first. Without prompt tokens: a batch of any prompts."""
    prefixes: tuple[bytes, ...] = field(default=(), repr=False)
    """Prefixes that at least `tenants_min` tenants sent, the heaviest first."""
    error: str = ""


Job: TypeAlias = PassJob | SeedJob | ProbeJob | ReferenceJob | RecordJob
Result: TypeAlias = PassResult | SeedResult | ProbeResult | ReferenceResult | RecordResult
