"""Measures users' p99 with a black-holed shadow target: `python -m bench.shadow [--blocks N] [--seconds S] [--write PAGE]`.

A mesh with three pools runs, and a router in `next` that accepts every request and never answers. In blocks with a shadow,
the frontends copy every session there. The shadow starts and stops between the blocks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import grpc
import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import accounting, machine, options, pages
from bench.processes import LOAD_CORE, Fleet
from bench.results import BenchError
from bench.rollouts.mesh import FRONTENDS, NEXT, NEXT_VERSION, RolloutMesh
from bench.shadow import load
from bench.shadow.blocks import Block, Ratio, order, pairs, ratio
from kvmesh import config
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.control.v1 import shadow_pb2_grpc

AIM: Final = 1.05
"""Largest upper bound of the ratio of p99."""

START_S: Final = 60.0
SETTLE_S: Final = 5.0
"""Time from a start to its block: frontends lose the stopped router after three seconds."""

STOP_S: Final = 1.0
WARM_S: Final = 5.0


class Bench:
    """The mesh, and one block after the other."""

    def __init__(self, mesh: RolloutMesh, rate_per_s: float, seconds: float) -> None:
        self._mesh = mesh
        self._rate_per_s = rate_per_s
        self._seconds = seconds
        self._router = mesh.running[f"{NEXT}-router-0"].pid
        self._frontends = [mesh.running[f"frontend-{number}"] for number in range(FRONTENDS)]
        self.off_s: list[float] = []
        """Seconds from each stop to the last copy in flight."""

    async def block(self, number: int, *, is_on: bool) -> Block:
        """Measure one block."""
        async with grpc.aio.insecure_channel(self._mesh.control) as channel:
            stub: Any = shadow_pb2_grpc.ShadowServiceStub(channel)
            if is_on:
                await self._start(stub)
            before, copies = self._cpu_s(), self._sum("shadow_copies_total")
            began_s = time.monotonic()
            measured = await load.send(
                self._mesh.frontends, self._rate_per_s, self._seconds, number, times_seed=number // 2
            )
            took_s = time.monotonic() - began_s
            block = Block(
                is_on,
                tuple(measured.latencies_s),
                tuple(measured.first_tokens_s),
                measured.errors,
                (self._cpu_s() - before) / took_s,
                self._sum("shadow_copies_total") - copies,
            )
            if is_on:
                await self._stop(stub)
        return block

    async def _start(self, stub: Any) -> None:
        """Start the shadow, then stop the pool's own router: copies go to the black hole alone."""
        os.kill(self._router, signal.SIGCONT)
        settings = pb.Shadow(to_pool=NEXT, sample_permille=1000, mode=pb.Shadow.MODE_FULL, token_max=10**9)
        until_s = time.monotonic() + START_S
        while True:
            try:
                await stub.StartShadow(pb.StartShadowRequest(settings=settings))
                break
            except grpc.aio.AioRpcError as error:
                if time.monotonic() > until_s:
                    raise BenchError(f"the shadow does not start: {error.details()}") from error
                await asyncio.sleep(0.5)
        os.kill(self._router, signal.SIGSTOP)
        await asyncio.sleep(SETTLE_S)

    async def _stop(self, stub: Any) -> None:
        began_s = time.monotonic()
        await stub.StopShadow(pb.StopShadowRequest())
        while self._sum("shadow_in_flight"):
            await asyncio.sleep(0.02)
            if time.monotonic() - began_s > 10 * STOP_S:
                raise BenchError("copies run on after the stop")
        self.off_s.append(time.monotonic() - began_s)

    def _cpu_s(self) -> float:
        return sum(accounting.cpu_ns(process.pid) for process in self._frontends) / 1e9

    def _sum(self, metric: str) -> float:
        return sum(process.metric(f"kvmesh_frontend_{metric}") for process in self._frontends)

    def close(self) -> None:
        """Let the stopped router end."""
        os.kill(self._router, signal.SIGCONT)


