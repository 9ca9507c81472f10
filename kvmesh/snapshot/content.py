"""The content of a snapshot: pools with tracks and weights, the rollout behind them, cordons, shadows, regions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from google.protobuf.message import DecodeError

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot import regions as region_entries
from kvmesh.snapshot import shadow as shadow_traffic
from kvmesh.snapshot.regions import RegionEntry
from kvmesh.snapshot.shadow import SHADOWS_MAX, Shadow

WEIGHT_SUM_PERCENT: Final = 100
"""Sum of the weights of all pools."""

ENDED_MAX: Final = 16
"""Rollouts that were taken back, as a snapshot and each receiver remember them. The oldest is forgotten first."""

REVISION_MAX: Final = 1 << 53
"""Largest revision of a document. Every JSON reader keeps it exact."""

POOLS_MAX: Final = 64
CORDONS_MAX: Final = 4096
TENANTS_MAX: Final = 1024
NAME_BYTES_MAX: Final = 256
"""Bounds of a snapshot. A snapshot beyond them is refused, so that no receiver holds unbounded data."""


class SnapshotError(ValueError):
    """A snapshot is invalid. The text names the field, the value and the allowed range."""


class Track(Enum):
    """Part of a pool in a rollout."""

    IDLE = pb.TRACK_UNSPECIFIED
    """The pool gets no new requests."""
    STABLE = pb.TRACK_STABLE
    CANARY = pb.TRACK_CANARY
    BASELINE = pb.TRACK_BASELINE
    """A pool of the stable version, as small and as young as the canary, for the comparison."""


class RolloutState(Enum):
    """State of a rollout (docs/rollouts.md)."""

    NONE = pb.ROLLOUT_STATE_UNSPECIFIED
    PENDING = pb.ROLLOUT_STATE_PENDING
    PREPARING = pb.ROLLOUT_STATE_PREPARING
    BAKING = pb.ROLLOUT_STATE_BAKING
    PAUSED = pb.ROLLOUT_STATE_PAUSED
    PROMOTING = pb.ROLLOUT_STATE_PROMOTING
    COMPLETED = pb.ROLLOUT_STATE_COMPLETED
    ROLLING_BACK = pb.ROLLOUT_STATE_ROLLING_BACK
    ROLLED_BACK = pb.ROLLOUT_STATE_ROLLED_BACK
    ABORTED = pb.ROLLOUT_STATE_ABORTED

    @property
    def is_final(self) -> bool:
        """True if the rollout is over."""
        return self in (RolloutState.COMPLETED, RolloutState.ROLLED_BACK, RolloutState.ABORTED)

    @property
    def is_promoted(self) -> bool:
        """True if the new version is the stable one. The old pool may be gone."""
        return self in (RolloutState.PROMOTING, RolloutState.COMPLETED)


@dataclass(frozen=True, slots=True)
class PoolTrack:
    """One pool: its model version, its track, its share of new sessions."""

    pool: str
    model_version: str
    track: Track = Track.IDLE
    weight_percent: int = 0
    is_closed: bool = False
    """True if the pool's routers report that they cannot place new requests."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """One process that is out of use."""

    process_id: str
    boot_id: str = ""
    """Empty: every boot of the process."""
    is_draining: bool = False
    reason: str = ""

    def is_of(self, process_id: str, boot_id: str) -> bool:
        """True if the cordon is for this boot of the process."""
        return self.process_id == process_id and self.boot_id in ("", boot_id)


