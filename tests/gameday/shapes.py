"""Shapes of the regions of a game day: their configurations, engines and tenants. Pure.

Engines have simulated costs, so that a region is full while this machine is half idle. All tokens are a function of the
prompt, the seed and the salt of the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import msgspec

from kvmesh.config import MeshConfig, build
from kvmesh.pools import FIRST_POOL
from kvmesh.tenants.sections import TenantTable

REGIONS: Final = ("eu", "us", "ap")
"""Names of the regions. The first one is the one that breaks."""

TARGET: Final = REGIONS[0]

USERS, BATCH, PINNED = "users", "batch", "pinned"
KINDS: Final = (USERS, BATCH, PINNED)
"""Kinds of callers: users, users of a lower priority class, and users that only their home region may serve."""

VERSION: Final = "v1"
NEXT_VERSION: Final = "v2"
OLDER_POOL: Final = "older"
BLOCK_TOKENS: Final = 16
SEQUENCE_TOKENS: Final = 1536
FAULTS_FOLDER: Final = "/faults"
"""Folder in every part with the faults of the engines, a file for each region."""

QUEUE_DELAY_S: Final = 2.0
"""Queue delay above which a router refuses."""

ENGINE: Final[Mapping[str, Any]] = {
    "arithmetic": "hashed",
    "block_tokens": BLOCK_TOKENS,
    "kv_blocks": 8192,
    "prefill_kv_blocks": 8192,
    "max_sequence_tokens": SEQUENCE_TOKENS,
    "step_s": 0.02,
    "prefill_s": 0.004,
    "prefill_token_s": 0.0008,
}
"""A turn of a conversation at home computes some 100 tokens: 0.1 s. One prefill replica takes some ten turns per second."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Replicas of each region, by role, and its version."""

    name: str
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Region -> (prefill, decode). Absent: one of each."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Region -> model version. Absent: VERSION."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Region -> model version of a second pool, which serves no new session. Absent: it has no second pool."""
    is_seeded: bool = True
    """False: hot prompts of other regions are not replayed."""

    def version(self, region: str) -> str:
        """Return the model version of a region."""
        return self.versions.get(region, VERSION)

    def replicas_of(self, region: str) -> tuple[int, int]:
        """Return (prefill, decode) of a region."""
        return self.replicas.get(region, (1, 1))


EQUAL: Final = Shape("equal")
UNEQUAL: Final = Shape("unequal", replicas={"eu": (2, 2), "us": (1, 2)})
MIXED: Final = Shape("mixed", versions={"us": NEXT_VERSION, "ap": NEXT_VERSION})
BOTH: Final = Shape(
    "both", versions={"us": NEXT_VERSION, "ap": NEXT_VERSION}, older={"us": VERSION, "ap": VERSION}
)
TRIPLE: Final = Shape("triple", replicas={"eu": (3, 3)})
COLD: Final = Shape("cold", is_seeded=False)
SHAPES: Final = (EQUAL, UNEQUAL, MIXED, BOTH, TRIPLE, COLD)


def pinned(region: str) -> str:
    """Return the tenant that only `region` may serve."""
    return f"{PINNED}-{region}"


def key_of(tenant: str) -> str:
    """Return the API key of a tenant."""
    return f"kvm_{tenant}"


def tenant_of(kind: str, home: str) -> str:
    """Return the tenant of a caller."""
    return pinned(home) if kind == PINNED else kind


def salt_of(version: str) -> str:
    """Return the salt of the engines of a version. Each version has other tokens."""
    return f"gameday-{version}"


def configs(shape: Shape, regions: tuple[str, ...]) -> dict[str, MeshConfig]:
    """Return the configuration of each region, as `region_configs.joined` takes them: it sets their addresses."""
    return {name: _config(shape, name, regions) for name in regions}


def _config(shape: Shape, region: str, regions: tuple[str, ...]) -> MeshConfig:
    prefill, decode = shape.replicas_of(region)
    version, older = shape.version(region), shape.older.get(region)
    versions = [version] if older is None else [version, older]
    pools = {} if older is None else {FIRST_POOL: {"version": version}, OLDER_POOL: {"version": older}}
    tenants = [USERS, BATCH, *(pinned(name) for name in regions)]
    config = build(
        {
            "engine": ENGINE,
            "router": {"local_prefill_tokens_max": 0, "queue_delay_max_s": QUEUE_DELAY_S},
            "frontend": {"replicas": 1, "port": 0},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "control": {"replicas": 1},
            "warm_up": {"seeding": "pull" if shape.is_seeded else "none"},
            "region": {"name": region},
            "regions": {name: {"control": [f"127.0.0.{at}:1"]} for at, name in enumerate(regions, start=1)},
            "versions": {
                name: {"salt": salt_of(name), "faults": f"@{FAULTS_FOLDER}/{region}"} for name in versions
            },
            "pools": pools,
            "classes": {BATCH: {"priority_class": 3, "sheddable": True}},
            "tenants": {name: {} for name in tenants},
            "keys": {
                name: {"tenant": name, "sha256": sha256(key_of(name).encode()).hexdigest()}
                for name in tenants
            },
        }
    )
    tables = {name: _tenant(name, regions) for name in tenants}
    return msgspec.structs.replace(config, tenants=tables)


def _tenant(name: str, regions: tuple[str, ...]) -> TenantTable:
    """Return a tenant with limits that never bind. Game day measures the load of regions."""
    allowed = tuple(each for each in regions if name == pinned(each))
    return TenantTable(
        requests_per_min=1e6,
        tokens_per_min=1e9,
        concurrency=10_000,
        clamp=False,
        class_=BATCH if name == BATCH else "standard",
        regions=allowed,
    )