def page(
    blocks: list[Block], off_s: list[float], command: str, seconds: float, about: Mapping[str, str]
) -> list[str]:
    """Return the page of a run."""
    both = pairs(blocks)
    ratios: dict[str, Ratio] = {
        "latency, p99": ratio([(on.p99_s, off.p99_s) for on, off in both]),
        "time to first token, p99": ratio([(on.ttft_p99_s, off.ttft_p99_s) for on, off in both]),
        "CPU of the frontends": ratio([(on.frontend_cpu, off.frontend_cpu) for on, off in both]),
    }
    rows = [
        (
            name,
            f"{found.value:.3f}",
            f"{found.upper:.3f}",
            ("" if name.startswith("CPU") else "met" if found.upper <= AIM else "missed"),
        )
        for name, found in ratios.items()
    ]
    each = [
        (
            str(at + 1),
            "on" if block.is_on else "off",
            f"{len(block.latencies_s):,}",
            str(block.errors),
            f"{1000 * block.p99_s:.1f}",
            f"{1000 * block.ttft_p99_s:.1f}",
            f"{100 * block.frontend_cpu:.1f}",
            f"{block.copies:,.0f}",
        )
        for at, block in enumerate(blocks)
    ]
    lines = ["# Shadow traffic with a dead target", ""]
    lines += pages.paragraph(
        "A shadow copies every session to a router that accepts all requests and never answers. Users' requests run in "
        "blocks with the shadow on and off, in pairs of alternating order. The ratio is the geometric mean over pairs, "
        f"with its upper 95 % bound by Student's t. The aim for both latencies is an upper bound of at most {AIM:.2f}."
    )
    lines += ["", *pages.origin(command, seconds, about)]
    lines += pages.section(
        "On over off", pages.table(("figure", "ratio", "upper 95 % bound", "aim"), rows, "lrrl")
    )
    lines += pages.section(
        "Off",
        pages.paragraph(
            f"From a stop to the last copy in flight: at most {max(off_s, default=0.0):.2f} s in {len(off_s)} stops."
        ),
    )
    head = ("block", "shadow", "requests", "errors", "p99, ms", "TTFT p99, ms", "CPU, %", "copies sent")
    lines += pages.section("Blocks", pages.table(head, each, "rlr"))
    return lines


def main(
    blocks: Annotated[int, typer.Option(help="Blocks, half of them with a shadow.", min=2, max=200)] = 20,
    seconds: Annotated[float, typer.Option(help="Length of a block.", min=1.0)] = 60.0,
    rate: Annotated[float, typer.Option(help="Users' requests per second.", min=0.1)] = 8.0,
    write: options.Write = None,
) -> None:
    """Run the blocks, and print or write the page."""
    blocks += blocks % 2
    about, began_s = machine.describe(), time.monotonic()
    with Fleet() as fleet:
        mesh = RolloutMesh(fleet)
        hole = fleet.module(
            *("black-hole", "bench.black_hole", LOAD_CORE),
            redis=config.load(mesh.config_path).redis.url,
            pool=NEXT,
            version=NEXT_VERSION,
        )
        hole.wait_ready()
        bench = Bench(mesh, rate, seconds)

        async def run() -> list[Block]:
            await load.send(mesh.frontends, rate, WARM_S, -1)
            found = []
            for number, is_on in enumerate(order(blocks)):
                found.append(await bench.block(number, is_on=is_on))
                Console(stderr=True).print(
                    f"block {number + 1} of {blocks}, {'on' if is_on else 'off'}: p99 {1000 * found[-1].p99_s:.1f} ms"
                )
            return found

        try:
            measured = asyncio.run(run())
        finally:
            bench.close()
        lines = page(
            measured,
            bench.off_s,
            options.command_line("bench.shadow"),
            time.monotonic() - began_s,
            about,
        )
    if write is None:
        Console().print(Markdown("\n".join(lines)))
    else:
        old = write.read_text(encoding="utf-8") if write.exists() else ""
        write.write_text(pages.with_notes(lines, old), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