@dataclass(frozen=True, slots=True)
class Content:
    """See the module. `check` has passed for each content that a receiver holds.

    INVARIANT: the weights sum to 100; exactly one pool is stable; at most one is canary, at most one baseline.
    """

    pools: tuple[PoolTrack, ...]
    rollout: str = ""
    rollout_state: RolloutState = RolloutState.NONE
    step: int = 0
    only_tenants: frozenset[str] = frozenset()
    never_tenants: frozenset[str] = frozenset()
    cordons: tuple[Cordon, ...] = ()
    ended_rollouts: tuple[str, ...] = ()
    """Rollouts that were taken back, the latest last."""
    published_ms: int = 0
    stable_revision: int = 0
    """Number of the operator's last command about the stable pool that this content follows. 0: there was none."""
    shadows: tuple[Shadow, ...] = ()
    """Shadow traffic. Frontends apply the first one."""
    regions: tuple[RegionEntry, ...] = ()
    """All regions, sorted by name. Empty: a mesh without regions."""

    def of_track(self, track: Track) -> PoolTrack | None:
        """Return the pool of `track`, one of STABLE, CANARY and BASELINE. None: no pool has it."""
        return next((pool for pool in self.pools if pool.track is track), None)

    @property
    def stable(self) -> PoolTrack:
        """The stable pool."""
        found = self.of_track(Track.STABLE)
        assert found is not None, "a checked content has a stable pool"
        return found

    @property
    def canary_percent(self) -> int:
        """Weight of the canary; 0 without one."""
        canary = self.of_track(Track.CANARY)
        return canary.weight_percent if canary is not None else 0

    @property
    def running_rollout(self) -> str:
        """Id of the rollout that runs, with or without weights. Empty: none."""
        return "" if self.rollout_state.is_final else self.rollout

    def region(self, name: str) -> RegionEntry | None:
        """Return the region of that name."""
        return next((entry for entry in self.regions if entry.name == name), None)

    def is_region_drained(self, name: str) -> bool:
        """True if a region is drained to weight 0, and another one gets load. Without one, its callers have to stay."""
        entry = self.region(name)
        has_other = any(each.weight_percent > 0 for each in self.regions)
        return entry is not None and entry.is_drained and has_other

    def pool(self, name: str) -> PoolTrack | None:
        """Return the pool of that name."""
        return next((pool for pool in self.pools if pool.pool == name), None)

    def cordon_of(self, process_id: str, boot_id: str) -> Cordon | None:
        """Return the cordon of this boot of a process; a drain before a plain cordon."""
        found = [cordon for cordon in self.cordons if cordon.is_of(process_id, boot_id)]
        return max(found, key=lambda cordon: cordon.is_draining, default=None)

    def all_to_stable(self) -> Content:
        """Return the content with all weight on the stable pool, every other pool idle, and shadows off."""
        pools = (
            replace(pool, weight_percent=WEIGHT_SUM_PERCENT, is_closed=False)
            if pool.track is Track.STABLE
            else replace(pool, track=Track.IDLE, weight_percent=0)
            for pool in self.pools
        )
        return replace(self, pools=tuple(pools), shadows=())

    def fits(self, shadow: Shadow) -> bool:
        """True if the pools of `shadow` are pools of the content, and none of them is the stable pool."""
        pools = {pool.pool for pool in self.pools if pool.track is not Track.STABLE}
        is_twice = shadow.baseline_pool == shadow.to_pool
        return pools.issuperset(shadow.pools) and not is_twice

    def moved_percent(self, before: Content) -> int:
        """Return the percentage points of new sessions that another pool than under `before` serves."""
        weights = {pool.pool: pool.weight_percent for pool in before.pools}
        return sum(max(0, pool.weight_percent - weights.get(pool.pool, 0)) for pool in self.pools)


