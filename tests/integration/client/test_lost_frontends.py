"""Failover: streams of the client survive the loss of their frontend with a pause. No token is repeated or missing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from kvmesh.client import Chunk, Client, GenerationStream
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.harness import Mesh, until
from tests.patience import quiet_s

pytestmark = pytest.mark.mesh

STREAMS = 16
TOKENS = 400


@dataclass
class Reader:
    """One stream, and its longest wait for a chunk."""

    generation: GenerationStream
    chunks: list[Chunk] = field(default_factory=list)
    pause_s: float = 0.0

    async def run(self) -> None:
        """Read all chunks."""
        last_s: float | None = None
        async for chunk in self.generation:
            now_s = quiet_s()
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


async def whole(mesh: Mesh, asked: Sequence[list[int]]) -> list[GenerationStream]:
    """Return the outputs of an undisturbed mesh."""
    async with Client(addresses(mesh)) as client:
        found = [
            client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True)
            for at, each in enumerate(asked)
        ]
        await asyncio.gather(*(each.all() for each in found))
        assert all(each.resumes == 0 and each.sends == 1 for each in found)
        return found


@dataclass
class Outcome:
    """The results of 16 streams during a fault of their frontend."""

    moved: list[Reader]
    stayed: list[Reader]

    @property
    def pause_s(self) -> float:
        """Longest wait of a moved stream for its next chunk."""
        return max(reader.pause_s for reader in self.moved)

    @property
    def usual_pause_s(self) -> float:
        """Longest wait of the streams without a fault: the delay that a busy machine adds."""
        return max(reader.pause_s for reader in self.stayed)

    @property
    def taken_over(self) -> int:
        """Moved streams with a takeover of their running attempt."""
        return sum(finish(reader).explanation.adoption_count > 0 for reader in self.moved)

    @property
    def recomputed(self) -> int:
        """Tokens that were computed again."""
        return sum(finish(reader).usage.recomputed_token_count for reader in (*self.moved, *self.stayed))


def finish(reader: Reader) -> pb.Finished:
    """Return the last message of a reader's stream."""
    assert reader.generation.finish is not None, reader.generation
    return reader.generation.finish


async def disturbed(mesh: Mesh, disturb: Callable[[], Awaitable[object]]) -> Outcome:
    """Run 16 streams over both frontends, run `disturb` when all have tokens, return the outcome. All outputs must be
    exact.
    """
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
            await until(lambda: all(len(each.generation.ids) > 20 for each in readers), 30, "all have tokens")
            await disturb()
    for reader, other in zip(readers, expected, strict=True):
        assert reader.generation.ids == other.ids
        assert reader.generation.text == other.text == "".join(each.text for each in reader.chunks)
    moved = [each for each in readers if each.generation.resumes]
    outcome = Outcome(moved, [each for each in readers if not each.generation.resumes])
    print(
        f"{len(moved)} moved, {outcome.taken_over} taken over, {outcome.recomputed} tokens recomputed, "
        f"longest pause {outcome.pause_s:.3f} s"
    )
    return outcome


async def test_kill_of_a_frontend_costs_a_pause(mesh: Mesh) -> None:
    """kill -9 under 16 streams: each continues at the other frontend within a second, and no token is computed again."""
    seen = await disturbed(mesh, mesh.parts["frontend-0"].end)
    assert 0 < len(seen.moved) < STREAMS
    assert seen.taken_over == len(seen.moved)
    assert seen.recomputed == 0
    assert seen.pause_s < 1.0 + seen.usual_pause_s
    await mesh.idle(5)


async def test_a_frozen_frontend_is_detected(mesh: Mesh) -> None:
    """SIGSTOP for 10 s: detected within 3 s; the process disturbs no stream after SIGCONT."""

    async def freeze() -> None:
        os.kill(mesh.parts["frontend-0"].pid, signal.SIGSTOP)

    seen = await disturbed(mesh, freeze)
    assert 0 < len(seen.moved) < STREAMS
    assert seen.taken_over == len(seen.moved)
    assert seen.recomputed == 0
    assert seen.pause_s < 3.5 + seen.usual_pause_s
    os.kill(mesh.parts["frontend-0"].pid, signal.SIGCONT)
    await mesh.idle(10)


async def test_a_draining_frontend_moves_its_streams(mesh: Mesh) -> None:
    """SIGTERM (graceful shutdown): the client is told at once and continues elsewhere without a gap; the process ends
    within seconds.
    """
    ended = list[float]()

    async def drain() -> None:
        began_s = quiet_s()
        assert await mesh.parts["frontend-0"].end(signal.SIGTERM) == 0
        ended.append(quiet_s() - began_s)

    seen = await disturbed(mesh, drain)
    assert 0 < len(seen.moved) < STREAMS
    assert seen.taken_over == len(seen.moved)
    assert seen.recomputed == 0
    assert seen.pause_s < 1.0 + seen.usual_pause_s
    assert ended[0] < 10
    await mesh.idle(5)
