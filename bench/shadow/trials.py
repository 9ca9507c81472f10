"""Trials of versions by shadow, on engines that flip tokens by chance: `python -m bench.shadow.trials [--write PAGE]`.

Every engine of the stable version flips 0.1 % of its tokens. The pool `next` flips as many, or more, or is slower. A shadow
copies all sessions to `next` and to a second pool of the stable version, until the target is beyond the band or
TOKENS_MAX tokens have been compared. The section of the page between the marks is replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import grpc
import typer
from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.markdown import Markdown

from bench import machine, options, pages
from bench.processes import Fleet
from bench.results import BenchError
from bench.rollouts.mesh import NEXT, YOUNG, RolloutMesh
from bench.shadow import load
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.control.v1 import shadow_pb2_grpc, warm_up_pb2, warm_up_pb2_grpc

BEGIN: Final = "<!-- trials: written by `python -m bench.shadow.trials`. -->"
END: Final = "<!-- trials: end. -->"

STABLE_FAULTS: Final = "flip=0.001"
TOKENS_MAX: Final = 100_000
START_S: Final = 60.0
PROOF_S: Final = 120.0
TRIAL_S_MAX: Final = 600.0
LOOK_S: Final = 5.0
STRETCH_S: Final = 20.0
"""Load is sent in stretches, so that it ends soon after a trial."""

OUTPUT_TOKENS: Final = 64
BEYOND: Final = "beyond"


@dataclass(frozen=True, slots=True)
class Trial:
    """A version in `next`."""

    name: str
    faults: str
    criterion: str = ""
    """The criterion that has to blame it. Empty: none may."""


TRIALS: Final = (
    Trial("as many flips", STABLE_FAULTS),
    Trial("0.3 % flips", "flip=0.003", "tokens"),
    Trial("20 % slower", f"{STABLE_FAULTS},slow=1.2", "gap"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a trial."""

    trial: Trial
    view: pb.ShadowView
    seconds: float

    @property
    def blamed(self) -> tuple[str, ...]:
        """Criteria beyond the band."""
        return tuple(each.name for each in self.view.criteria if each.result == BEYOND)

    @property
    def is_right(self) -> bool:
        """True if the wanted criterion blames the version, or none where none may."""
        wanted = self.trial.criterion
        return wanted in self.blamed if wanted else not self.blamed


class Trials:
    """One trial after the other on a running mesh."""

    def __init__(self, mesh: RolloutMesh, stub: Any, rate_per_s: float) -> None:
        self._mesh = mesh
        self._stub = stub
        self._rate_per_s = rate_per_s
        self._seed = 0

    async def settle(self, lives: Any) -> None:
        """Send load until all replicas are proved, PROOF_S at most: golden prompts would make a pool look slow."""
        end_s = time.monotonic() + PROOF_S
        sending = asyncio.create_task(self._send())
        try:
            while time.monotonic() < end_s:
                found = (await lives.ListLives(warm_up_pb2.ListLivesRequest())).lives
                if found and all(each.proved for each in found):
                    return
                await asyncio.sleep(1.0)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def run(self, trial: Trial) -> Outcome:
        """Start a shadow, and return once it is decided. Raises BenchError."""
        self._mesh.fault(trial.faults)
        began_s = time.monotonic()
        await self._start()
        sending = asyncio.create_task(self._send())
        try:
            while not self._is_decided(view := await self._view()):
                if sending.done():
                    await sending
                if time.monotonic() - began_s > TRIAL_S_MAX:
                    raise BenchError(f"{trial.name}: not decided within {TRIAL_S_MAX:g} s")
                await asyncio.sleep(LOOK_S)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await self._stub.StopShadow(pb.StopShadowRequest())
        return Outcome(trial, view, time.monotonic() - began_s)

    async def _start(self) -> None:
        settings = pb.Shadow(
            to_pool=NEXT, baseline_pool=YOUNG, sample_permille=1000, mode=pb.Shadow.MODE_FULL, token_max=10**9
        )
        request, until_s = (
            pb.StartShadowRequest(settings=settings, ttl=Duration(seconds=3600)),
            time.monotonic() + START_S,
        )
        while True:
            try:
                await self._stub.StartShadow(request)
                return
            except grpc.aio.AioRpcError as error:
                if time.monotonic() > until_s:
                    raise BenchError(f"the shadow does not start: {error.details()}") from error
                await asyncio.sleep(0.5)

    async def _send(self) -> None:
        while True:
            self._seed += 1
            await load.send(
                self._mesh.frontends, self._rate_per_s, STRETCH_S, self._seed, self._seed, OUTPUT_TOKENS
            )

    async def _view(self) -> pb.ShadowView:
        view: pb.ShadowView = (await self._stub.GetShadow(pb.GetShadowRequest())).shadow
        return view

    def _is_decided(self, view: pb.ShadowView) -> bool:
        return view.counts.target.tokens >= TOKENS_MAX or any(each.result == BEYOND for each in view.criteria)


