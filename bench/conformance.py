"""Conformance of all engines: `python -m bench.conformance [--only hashed] [--cancels N] [--json] [--write PAGE]`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import grpc
import typer
from rich.console import Console
from rich.markdown import Markdown
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench import machine, options, pages
from bench.conformance_engines import ENGINES, CheckedEngine, names
from bench.processes import ANY_CORE, Fleet, Process, free_port
from bench.results import BenchError
from kvmesh.cli import shared_memory
from kvmesh.cli.readiness import TRITON_MODEL
from kvmesh.conformance.verdict import FALLBACK

RUN_S_MAX: Final = 1800.0
"""Longest run of the checks on one engine."""

PASS, FAIL, NOT_OFFERED = "pass", "fail", "not offered"
_MARKS: Final = {PASS: "pass", FAIL: "**fail**", NOT_OFFERED: "-", "not judged": "?"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Judged:
    """The record of `kvmesh conformance --json` on one engine, or why there is none."""

    engine: CheckedEngine
    record: Mapping[str, Any] | None
    obstacle: str = ""

    def checks(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Return the checks by capability and name."""
        found = self.record["checks"] if self.record else ()
        return {(each["capability"], each["check"]): each for each in found}


@app.command()
def conformance(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(names())}, by commas.")] = "",
    cancels: Annotated[int, typer.Option(help="Calls to cancel at random moments.", min=1)] = 1000,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Run `kvmesh conformance` on each engine. Exit status 1: a check failed."""
    chosen = options.selected(only, names())
    about, begun_s = machine.describe(), time.monotonic()
    console = Console(stderr=True)
    found = []
    for engine in ENGINES:
        if engine.name in chosen:
            console.print(f"{engine.name} ...", markup=False)
            found.append(judge(engine, cancels))
    command = options.command_line("bench.conformance")
    record = json.dumps(
        {"command": command, "machine": about, "engines": {each.engine.name: each.record for each in found}},
        indent=1,
    )
    page = [*lines(found), *pages.origin(command, time.monotonic() - begun_s, about)]
    if as_json:
        sys.stdout.write(f"{record}\n")
    else:
        Console().print(Markdown("\n".join(page)))
    if write is not None:
        pages.write(write, pages.with_notes(page, pages.old(write)), f"{record}\n")
    if any(each["result"] == FAIL for judged in found for each in judged.checks().values()):
        raise typer.Exit(1)


def judge(engine: CheckedEngine, cancels: int) -> Judged:
    """Start an engine and its pair, and run all checks. Raises BenchError if that is not possible."""
    if obstacle := engine.obstacle():
        return Judged(engine, None, obstacle)
    with Fleet() as fleet:
        started = [_started(fleet, engine, f"engine-{at}") for at in range(1 + engine.has_pair)]
        for process, ports in started:
            process.wait_until(lambda ports=ports: _is_ready(ports["grpc"]), "is not ready")  # type: ignore[misc]
        command = [sys.executable, "-m", "kvmesh.cli.main", "conformance", "--json", "--hostile"]
        command += [
            "--cancels",
            str(cancels),
            "--triton",
            f"127.0.0.1:{started[0][1]['grpc']}",
            *engine.checks,
        ]
        if engine.has_pair:
            command += ["--pair", f"127.0.0.1:{started[1][1]['grpc']}"]
        if engine.has_metrics:
            command += ["--metrics", f"127.0.0.1:{started[0][1]['metrics']}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S_MAX)
    if done.returncode not in (0, 1):
        raise BenchError(f"{engine.name}: {done.stderr.strip()}")
    return Judged(engine, json.loads(done.stdout))


def _started(fleet: Fleet, engine: CheckedEngine, name: str) -> tuple[Process, dict[str, int]]:
    ports = {kind: free_port() for kind in engine.ports}
    prefix = f"kvmesh_bench_{ports['grpc']}_"
    words = [f"--{key.replace('_', '-')}={value}" for key, value in engine.options.items()]
    words += [f"--{kind}-port={port}" for kind, port in ports.items()]
    words += [f"--shm-prefix={prefix}", f"--work-dir={fleet.folder / f'{name}-server'}"]
    if engine.prepare is not None:
        words += engine.prepare(fleet.folder / name)
    command = [sys.executable, "-m", engine.module, *words]
    if engine.python_path is not None:
        command = ["env", f"PYTHONPATH={engine.python_path}", *command]
    fleet.at_end(lambda: shared_memory.clear(prefix))
    return fleet.start(name, command, ANY_CORE), ports


def _is_ready(port: int) -> bool:
    with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ModelReady(service_pb2.ModelReadyRequest(name=TRITON_MODEL), timeout=1).ready)
    return False


def lines(found: Sequence[Judged]) -> list[str]:
    """Return the page without its origin."""
    return [
        "# Conformance of engines",
        "",
        *pages.paragraph(
            "Capabilities that kvmesh can use, engine by engine ([what the checks test](../engines.md#conformance)). "
            "Each engine runs in a real Triton server, as a pair where it has handoffs, on a machine without a GPU. "
            "TensorRT-LLM itself was not run."
        ),
        "",
        *pages.section("Results", _results(found)),
        *pages.section("Checks", [*_matrix(found), "", *pages.paragraph(_LEGEND)]),
        *pages.section("Not offered, and other reasons", _reasons(found)),
    ]


_LEGEND: Final = (
    "A dash: not offered. A question mark: not judged. The next section has reasons and fallbacks."
)


def _results(found: Iterable[Judged]) -> list[str]:
    rows = []
    for judged in found:
        counts = Counter(each["result"] for each in judged.checks().values())
        figures = [str(counts[result]) for result in _MARKS]
        what = (
            f"{judged.engine.what} Not run here: {judged.obstacle}."
            if judged.obstacle
            else judged.engine.what
        )
        rows.append([judged.engine.name, what, *(figures if judged.record else ["-"] * len(_MARKS))])
    return pages.table(("engine", "", *_MARKS), rows, "llr")


def _matrix(found: Sequence[Judged]) -> list[str]:
    run = [judged for judged in found if judged.record]
    checks = dict.fromkeys(key for judged in run for key in judged.checks())
    rows = [
        [*key, *(_MARKS[each[key]["result"]] if key in each else "" for each in map(Judged.checks, run))]
        for key in checks
    ]
    return pages.table(("capability", "check", *(judged.engine.name for judged in run)), rows)


def _reasons(found: Iterable[Judged]) -> list[str]:
    rows = []
    for judged in found:
        for key, each in judged.checks().items():
            if each["result"] != PASS:
                why, _, fallback = each["why"].replace("|", "\\|").partition(FALLBACK)
                rows.append([judged.engine.name, *key, each["result"], why, fallback])
    return pages.table(("engine", "capability", "check", "result", "why", "fallback"), rows)


if __name__ == "__main__":
    app()
