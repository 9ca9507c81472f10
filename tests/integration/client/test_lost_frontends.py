"""Streams of the client outlive their frontend, however it goes: no token repeated, none missing, a pause."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmesh.client import Chunk, Client, Generation
from tests.integration.harness import Mesh, configure, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

STREAMS = 16
TOKENS = 400


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two frontends before one router and one replica of each role."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01},
        frontend={"replicas": 2},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    async with running_mesh(config, tmp_path) as running:
        yield running


@dataclass
class Reader:
    """One stream, and the longest wait for a chunk of it."""

    generation: Generation
    chunks: list[Chunk] = field(default_factory=list)
    pause_s: float = 0.0

    async def run(self) -> None:
        """Take all chunks."""
        loop = asyncio.get_running_loop()
        last_s: float | None = None
        async for chunk in self.generation:
            now_s = loop.time()
            if last_s is not None:
                self.pause_s = max(self.pause_s, now_s - last_s)
            last_s = now_s
            self.chunks.append(chunk)


def addresses(mesh: Mesh) -> list[str]:
    """Return the frontends' addresses."""
    return [mesh.parts[name].address for name in ("frontend-0", "frontend-1")]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(4, 200) for _ in range(draw.randrange(20, 200))] for _ in range(count)]


async def whole(mesh: Mesh, asked: Sequence[list[int]]) -> list[Generation]:
    """Return the undisturbed answers."""
    async with Client(addresses(mesh)) as client:
        found = [
            client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True)
            for at, each in enumerate(asked)
        ]
        await asyncio.gather(*(each.all() for each in found))
        assert all(each.resumes == 0 and each.sends == 1 for each in found)
        return found


async def test_kill_of_a_frontend_costs_a_pause(mesh: Mesh) -> None:
    """kill -9 under 16 streams: each goes on at the other frontend, token for token, within a second."""
    asked = prompts(1, STREAMS)
    expected = await whole(mesh, asked)
    async with Client(addresses(mesh)) as client:
        readers = [
            Reader(client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True))
            for at, each in enumerate(asked)
        ]
        async with asyncio.TaskGroup() as tasks:
            for reader in readers:
                tasks.create_task(reader.run())
            while not all(len(each.generation.ids) > 20 for each in readers):
                await asyncio.sleep(0.01)
            await mesh.parts["frontend-0"].end(signal.SIGKILL)
    for reader, other in zip(readers, expected, strict=True):
        assert reader.generation.ids == other.ids
        assert reader.generation.text == other.text
        assert "".join(each.text for each in reader.chunks) == other.text
    moved = [each for each in readers if each.generation.resumes]
    print("moved", len(moved), "longest pause", max(each.pause_s for each in readers), [each.generation.finish.usage.recomputed_token_count for each in moved])
    assert 0 < len(moved) < STREAMS
    await mesh.idle(5)
