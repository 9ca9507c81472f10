"""Regions in a snapshot: states, weights, shares of limits, and processes of other regions to dial. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmesh.control.v1 import region_pb2 as region_pb
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.region_sections import REGIONS_MAX

PROCESSES_MAX: Final = 256
"""Most routers, and most frontends, of one region in a snapshot."""

PERMILLE: Final = 1000
PERCENT: Final = 100
TEXT_BYTES_MAX: Final = 256


class DeclaredState(Enum):
    """State that a region declares about itself."""

    SERVING = region_pb.DECLARED_STATE_SERVING
    DRAINING = region_pb.DECLARED_STATE_DRAINING
    DRAINED = region_pb.DECLARED_STATE_DRAINED


class ObservedState(Enum):
    """State of a region as another one observes it."""

    UNKNOWN = region_pb.OBSERVED_STATE_UNSPECIFIED
    """Nothing was observed yet, or the region is the own one."""
    HEALTHY = region_pb.OBSERVED_STATE_HEALTHY
    SUSPECT = region_pb.OBSERVED_STATE_SUSPECT
    OUT = region_pb.OBSERVED_STATE_OUT
    RECOVERING = region_pb.OBSERVED_STATE_RECOVERING


@dataclass(frozen=True, slots=True)
class RegionProcess:
    """A router or a frontend of another region."""

    process_id: str
    """Bare name, unique in its region."""
    address: str
    boot_id: str
    pool: str = ""
    """Pool of a router. Empty: a frontend."""
    model_version: str = ""
    block_tokens: int = 0
    is_draining: bool = False
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """One region of the mesh. The own region has no processes here: its leases say which there are."""

    name: str
    declared: DeclaredState = DeclaredState.SERVING
    observed: ObservedState = ObservedState.UNKNOWN
    weight_percent: int = PERCENT
    """Share of the load that may go there: the lower of both states."""
    limit_share_permille: int = 0
    """Share of the tenants' limits that the region enforces."""
    routers: tuple[RegionProcess, ...] = ()
    frontends: tuple[RegionProcess, ...] = ()
    stable_version: str = ""
    stable_pool: str = ""
    tenants_differ: bool = False
    """True if its tenants differ in residency, limits or disabled marks."""

    @property
    def is_drained(self) -> bool:
        """True if it declares a drain, and has no weight any more."""
        return self.declared is not DeclaredState.SERVING and self.weight_percent == 0


def faults(entries: tuple[RegionEntry, ...]) -> Iterator[str]:
    """Yield each fault of `entries`: field, value and allowed range, one sentence each."""
    if len(entries) > REGIONS_MAX:
        yield f"regions has {len(entries)} entries; up to {REGIONS_MAX} are allowed"
    names = [entry.name for entry in entries]
    for name in {each for each in names if names.count(each) > 1}:
        yield f'regions: the region "{name}" is named twice; each region once is allowed'
    for at, entry in enumerate(entries):
        yield from _entry_faults(entry, f"regions[{at}]")


def _entry_faults(entry: RegionEntry, field: str) -> Iterator[str]:
    if not 0 < len(entry.name.encode()) <= TEXT_BYTES_MAX:
        yield f"{field}.name has {len(entry.name.encode())} bytes; 1 to {TEXT_BYTES_MAX} are allowed"
    if not 0 <= entry.weight_percent <= PERCENT:
        yield f"{field}.weight_percent is {entry.weight_percent}; 0 to {PERCENT} is allowed"
    if not 0 <= entry.limit_share_permille <= PERMILLE:
        yield f"{field}.limit_share_permille is {entry.limit_share_permille}; 0 to {PERMILLE} is allowed"
    for kind, processes in (("routers", entry.routers), ("frontends", entry.frontends)):
        if len(processes) > PROCESSES_MAX:
            yield f"{field}.{kind} has {len(processes)} entries; up to {PROCESSES_MAX} are allowed"
        for nth, process in enumerate(processes):
            texts = (process.process_id, process.address, process.boot_id)
            if not all(0 < len(text.encode()) <= TEXT_BYTES_MAX for text in texts):
                yield f"{field}.{kind}[{nth}] has an empty or a long text; 1 to {TEXT_BYTES_MAX} bytes are allowed"
            if len({each.process_id for each in processes[: nth + 1]}) <= nth:
                yield f'{field}.{kind}: the process "{process.process_id}" is named twice; once is allowed'


def to_message(entry: RegionEntry) -> pb.RegionEntry:
    """Return `entry` as a message."""
    return pb.RegionEntry(
        name=entry.name,
        declared=entry.declared.value,
        observed=entry.observed.value,
        weight_percent=entry.weight_percent,
        limit_share_permille=entry.limit_share_permille,
        routers=map(process_message, entry.routers),
        frontends=map(process_message, entry.frontends),
        stable_version=entry.stable_version,
        stable_pool=entry.stable_pool,
        tenants_differ=entry.tenants_differ,
    )


def of_message(message: pb.RegionEntry) -> RegionEntry:
    """Return the entry in `message`, not checked. A state of a later release counts as none."""
    return RegionEntry(
        message.name,
        declared_state(message.declared),
        observed_state(message.observed),
        message.weight_percent,
        message.limit_share_permille,
        tuple(map(process_of, message.routers)),
        tuple(map(process_of, message.frontends)),
        message.stable_version,
        message.stable_pool,
        tenants_differ=message.tenants_differ,
    )


def process_message(process: RegionProcess) -> region_pb.RegionProcess:
    """Return `process` as a message."""
    return region_pb.RegionProcess(
        process_id=process.process_id,
        address=process.address,
        boot_id=process.boot_id,
        pool=process.pool,
        model_version=process.model_version,
        block_tokens=process.block_tokens,
        draining=process.is_draining,
        capabilities=process.capabilities,
    )


def process_of(message: region_pb.RegionProcess) -> RegionProcess:
    """Return the process in `message`, not checked."""
    return RegionProcess(
        message.process_id,
        message.address,
        message.boot_id,
        message.pool,
        message.model_version,
        message.block_tokens,
        is_draining=message.draining,
        capabilities=tuple(message.capabilities),
    )


def declared_state(value: int) -> DeclaredState:
    """Return the declared state of a message. A region that declared nothing serves."""
    return DeclaredState(value) if value in _DECLARED else DeclaredState.SERVING


def observed_state(value: int) -> ObservedState:
    """Return the observed state of a message."""
    return ObservedState(value) if value in _OBSERVED else ObservedState.UNKNOWN


_DECLARED: Final = frozenset(state.value for state in DeclaredState)
_OBSERVED: Final = frozenset(state.value for state in ObservedState)
