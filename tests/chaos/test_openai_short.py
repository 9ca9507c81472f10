"""OpenAI clients while a frontend and a decode replica are killed. `make chaos CLIENTS=openai` runs more cells."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvmesh.tenants.catalogue import digest
from kvmesh.tenants.sections import KeyTable, TenantTable
from tests.chaos.openai_clients import OpenAiClients
from tests.chaos.plan import BEFORE, Stream, stream_of
from tests.chaos.records import FAILED, Seen
from tests.chaos.rig import KEY, PAYER, ProcessRig
from tests.chaos.truth import Truth
from tests.integration.harness import configure, running_mesh
from tests.integration.live_mesh import until

pytestmark = pytest.mark.mesh

EVENT_CLIENTS, PACKAGE_CLIENTS = 10, 4
OUTPUT_TOKENS = 120
BROKEN_AFTER = 5
"""Tokens of each stream at the first fault."""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ProcessRig]:
    """Two frontends and two decode replicas, without a control plane."""
    config = configure(
        engine={"arithmetic": "hashed", "kv_blocks": 1024, "max_sequence_tokens": 2048, "step_s": 0.02},
        frontend={"replicas": 2},
        prefill={"replicas": 1},
        decode={"replicas": 2},
        control={"replicas": 0},
    )
    tables = {
        "tenants": {PAYER: TenantTable(clamp=False)},
        "keys": {PAYER: KeyTable(tenant=PAYER, sha256=digest(KEY).hex())},
    }
    async with running_mesh(msgspec.structs.replace(config, **tables), tmp_path) as mesh:
        yield ProcessRig(mesh)


def streams() -> list[Stream]:
    """Half of the streams begin at each frontend. No client leaves, and none has a deadline."""
    rng = random.Random(20)
    drawn = (
        stream_of(rng, number, BEFORE, [(17,)], is_plain=number >= EVENT_CLIENTS)
        for number in range(EVENT_CLIENTS + PACKAGE_CLIENTS)
    )
    return [
        replace(
            each,
            prompt=each.prompt[:200],
            max_output_tokens=OUTPUT_TOKENS,
            frontend=each.number % 2,
            cancel_s=None,
            deadline_s=None,
        )
        for each in drawn
    ]


async def test_a_lost_frontend_and_a_lost_decode_replica_cost_no_client_with_a_key_a_token(
    rig: ProcessRig,
) -> None:
    """Clients of a killed frontend go on behind their last event at the other one, with exactly the rest. A caller of the
    openai package gets APIConnectionError there, and the whole answer at the frontend that lives.
    """
    mesh, planned, clients = rig.mesh, streams(), OpenAiClients()
    truth = Truth(mesh.config.engine.salt, mesh.config.engine.max_sequence_tokens)
    async with clients.readers(rig) as (events, package):
        seen = {each.number: Seen(each.number, time.monotonic()) for each in planned}

        async with asyncio.TaskGroup() as group:
            for each in planned:
                reader = package if each.is_plain else events
                group.create_task(reader.read(each, seen[each.number], time.monotonic))
            await until(
                lambda: min(len(each.ids) for each in seen.values()) >= BROKEN_AFTER,
                30,
                "all streams have begun",
            )
            await mesh.parts["frontend-0"].end()
            await mesh.parts["decode-0"].end()
    for stream, one in zip(planned, seen.values(), strict=True):
        name = f"stream {stream.number}: {one.end} {one.reason} {one.text} {one.broken_rules}"
        wanted = truth.tokens(stream)
        if stream.is_plain and stream.frontend == 0:
            assert one.end == FAILED and one.ids == wanted[: len(one.ids)], name
            continue
        assert one.end != FAILED and one.finish_reason == "length" and one.ids == wanted, name
        assert bool(one.client_resumes) == (stream.frontend == 0 and not stream.is_plain), name
    assert clients.saw() == {
        "openai.APIConnectionError behind some tokens": PACKAGE_CLIENTS // 2,
        "the whole answer": PACKAGE_CLIENTS // 2,
    }
