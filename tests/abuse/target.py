"""The mesh under attack: processes of this machine, a tenant with a key, engines that leave CPU time to the others."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.tenants.minting import mint
from kvmesh.tenants.sections import KeyTable
from tests.chaos import census
from tests.chaos.rig import PAYER, ProcessRig, chaos_config
from tests.integration.generation import token_request
from tests.integration.harness import Mesh, running_mesh
from tests.raw_frames import Metadata

GENERATE: Final = "/kvmesh.inference.v1.InferenceService/Generate"
ATTACH: Final = "/kvmesh.attach.v1.AttachService/Attach"
KEY: Final = "authorization"

FRONT: Final = "frontend-0"
"""The frontend that is attacked, and that legitimate calls use."""

QUIET: Final = "frontend-1"
"""The frontend of the attacks on charges alone: its settled tokens are their cost."""

SERVICES: Final = (FRONT, "router-0", "prefill-0", "decode-0")
"""One process of each role."""

CONNECTIONS_MAX: Final = 12_000
"""Connection limit of the frontends: above the connections of an attack, so that legitimate callers can still connect."""

STEP_S: Final = 0.02
SHORT_SLOTS: Final = 32
SHORT_LIVE: Final = 128
"""Live requests of a frontend in the short form: the burst exceeds them."""


@dataclass(slots=True)
class Target:
    """A running mesh, and the means of an attacker: an API key, addresses, and access to its Redis."""

    rig: ProcessRig
    key: str
    """A valid API key."""
    rng: random.Random
    is_short: bool

    @property
    def mesh(self) -> Mesh:
        """The mesh of the rig."""
        mesh = self.rig.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    def address(self, name: str = FRONT) -> str:
        """Return the address of a part."""
        return self.mesh.parts[name].address

    @property
    def redis_url(self) -> str:
        """Return the Redis of the mesh."""
        return f"redis://{self.address('redis')}/0"

    def callers(self) -> dict[str, Metadata]:
        """Return the metadata of callers without a key, with a wrong one, and with a right one, by name."""
        return {"no key": (), "wrong key": bearer(mint()), "right key": bearer(self.key)}

    def request(self, *, prompt_tokens: int = 40, output_tokens: int = 8) -> bytes:
        """Return a request that may be served, as bytes; each with a prompt of its own."""
        prompt = [self.rng.randrange(16, 4096) for _ in range(prompt_tokens)]
        made = token_request(prompt, max_output_tokens=output_tokens, seed=self.rng.getrandbits(62))
        return bytes(made.SerializeToString())

    async def charged(self, frontend: str = QUIET) -> int:
        """Return the output tokens that `frontend` has settled since its start."""
        samples = await census.scrape(self.rig, frontend)
        return int(samples.get("kvmesh_frontend_settled_tokens_total output", 0))


def bearer(key: str) -> Metadata:
    """Return the metadata of an API key."""
    return ((KEY, f"Bearer {key}"),)


def abuse_config(key: str, *, is_short: bool, admits_anybody: bool = False, edge: str = "") -> MeshConfig:
    """Return the configuration of the mesh: one tenant, with limits above the load of the legitimate calls.

    `admits_anybody`: a call without a key belongs to that tenant, too; else it is refused. `edge`: transport of all ports;
    empty: those of the configuration.
    """
    made = chaos_config()
    hashed = hashlib.sha256(key.encode()).hexdigest()
    replace = msgspec.structs.replace
    return replace(
        made,
        mesh=replace(made.mesh, hops=edge or made.mesh.hops),
        engine=replace(made.engine, step_s=STEP_S),
        prefill=replace(made.prefill, replicas=1),
        decode=replace(made.decode, slots_max=SHORT_SLOTS if is_short else made.decode.slots_max),
        router=replace(made.router, replicas=1),
        frontend=replace(
            made.frontend,
            edge=edge or made.frontend.edge,
            connections_max=CONNECTIONS_MAX,
            anonymous_tenant=PAYER if admits_anybody else "",
            max_live_requests=SHORT_LIVE if is_short else made.frontend.max_live_requests,
        ),
        keys={"abuse": KeyTable(tenant=PAYER, sha256=hashed)},
    )


@asynccontextmanager
async def opened(
    folder: Path, seed: int, *, is_short: bool, admits_anybody: bool = False, edge: str = ""
) -> AsyncIterator[Target]:
    """Start a mesh with its logs in `folder`, and end it."""
    key = mint()
    async with running_mesh(
        abuse_config(key, is_short=is_short, admits_anybody=admits_anybody, edge=edge), folder
    ) as mesh:
        yield Target(ProcessRig(mesh), key, random.Random(seed), is_short)