def lines(outcomes: Sequence[Outcome], command: str, seconds: float, about: dict[str, str]) -> list[str]:
    """Return the section of the page."""
    head = (
        *("version in `next`", "wanted", "beyond the band", "as wanted", "tokens compared", "differences"),
        *("of the second stable pool", "per 100,000: target, A/A", "TTFT, target over A/A", "gap", "s"),
    )
    rows = [
        (
            each.trial.name,
            each.trial.criterion or "none",
            ", ".join(each.blamed) or "none",
            "yes" if each.is_right else "**no**",
            f"{each.view.counts.target.tokens:,}",
            str(each.view.counts.target.differences),
            f"{each.view.counts.baseline.differences} in {each.view.counts.baseline.tokens:,}",
            ", ".join(_rate(arm) for arm in (each.view.counts.target, each.view.counts.baseline)),
            _ratio(each.view, "ttft"),
            _ratio(each.view, "gap"),
            f"{each.seconds:.0f}",
        )
        for each in outcomes
    ]
    told = pages.paragraph(
        "All engines of the stable version flip 0.1 % of their tokens by chance. A shadow copies all sessions to "
        "`next` and to a second pool of the stable version. It ends once a criterion is beyond the band, or at "
        f"{TOKENS_MAX:,} compared tokens. The report is read every {LOOK_S:g} s."
    )
    return [
        *("## Versions on engines that flip tokens", ""),
        *(*told, "", *pages.origin(command, seconds, about), ""),
        *pages.table(head, rows, "llllrrrrrrr"),
    ]


def _rate(arm: pb.ShadowArm) -> str:
    return f"{100_000 * arm.differences / arm.tokens:.0f}" if arm.tokens else "-"


def _ratio(view: pb.ShadowView, name: str) -> str:
    found = next((each for each in view.criteria if each.name == name and each.HasField("figure")), None)
    return "-" if found is None else f"{found.figure:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(
    rate: Annotated[float, typer.Option(help="Users' requests per second.", min=0.1)] = 10.0,
    write: options.Write = None,
) -> None:
    """Run the trials, and print the section or put it into the page. Status 1: a trial did not end as wanted."""
    about, began_s = machine.describe(), time.monotonic()
    with Fleet() as fleet:
        mesh = RolloutMesh(fleet, stable_faults=STABLE_FAULTS)

        async def run() -> list[Outcome]:
            async with grpc.aio.insecure_channel(mesh.control) as channel:
                trials = Trials(mesh, shadow_pb2_grpc.ShadowServiceStub(channel), rate)
                await trials.settle(warm_up_pb2_grpc.WarmUpServiceStub(channel))
                found = []
                for trial in TRIALS:
                    found.append(await trials.run(trial))
                    told = f"{trial.name}: {', '.join(found[-1].blamed) or 'none'} beyond the band"
                    Console(stderr=True).print(f"{told}, {found[-1].view.counts.target.tokens:,} tokens")
                return found

        outcomes = asyncio.run(run())
    made = lines(outcomes, options.command_line("bench.shadow.trials"), time.monotonic() - began_s, about)
    if write is None:
        Console().print(Markdown("\n".join(made)))
    else:
        write.write_text(pages.put(pages.old(write), made, BEGIN, END), encoding="utf-8")
    raise typer.Exit(0 if all(each.is_right for each in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)
