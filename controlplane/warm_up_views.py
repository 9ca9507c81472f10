"""Lives, packages and prefixes as messages for operators. No tokens are in them. Pure."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from controlplane.rollouts.document import timestamp
from controlplane.warmup.life import Life
from controlplane.warmup.life_state import number_of
from controlplane.warmup.packages import Package
from controlplane.warmup.prefixes import RegisteredPrefix
from kvmesh.control.v1 import warm_up_pb2 as pb
from kvmesh.life_state import LifeState

ENGINE_LOST: Final = "its engine does not answer"


def life(life: Life, failed_boots: int, now_s: float) -> pb.Life:
    """Return the life of a replica. `failed_boots`: boots in a row that ended in their warm-up."""
    seed = life.seed
    is_lost = life.is_engine_lost(now_s) and bool(life.target.engine_boot_id)
    return pb.Life(
        process_id=life.name,
        engine_boot_id=life.target.engine_boot_id,
        state=number_of(life.state),
        reported=number_of(life.reported),
        proved=life.is_proved,
        self_served=life.is_self_served,
        age=_duration(life.age_s(now_s)),
        times=[
            pb.TimeInState(state=number_of(state), time=_duration(seconds))
            for state, seconds in sorted(life.times.items(), key=lambda item: item[0].rank)
        ],
        reason=ENGINE_LOST if is_lost and life.state is not LifeState.QUARANTINED else life.reason,
        package=life.package,
        failed_boot_count=failed_boots,
        pulled_block_count=seed.pulled_blocks if seed is not None else 0,
        replayed_block_count=seed.replayed_blocks if seed is not None else 0,
        pool=life.target.pool,
        role=life.target.role,
    )


def profile(package: Package) -> pb.Profile:
    """Return a package without its tokens."""
    return pb.Profile(
        name=package.name,
        revision=package.revision,
        model_version=package.model_version,
        role=package.role,
        engine_digest=package.engine_digest,
        made=timestamp(package.made_s),
        made_from=package.made_from,
        shapes=[
            pb.ProfileShape(prompt_tokens=each.prompt_tokens, batch=each.batch) for each in package.shapes
        ],
        hash_count=len(package.hashes),
        prefix_count=len(package.prefixes),
        prefix_token_count=sum(map(len, package.prefixes)),
        has_golden=bool(package.golden),
        quarantined=package.quarantined,
    )


def prefix(prefix: RegisteredPrefix) -> pb.Prefix:
    """Return a registered prefix without its tokens."""
    return pb.Prefix(
        name=prefix.name,
        model_version=prefix.model_version,
        token_count=len(prefix.token_ids),
        by=prefix.by,
        at=timestamp(prefix.at_s),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
