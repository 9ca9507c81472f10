"""The run on a host: engines, timings, conformance, the mesh in front. Its record is what the page is made of."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import machine
from bench.engines import Engine
from bench.gpu.form import fit
from bench.gpu.recording import Prefill, Recording, Step
from bench.processes import Fleet
from bench.results import BenchError, Results
from kvmesh.config import ROOT
from tools.gpu import engine_pair, front, probes
from tools.gpu.host import Host, Plan
from tools.gpu.phases import Phases

LIMITS_S: Final = {
    "engines": 180.0,
    "prefills": 90.0,
    "transfers": 40.0,
    "steps": 60.0,
    "conformance": 200.0,
    "mesh": 120.0,
}
FITTED_FROM: Final = 512
"""Least uncached tokens of the prefills that the form is fitted to: below, a GPU mostly reads the weights."""
PACKED: Final = ROOT.parent / "commit"
"""File of an archive with the commit that was packed."""
COMMAND: Final = "import sys; from kvmesh.cli.main import main; sys.exit(main())"


@dataclass(slots=True)
class Proof:
    """One run. `folder`: of the results."""

    plan: Plan
    host: Host
    folder: Path
    only: tuple[str, ...] = tuple(LIMITS_S)
    """Phases to run; the engines are started in any case."""
    prefills: list[Prefill] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    results: Results = field(default_factory=Results)
    engines: dict[str, Engine] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Run all phases and return the record, which is also in run.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {
            "machine": {**machine.describe(), **_packed()},
            "host": asdict(self.host),
            "plan": asdict(self.plan),
        }
        phases = Phases(self.folder / "run.json", about)
        with Fleet() as fleet:
            try:
                self._run(phases, fleet)
            finally:
                self._keep_logs(fleet.folder)
        return phases.record

    def _run(self, phases: Phases, fleet: Fleet) -> None:
        work = {
            "prefills": self._prefills,
            "transfers": self._transfers,
            "steps": self._steps,
            "conformance": self._conformance,
            "mesh": lambda result: self._mesh(fleet, result),
        }
        if not phases.run("engines", LIMITS_S["engines"], lambda result: self._engines(fleet, result)):
            return
        for name, one in work.items():
            if name in self.only:
                phases.run(name, LIMITS_S[name], one)
                self._write_recording()

    def _engines(self, fleet: Fleet, result: dict[str, Any]) -> None:
        began_s = time.monotonic()
        self.engines = engine_pair.start(fleet, self.plan)
        engine_pair.wait_ready(self.engines, began_s + LIMITS_S["engines"])
        result["ready_s"] = round(time.monotonic() - began_s, 1)

    def _address(self, role: str) -> str:
        return self.engines[f"{role}-0"].address

    def _prefills(self, result: dict[str, Any]) -> None:
        try:
            asyncio.run(
                probes.prefills(self._address("prefill"), self.plan.prompts, self.plan.repeats, self.prefills)
            )
        finally:
            result["timed"] = [asdict(one) for one in self.prefills]
        fitted = [one for one in self.prefills if not one.cached and one.uncached >= FITTED_FROM]
        made = fit(fitted)
        result["fit"] = {
            "from": FITTED_FROM,
            **asdict(made),
            "errors": made.errors(fitted)._asdict(),
            "off": [{"uncached": one.uncached, "off": made.off(one)} for one in fitted],
        }

    def _transfers(self, result: dict[str, Any]) -> None:
        result["moved"] = []
        source, target = self._address("prefill"), self._address("decode")
        asyncio.run(
            probes.transfers(
                source, target, self.plan.transfers, self.plan.repeats, result["moved"], self.plan.block_bytes
            )
        )

    def _steps(self, result: dict[str, Any]) -> None:
        try:
            asyncio.run(
                probes.steps(self._address("decode"), self.plan.batches, self.plan.context, self.steps)
            )
        finally:
            result["timed"] = [asdict(one) for one in self.steps]

    def _conformance(self, result: dict[str, Any]) -> None:
        engines = ("--triton", self._address("decode"), "--pair", self._address("prefill"))
        options = (*engines, "--cancels", str(self.plan.cancels), "--json")
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "conformance", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMITS_S["conformance"],
        )
        result["status"] = done.returncode
        try:
            result["told"] = json.loads(done.stdout)
        except ValueError:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise BenchError(f"kvmesh conformance told no JSON: {said[-1] if said else 'nothing'}") from None
        if done.returncode:
            raise BenchError(f"kvmesh conformance ended with status {done.returncode}")

    def _mesh(self, fleet: Fleet, result: dict[str, Any]) -> None:
        try:
            front.measure(fleet, self.engines, self.plan, self.results)
        finally:
            result["figures"] = [figure.to_json() for figure in self.results.figures.values()]
            result["problems"] = self.results.problems
        if self.results.problems:
            raise BenchError("; ".join(self.results.problems))

    def _write_recording(self) -> None:
        """Write what `python -m bench.gpu fit` reads."""
        name = self.host.gpus[0] if self.plan.device == "cuda" else "CPU"
        about = {
            "gpu": name,
            "software": f"reference engine in Triton, torch {self.host.torch}, shape {self.plan.shape}",
        }
        recording = Recording(name, about, tuple(self.prefills), (), tuple(self.steps))
        (self.folder / "recording.json").write_text(recording.to_json() + "\n", encoding="utf-8")

    def _keep_logs(self, folder: Path) -> None:
        kept = self.folder / "logs"
        kept.mkdir(exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, kept / log.name)


def _packed() -> dict[str, str]:
    return {"commit": PACKED.read_text(encoding="utf-8").strip()} if PACKED.exists() else {}