def check(content: Content) -> None:
    """Raise SnapshotError unless a receiver may apply `content`."""
    _check_sizes(content)
    names = [pool.pool for pool in content.pools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SnapshotError(f'pools: the pool "{twice}" is named twice; each pool once is allowed')
    for pool in content.pools:
        if not pool.model_version:
            raise SnapshotError(f'pools["{pool.pool}"].model_version is empty; a name is needed')
        if not 0 <= pool.weight_percent <= WEIGHT_SUM_PERCENT:
            raise SnapshotError(
                f'pools["{pool.pool}"].weight_percent is {pool.weight_percent}; 0 to 100 is allowed'
            )
        if pool.weight_percent and (pool.track is Track.IDLE or pool.is_closed):
            raise SnapshotError(
                f'pools["{pool.pool}"].weight_percent is {pool.weight_percent}; '
                "a closed pool or a pool without a track must have 0"
            )
    total = sum(pool.weight_percent for pool in content.pools)
    if total != WEIGHT_SUM_PERCENT:
        raise SnapshotError(f"the sum of pools.weight_percent is {total}; 100 is needed")
    for track, allowed in ((Track.STABLE, (1,)), (Track.CANARY, (0, 1)), (Track.BASELINE, (0, 1))):
        count = sum(pool.track is track for pool in content.pools)
        if count not in allowed:
            raise SnapshotError(
                f"{count} pools have the track {track.name.lower()}; {' or '.join(map(str, allowed))} is allowed"
            )
    if content.canary_percent and not content.rollout:
        raise SnapshotError(
            f"rollout is empty, and the canary's weight is {content.canary_percent} percent; an id is needed"
        )
    if content.rollout in content.ended_rollouts and (
        content.canary_percent or content.of_track(Track.BASELINE)
    ):
        raise SnapshotError(
            f'rollout "{content.rollout}" was taken back; it may have no canary and no baseline'
        )
    for at, shadow in enumerate(content.shadows):
        _check_shadow(content, shadow, f"shadows[{at}]")
    for fault in region_entries.faults(content.regions):
        raise SnapshotError(fault)


def _check_shadow(content: Content, shadow: Shadow, field: str) -> None:
    for name, value, allowed in shadow_traffic.faults(shadow):
        raise SnapshotError(f"{field}.{name} is {value}; {allowed} is allowed")
    if not content.fits(shadow):
        raise SnapshotError(
            f'{field} copies to "{shadow.to_pool}" and "{shadow.baseline_pool}"; two pools of the snapshot that are not '
            "stable are allowed, the second may be empty"
        )


def _check_sizes(content: Content) -> None:
    for field, count, most in (
        ("pools", len(content.pools), POOLS_MAX),
        ("cordons", len(content.cordons), CORDONS_MAX),
        ("only_tenants", len(content.only_tenants), TENANTS_MAX),
        ("never_tenants", len(content.never_tenants), TENANTS_MAX),
        ("ended_rollouts", len(content.ended_rollouts), ENDED_MAX),
        ("shadows", len(content.shadows), SHADOWS_MAX),
    ):
        if count > most:
            raise SnapshotError(f"{field} has {count} entries; up to {most} are allowed")
    if not 0 <= content.stable_revision < REVISION_MAX:
        raise SnapshotError(
            f"stable_revision is {content.stable_revision}; 0 to {REVISION_MAX - 1} are allowed"
        )
    names = [(f"pools[{at}].pool", pool.pool) for at, pool in enumerate(content.pools)]
    names += [(f"cordons[{at}].process_id", cordon.process_id) for at, cordon in enumerate(content.cordons)]
    for field, name in names:
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise SnapshotError(f"{field} has {len(name.encode())} bytes; 1 to {NAME_BYTES_MAX} are allowed")


def encode(content: Content) -> bytes:
    """Return the bytes of `content`, the same for equal contents in one release."""
    message = pb.SnapshotContent(
        pools=[
            pb.PoolTrack(
                pool=pool.pool,
                model_version=pool.model_version,
                track=pool.track.value,
                weight_percent=pool.weight_percent,
                closed=pool.is_closed,
            )
            for pool in content.pools
        ],
        rollout=content.rollout,
        rollout_state=content.rollout_state.value,
        step=content.step,
        only_tenants=sorted(content.only_tenants),
        never_tenants=sorted(content.never_tenants),
        cordons=[
            pb.Cordon(
                process_id=cordon.process_id,
                boot_id=cordon.boot_id,
                draining=cordon.is_draining,
                reason=cordon.reason,
            )
            for cordon in content.cordons
        ],
        ended_rollouts=content.ended_rollouts,
        published_ms=content.published_ms,
        stable_revision=content.stable_revision,
        shadows=[shadow_traffic.to_message(shadow) for shadow in content.shadows],
        regions=[region_entries.to_message(entry) for entry in content.regions],
    )
    return message.SerializeToString(deterministic=True)


def decode(data: bytes) -> Content:
    """Return the content in `data`, checked. Raises SnapshotError. A value of a later release counts as the default."""
    message = pb.SnapshotContent()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise SnapshotError("content is no SnapshotContent") from error
    content = of_message(message)
    check(content)
    return content


def of_message(message: pb.SnapshotContent) -> Content:
    """Return the content in `message`, not checked."""
    return Content(
        pools=tuple(
            PoolTrack(
                pool.pool, pool.model_version, _track(pool.track), pool.weight_percent, is_closed=pool.closed
            )
            for pool in message.pools
        ),
        rollout=message.rollout,
        rollout_state=_state(message.rollout_state),
        step=message.step,
        only_tenants=frozenset(message.only_tenants),
        never_tenants=frozenset(message.never_tenants),
        cordons=tuple(
            Cordon(each.process_id, each.boot_id, is_draining=each.draining, reason=each.reason)
            for each in message.cordons
        ),
        ended_rollouts=tuple(message.ended_rollouts),
        published_ms=message.published_ms,
        stable_revision=message.stable_revision,
        shadows=tuple(shadow_traffic.of_message(shadow) for shadow in message.shadows),
        regions=tuple(region_entries.of_message(entry) for entry in message.regions),
    )


def _track(value: int) -> Track:
    return Track(value) if value in pb.Track.values() else Track.IDLE


def _state(value: int) -> RolloutState:
    return RolloutState(value) if value in pb.RolloutState.values() else RolloutState.NONE
