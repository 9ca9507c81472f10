"""The end of a whole mesh: all frontends get SIGTERM at once, as from Ctrl-C at `kvmesh up`, and no stream breaks."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kvmesh.client import Client
from tests.integration.harness import configure, running_mesh, until
from tests.integration.probes import check_pages, metrics_address, until_probed

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "hashed", "kv_blocks": 512, "step_s": 0.02},
    prefill={"replicas": 1},
    decode={"replicas": 1},
    frontend={"replicas": 2},
)
ROLES = ("frontend", "router", "prefill", "decode")
DRAINS = (503, "the process drains\n")
TOKENS = 150
"""3 s of output: streams run long after the signal."""


async def test_frontends_that_stop_together_hand_no_stream_over(tmp_path: Path) -> None:
    """Each client could move, and no other frontend would take its stream. Probes see the drain while streams run."""
    async with running_mesh(CONFIG, tmp_path) as mesh:
        probes = {name: metrics_address(mesh.parts[name].log) for name in mesh.running(*ROLES)}
        for name, address in probes.items():
            await check_pages(address, name.partition("-")[0])
        frontends = [mesh.parts[name] for name in ("frontend-0", "frontend-1")]
        async with Client([each.address for each in frontends]) as client:
            counts = dict.fromkeys(range(8), 0)

            async def read(number: int) -> tuple[list[int], int]:
                stream = client.generate(
                    prompt_tokens=range(10 + number, 60),
                    max_output_tokens=TOKENS,
                    seed=number,
                    ignore_eos=True,
                )
                async for tokens in stream:
                    counts[number] += len(tokens.ids)
                return stream.ids, stream.resumes

            running = [asyncio.create_task(read(number)) for number in counts]
            await until(lambda: min(counts.values()) >= 5, 30, "all streams have tokens")
            ending = asyncio.gather(*(each.end(signal.SIGTERM) for each in frontends))
            for each in frontends:
                await until_probed(probes[each.name], "/readyz", DRAINS)
                await check_pages(probes[each.name], "frontend", DRAINS)
            assert not any(task.done() for task in running), "the streams ended before the probes"
            statuses = await ending
            answers = await asyncio.gather(*running)
        assert [len(ids) for ids, _ in answers] == [TOKENS] * len(counts)
        assert [resumes for _, resumes in answers] == [0] * len(counts)
        assert statuses == [0, 0]
