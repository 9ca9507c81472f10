"""Makes packages: asks the routers of each pool from time to time what is hot, and keeps what may be kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from controlplane.warmup.fleet import Fleet
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import RecordJob, RecordResult, Shape
from controlplane.warmup.life_steps import Routers
from controlplane.warmup.packages import (
    HASHES_MAX,
    PREFIX_TOKENS_MAX,
    PREFIXES_MAX,
    SHAPE_MAX,
    TENANTS_MIN,
    TOKEN_ID_MAX,
    Package,
    Packages,
    ShapeRow,
    WallClock,
    package_name,
)
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.shapes import BATCH_MAX, BATCH_PROMPT_TOKENS, SHAPES_MAX
from kvmesh import blocks
from kvmesh.attach.frames import unpack_ids

RECORD_S: Final = 10.0
"""Longest question to the routers."""

SERVED_MIN_S: Final = 60.0
"""Time that a replica of the pool must have served: a package describes steady work."""


class PackageMaking:
    """See the module. `prefixes` returns the registered prefixes of a model version, as token ids."""

    def __init__(
        self,
        every_s: float,
        fleet: Fleet,
        jobs: JobTable,
        packages: Packages,
        references: References,
        prefixes: Callable[[str], tuple[tuple[int, ...], ...]],
        wall: WallClock,
    ) -> None:
        """`every_s`: time between two packages of a pool."""
        self._every_s = every_s
        self._fleet = fleet
        self._jobs = jobs
        self._packages = packages
        self._references = references
        self._prefixes = prefixes
        self._wall = wall
        self._asked_s: dict[str, float] = {}
        """Time of the last question, by pool."""

    def step(self, routers: Routers, now_s: float) -> None:
        """Ask the routers of each pool whose time has come."""
        served_s = min(SERVED_MIN_S, self._every_s)
        pools = {
            each.target.pool
            for each in self._fleet.lives.values()
            if each.serves and each.is_connected and each.age_s(now_s) >= served_s
        }
        for pool in sorted(pools):
            asked = routers(pool)
            if asked and now_s - self._asked_s.get(pool, float("-inf")) >= self._every_s:
                self._asked_s[pool] = now_s
                target = next(
                    each.target for each in self._fleet.ordered() if each.target.pool == pool and each.serves
                )
                version, width, end_s = target.model_version, target.block_tokens, now_s + RECORD_S
                self._jobs.run(RecordJob(pool, asked, version, width, TENANTS_MIN, end_s))

    def take(self, job: RecordJob, result: RecordResult) -> list[Package]:
        """Return the packages that `result` makes, one for each role and engine build of the pool."""
        if result.error:
            return []
        kinds = {
            (each.target.role, each.key, each.target.block_tokens)
            for each in self._fleet.lives.values()
            if each.target.pool == job.pool and each.serves
        }
        made = [self._make(role, key, width, job.pool, result) for role, key, width in sorted(kinds)]
        return [self._packages.adopt(each) for each in made if self._differs(each)]

    def _make(
        self, role: str, key: ReferenceKey, block_tokens: int, pool: str, result: RecordResult
    ) -> Package:
        registered = self._prefixes(key.model_version)
        shared = tuple(unpack_ids(each) for each in result.prefixes)
        name = package_name(role, key)
        known = self._packages.named(name)
        return Package(
            name=name,
            model_version=key.model_version,
            role=role,
            engine_digest=key.engine_digest,
            made_s=self._wall(),
            made_from=pool,
            shapes=shape_rows(role, result.shapes),
            hashes=tuple(
                _last_hash(each, block_tokens, key.model_version) for each in result.prefixes[:HASHES_MAX]
            ),
            prefixes=_within_bounds((*registered, *shared)),
            golden=self._references.learned(key),
            quarantined=known.quarantined if known is not None else "",
        )

    def _differs(self, made: Package) -> bool:
        """True unless the known package says the same and is young."""
        known = self._packages.named(made.name)
        if known is None:
            return True
        is_equal = (known.shapes, known.prefixes, known.golden) == (made.shapes, made.prefixes, made.golden)
        return not is_equal or made.made_s - known.made_s >= self._every_s


def shape_rows(role: str, shapes: Iterable[Shape]) -> tuple[ShapeRow, ...]:
    """Return the shapes that a replica of `role` runs, in range: prompts for a prefill, batches as well for a decode."""
    rows: dict[ShapeRow, None] = {}
    for shape in shapes:
        if shape.batch > 1:
            if role == "decode":
                tokens = min(shape.prompt_tokens or BATCH_PROMPT_TOKENS, SHAPE_MAX)
                rows[ShapeRow(tokens, min(shape.batch, BATCH_MAX))] = None
        elif shape.prompt_tokens:
            rows[ShapeRow(min(shape.prompt_tokens, SHAPE_MAX))] = None
    return tuple(list(rows)[:SHAPES_MAX])


def _within_bounds(prefixes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the leading prefixes that fit a package."""
    kept: dict[tuple[int, ...], None] = {}
    tokens = 0
    for prefix in prefixes:
        if (
            prefix in kept
            or tokens + len(prefix) > PREFIX_TOKENS_MAX
            or not all(0 <= each <= TOKEN_ID_MAX for each in prefix)
        ):
            continue
        if len(kept) >= PREFIXES_MAX:
            break
        kept[prefix] = None
        tokens += len(prefix)
    return tuple(kept)


def _last_hash(token_ids: bytes, block_tokens: int, model_version: str) -> int:
    chain = blocks.chain(token_ids, block_tokens, model_version)
    return chain[-1] if len(chain) else 0
