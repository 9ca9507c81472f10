"""The last act of `make demo`: a decode replica and then the frontend are killed in the middle of an answer.

The same request is answered twice with the same seed: first undisturbed, then with both kills. The tokens must be equal.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.mesh_file import ListedProcess, MeshFile
from kvmesh.client import Client, GenerationStream, RetryPolicy
from kvmesh.decode.v1 import decode_pb2 as decode
from kvmesh.decode.v1 import decode_pb2_grpc
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.server import channel

OUTPUT_TOKENS: Final = 240
KILL_DECODE_AT: Final = 30
"""Tokens after which the decode replica is killed."""
KILL_FRONTEND_AT: Final = 120
KILLS: Final = 2
TRIES: Final = 3
"""Most answers until the first kill."""
DEADLINE_S: Final = 60.0
CALL_S: Final = 2.0
PROMPT: Final = "It was a fine morning, and Elizabeth"


class Output(Protocol):
    """What the client has of an answer."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...


@dataclass(slots=True)
class Kill:
    """One process that was killed, and how the stream went on."""

    name: str
    role: str
    position: int
    """Tokens that the client had."""
    at_s: float
    pause_s: float = 0.0
    """Longest time without a token from the kill on, until the next kill."""
    successor: str = ""


class _Decodes:
    """The decode replicas, with channels that are open before an answer begins: it may take no longer than a connection."""

    def __init__(self, channels: Sequence[tuple[ListedProcess, grpc.aio.Channel]]) -> None:
        self._stubs = [(each, decode_pb2_grpc.DecodeServiceStub(opened)) for each, opened in channels]

    async def busy(self) -> ListedProcess | None:
        """Return the replica that runs a request, or None."""
        counts = await asyncio.gather(*(self._running(stub) for _, stub in self._stubs))
        return next((each for (each, _), count in zip(self._stubs, counts, strict=True) if count), None)

    async def _running(self, stub: Any) -> int:
        with suppress(grpc.aio.AioRpcError):
            status = await stub.GetStatus(decode.GetStatusRequest(), timeout=CALL_S)
            return int(status.load_report.running_request_count)
        return 0


@dataclass(slots=True)
class _Reading:
    ids: list[int] = field(default_factory=list)
    heard_s: float = 0.0
    kills: list[Kill] = field(default_factory=list)


async def undisturbed_and_killed(console: Console, mesh: MeshFile) -> bool:
    """Answer the request twice, show both, and return True if all tokens are equal. Raises GenerateError."""
    frontends = mesh.addresses_of("frontend")
    async with Client(frontends, retry_policy=RetryPolicy(), open_channel=channel) as client:
        quiet = await client.send(request(), deadline_s=DEADLINE_S).all()
        title = (
            f'"{PROMPT} ...", goes on for {len(quiet.ids)} tokens. They were made once, unseen. '
            "Now they are made again, and two processes that serve them are killed meanwhile."
        )
        console.print(Text(f"\n{title}\n", style="cyan"))
        async with AsyncExitStack() as stack:
            replicas = list(_of_role(mesh, "decode"))
            channels = [await stack.enter_async_context(channel(each.address)) for each in replicas]
            decodes = _Decodes(list(zip(replicas, channels, strict=True)))
            await decodes.busy()  # a first call opens the connections
            for left in reversed(range(TRIES)):
                answer = client.send(request(), deadline_s=DEADLINE_S)
                reading = await _read(console, mesh, answer, decodes)
                console.print("\n")
                if reading.kills or not left:
                    break
                console.print(
                    "This machine has much else to do: the answer ended before a kill. Once more.\n"
                )
    _name_successors(reading.kills, answer, mesh)
    console.print(kills_table(reading.kills))
    sentence, is_proved = judged(quiet, answer, len(reading.kills))
    console.print(sentence)
    return is_proved


def judged(quiet: Output, answer: Output, kills: int) -> tuple[str, bool]:
    """Return the last sentence, and whether both kills were survived: all tokens and all text are those of `quiet`."""
    same = sum(1 for mine, theirs in zip(quiet.ids, answer.ids, strict=False) if mine == theirs)
    lost = len(quiet.ids) - same
    told = f"Tokens: {same} of {len(quiet.ids)} are those of the undisturbed answer; {lost} were lost."
    if kills < KILLS:
        told += f" Only {kills} of {KILLS} processes were killed: the answer ended before."
    return told, kills == KILLS and quiet.ids == answer.ids and quiet.text == answer.text


def request() -> inference.GenerateRequest:
    """Return the request, with a seed and without an early end."""
    return inference.GenerateRequest(
        text=PROMPT,
        sampling=inference.Sampling(temperature=0.8, top_p=0.95, seed=16, ignore_eos=True),
        limits=inference.Limits(max_output_tokens=OUTPUT_TOKENS),
        options=inference.GenerateOptions(explain=True),
    )


def kills_table(kills: list[Kill]) -> Table:
    """Return one row per kill."""
    table = Table("killed", "after", "pause", "went on at")
    for each in kills:
        table.add_row(each.name, f"{each.position} tokens", f"{each.pause_s:.2f} s", each.successor)
    return table


async def _read(console: Console, mesh: MeshFile, answer: GenerationStream, decodes: _Decodes) -> _Reading:
    """Read the answer, print it, and kill one process after each of two numbers of tokens."""
    reading, loop = _Reading(), asyncio.get_running_loop()
    async with answer:
        async for chunk in answer:
            now_s = loop.time()
            if reading.kills and reading.heard_s:
                last = reading.kills[-1]
                last.pause_s = max(last.pause_s, now_s - max(reading.heard_s, last.at_s))
            reading.heard_s = now_s
            reading.ids += chunk.ids
            console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
            victim = await _victim(mesh, answer, decodes, len(reading.ids), len(reading.kills))
            if victim is not None:
                console.print(Text(f"\n[kill -9 of {victim.name}]", style="bold red"))
                os.kill(victim.pid, signal.SIGKILL)
                reading.kills.append(Kill(victim.name, victim.role, len(reading.ids), loop.time()))
    return reading


async def _victim(
    mesh: MeshFile, answer: GenerationStream, decodes: _Decodes, tokens: int, killed: int
) -> ListedProcess | None:
    """Return the process to kill now, or None."""
    if killed == 0 and tokens >= KILL_DECODE_AT:
        return await decodes.busy()
    if killed == 1 and tokens >= KILL_FRONTEND_AT:
        return next((each for each in mesh.processes if each.address == answer.address), None)
    return None


def _name_successors(kills: list[Kill], answer: GenerationStream, mesh: MeshFile) -> None:
    """Fill in where the stream went on, by the moves of the client and by the explanation."""
    names = {each.address: each.name for each in mesh.processes}
    for each in kills:
        if each.role == "frontend":
            each.successor = ", ".join(names.get(move.address, move.address) for move in answer.moves)
        elif answer.finish is not None:
            attempts = answer.finish.explanation.attempts
            each.successor = attempts[-1].decode_replica if attempts else ""


def _of_role(mesh: MeshFile, role: str) -> Iterator[ListedProcess]:
    return (each for each in mesh.processes if each.role == role)
