"""One run: a fresh mesh under a saturating closed loop, one engine killed and started again, and the record of it."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from bench import machine
from bench.processes import ANY_CORE, Fleet, Process
from bench.results import BenchError
from bench.warmups import conversing, first_tokens, output_pace, proofs, recovery
from bench.warmups.arms import REPLICAS, Pace, Setting, replica_counts
from bench.warmups.first_tokens import Call
from bench.warmups.lease_states import LeaseState, LeaseStates
from bench.warmups.mesh import WarmupMesh
from bench.warmups.records import BEFORE_S, Record
from kvmesh.config_sections import Mesh

POLL_S: Final = 1.0
LEASE_EVERY_S: Final = 0.1
QUEUE_S: Final = 4.0
"""The queue of one replica alone is measured in this time before the engine is started."""
STALL_S_MAX: Final = 2.0
CALLS_FILE: Final = "calls.jsonl"
END_S_MAX: Final = 90.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Times:
    """Moments of a run, of the machine's monotonic clock."""

    steady_from_s: float
    killed_s: float
    started_s: float
    ready_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of a run, apart from its calls."""

    times: Times
    bins: Mapping[int, int]
    """Goodput in tokens, by bin."""
    busy_percent: float
    states: Sequence[LeaseState] = ()
    other_states: Sequence[Sequence[LeaseState]] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """How a run was made."""

    took_s: float
    problems: tuple[str, ...] = ()
    commit: str = field(default_factory=lambda: machine.describe()["commit"])
    cpu: str = field(default_factory=lambda: machine.describe()["cpu"])


def perform(setting: Setting, arm: str, repeat: int, pace: Pace, say: Say, evidence: Path) -> Record:
    """Make one run. `evidence`: folder that gets the calls and the logs. Raises BenchError and ConfigError."""
    began_s = time.monotonic()
    with Fleet() as fleet:
        say("starts the mesh")
        mesh = WarmupMesh(fleet, setting, arm)
        if mesh.control is not None:
            say("waits for the proofs of its replicas")
            proofs.wait(mesh.control, sum(replica_counts(setting).values()))
        client = _start_client(fleet, mesh, seed=repeat)
        client.ask("begin", load=asdict(setting.load))
        say("warms up")
        time.sleep(pace.warm_s)
        seen = _restart(setting, mesh, client, pace, say)
        say("ends the load")
        ended = client.ask("end", timeout_s=END_S_MAX)
        problems = [f"{name} ended" for name in mesh.fallen()]
        if ended["stalled_s"] > STALL_S_MAX:
            problems.append(f"the client stalled for {ended['stalled_s']:.1f} s")
        calls = conversing.read(fleet.folder / CALLS_FILE)
        _keep(fleet.folder, evidence)
    return record_of(setting, arm, repeat, seen, calls, Made(time.monotonic() - began_s, tuple(problems)))


def _start_client(fleet: Fleet, mesh: WarmupMesh, seed: int) -> Process:
    file, (target,) = fleet.folder / CALLS_FILE, mesh.frontends
    return fleet.start_ready("client", conversing.__name__, ANY_CORE, target=target, file=file, seed=seed)


def _restart(setting: Setting, mesh: WarmupMesh, client: Process, pace: Pace, say: Say) -> Observed:
    """Measure the steady rate, restart the engine, and let the load run until the loss has ended or the cap is over."""
    say("measures steady goodput")
    steady_from_s = time.monotonic()
    psutil.cpu_percent()
    time.sleep(pace.steady_s)
    busy, killed_s = psutil.cpu_percent(), time.monotonic()
    say("kills " + ", ".join(mesh.engines))
    mesh.kill_engines()
    time.sleep(setting.down_s)
    say("starts " + ", ".join(mesh.engines))
    started_s = time.monotonic()
    ready_s = mesh.start_engines()
    say("measures the loss")
    with ExitStack() as stack:
        leases = [
            stack.enter_context(LeaseStates(mesh.redis_url, Mesh().name, replica))
            for replica in reversed(setting.replicas)
        ]
        while True:
            _follow(leases, ready_s, POLL_S)
            now_s, bins = time.monotonic(), _goodput(setting, client)
            steady_per_s = recovery.rate_per_s(bins, steady_from_s, killed_s)
            found = recovery.shares(bins, ready_s, now_s, steady_per_s)
            if recovery.recovered_at(found) is not None or now_s - ready_s >= pace.after_s_max:
                times = Times(steady_from_s, killed_s, started_s, ready_s, now_s)
                states, *others = [each.seen for each in leases]
                return Observed(times, bins, busy, states, others)


def _follow(leases: Sequence[LeaseStates], ready_s: float, for_s: float) -> None:
    end_s = time.monotonic() + for_s
    while (now_s := time.monotonic()) < end_s:
        for each in leases:
            each.poll(now_s - ready_s)
        time.sleep(LEASE_EVERY_S)


def _goodput(setting: Setting, client: Process) -> dict[int, int]:
    told = client.ask("goodput")["output" if setting.counts_output else "prompt"]
    return {int(at): tokens for at, tokens in told.items()}


def _keep(folder: Path, evidence: Path) -> None:
    evidence.mkdir(parents=True, exist_ok=True)
    for path in (folder / CALLS_FILE, folder / "kvmesh.toml", *folder.glob("*.log")):
        if path.exists() and path.stat().st_size:
            shutil.copy(path, evidence)


def record_of(
    setting: Setting,
    arm: str,
    repeat: int,
    seen: Observed,
    calls: Sequence[Call],
    made: Made,
) -> Record:
    """Return the record of a run. Raises BenchError without steady goodput. Pure."""
    times, bins = seen.times, seen.bins
    steady_per_s = recovery.rate_per_s(bins, times.steady_from_s, times.killed_s)
    after = recovery.shares(bins, times.ready_s, times.ended_s, steady_per_s)
    end, width = recovery.recovered_at(after), round(1.0 / recovery.BIN_S)
    drawn = recovery.shares(bins, times.ready_s - BEFORE_S, times.ended_s, steady_per_s)
    steady = [
        call for call in calls if not call.error and _is_within(call, times.steady_from_s, times.killed_s)
    ]
    alone = [
        call
        for call in calls
        if not call.error and _is_within(call, times.started_s - QUEUE_S, times.started_s)
    ]
    first = first_calls(setting, times, calls)
    problems, compared = list(made.problems), None
    try:
        compared = first_tokens.compare(steady, first, setting.token_s)
    except BenchError as error:
        problems.append(str(error))
    whole = [call for call in steady if call.ended_s <= times.killed_s]
    paced = output_pace.compare(whole, first) if setting.counts_output else None
    prompt = sum(call.prompt_tokens for call in steady)
    return Record(
        setting=setting.name,
        arm=arm,
        repeat=repeat,
        commit=made.commit,
        cpu=made.cpu,
        took_s=made.took_s,
        boot_s=times.ready_s - times.started_s,
        steady_per_s=steady_per_s,
        cached_share=sum(call.cached_tokens for call in steady) / prompt if prompt else 0.0,
        lost_replica_s=recovery.lost_replica_s(after[:end], REPLICAS),
        end_s=None if end is None else end * recovery.BIN_S,
        first_use_s=first[0].first_s - times.ready_s if first and first[0].first_s is not None else None,
        first_requests=compared.requests if compared else 0,
        first_borrowed=compared.borrowed if compared else 0,
        ttft_p95_s=compared.p95_s if compared else None,
        steady_ttft_p95_s=compared.steady_p95_s if compared else None,
        tpot_p95_s=paced.p95_s if paced else None,
        steady_tpot_p95_s=paced.steady_p95_s if paced else None,
        queue_alone_s=statistics.median(call.queue_s for call in alone) if alone else None,
        queue_steady_s=statistics.median(call.queue_s for call in steady) if steady else None,
        requests=len(calls),
        errors=sum(bool(call.error) and call.ended_s >= times.ready_s for call in calls),
        busy_percent=seen.busy_percent,
        states=tuple(seen.states),
        other_states=tuple(map(tuple, seen.other_states)),
        series=tuple(
            round(statistics.fmean(drawn[at : at + width]), 3)
            for at in range(0, len(drawn) - width + 1, width)
        ),
        problems=tuple(problems),
    )


def first_calls(setting: Setting, times: Times, calls: Sequence[Call]) -> list[Call]:
    """Return the calls with a first token from the fresh replica, in the order of these tokens."""
    fresh = [
        call
        for call in calls
        if (call.decode if setting.counts_output else call.prefill) in setting.replicas
        and call.first_s is not None
        and times.ready_s <= call.first_s <= times.ended_s
    ]
    return sorted(fresh, key=lambda call: call.first_s or 0.0)


def _is_within(call: Call, from_s: float, to_s: float) -> bool:
    return call.first_s is not None and from_s <= call.first_s < to_s
