"""The bench of rollouts: figures of a run, its records, its page, its mesh's processes, its tap."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from bench import generation
from bench.processes import Fleet
from bench.rollouts import conversing, following, mesh, page, turns
from bench.rollouts.__main__ import app
from bench.rollouts.cases import AA, BY_NAME, CASES, DEADLY_IDS, DEADLY_SHARE, planned
from bench.rollouts.following import Ending
from bench.rollouts.oracle import Oracle
from bench.rollouts.recording import RecordedBatch
from bench.rollouts.recording_control import tap
from bench.rollouts.records import Record, Records
from bench.rollouts.running import Made, Observed, record_of
from bench.rollouts.turns import Turn
from bench.run_records import RecordError
from controlplane.rollouts.document import WEIGHTED
from engines.reference import faults
from engines.reference.arithmetic import ChunkInput
from engines.reference.hashed import HashedArithmetic
from kvmesh import config
from kvmesh.cli import processes
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.snapshot.content import Content, PoolTrack, Track

State: TypeAlias = "snapshot_pb2.RolloutState.ValueType"
GOOD = Turn(1, 0, "v1", 100.0, 101.0, 0.1, 0.2, 100.0, "", False, 300, 256)
MADE = Made(1, 10.0, 400.0, commit="abc", cpu="cpu, 2 cores")


def turn(arrived_s: float, **fields: Any) -> Turn:
    """Return a good turn of one second that arrived at a time."""
    return GOOD._replace(**{"arrived_s": arrived_s, "ended_s": arrived_s + 1.0, **fields})


def hanging(arrived_s: float) -> Turn:
    """Return a turn without any token, cut off by its deadline."""
    return turn(
        arrived_s,
        ended_s=arrived_s + 30,
        ttft_s=None,
        silent_s=30.0,
        silent_from_s=arrived_s,
        error="DEADLINE_EXCEEDED",
    )


def test_damage_counts_bad_answers_against_weight_and_arrivals() -> None:
    """100 requests arrive while the canary has 10 %: twelve bad answers are allowed, a thirteenth is not."""
    good = [turn(10.0 + at / 10) for at in range(100)]
    before = [turn(5.0, error="QUEUE_FULL"), turn(25.0)]
    bad = [turn(9.5, ended_s=10.5, is_wrong=True), *(turn(12.0, error="ENGINE_ERROR") for _ in range(10))]
    told = [*good[: 100 - 11], *before, *bad, hanging(11.0)]
    seen = turns.damage(told, 10.0, 19.99, 10)
    assert (seen.arrived, seen.bad, seen.errors, seen.wrong, seen.silent) == (100, 12, 11, 1, 1)
    assert seen.bound == pytest.approx(12.0) and seen.is_within
    late = turn(30.0, error="STALE_SNAPSHOT")
    assert not turns.damage([*told, late], 10.0, 19.99, 10).is_within


def test_a_hang_counts_from_the_tenth_silence() -> None:
    """Streams that stall after their first tokens count as well; nine are no hang."""
    stalled = [turn(20.0 + at, silent_s=28.0, silent_from_s=21.0 + at, ended_s=50.0 + at) for at in range(9)]
    assert turns.hang_began_s(stalled, 20.0) is None
    assert turns.hang_began_s([*stalled, hanging(40.0), turn(1.0)], 20.0) == 40.0


def test_p95_counts_a_missing_token_with_its_silence() -> None:
    """Six of 100 without a token are the tail; the hit ratio leaves errors out."""
    told = [*(turn(1.0 + at) for at in range(94)), *(hanging(1.0) for _ in range(6))]
    assert turns.ttft_p95_s(told) == 30.0
    assert turns.hit_ratio(told) == pytest.approx(256 / 300)
    assert turns.ttft_p95_s(turns.within(told, [(2.0, 50.0)])) == 0.1
    assert turns.ttft_p95_s([]) is None and turns.hit_ratio([]) is None


def test_the_oracle_agrees_with_the_engine_and_finds_a_wrong_token() -> None:
    """Ten tokens in pages of 32, as the engine computes them; one wrong token anywhere is seen."""
    model, draw = HashedArithmetic(salt="s"), Random(3)
    said = [draw.randrange(400, 3900) for _ in range(90)]
    history, store, pages = list(said), model.new_store(4, 32), np.arange(4, dtype=np.int32)
    for _ in range(10):
        whole = ChunkInput(np.array(history, dtype=np.int32), 0, pages, wants_logits=True)
        history.append(int(np.argmax(model.forward([whole], store)[0])))  # type: ignore[arg-type]  # it has logits
    output, oracle = history[90:], Oracle("s")
    assert oracle.is_right(said, output) and oracle.is_right(said, [])
    for at in range(10):
        wrong = [*output[:at], output[at] + 1, *output[at + 1 :]]
        assert not oracle.is_right(said, wrong)
    assert not Oracle("t").is_right(said, output)


def observed(ended: Ending, **fields: Any) -> Observed:
    """Return a run with a fault from 10 s on and weight 0 at 50 s."""
    seen = {"begun_s": 10.0, "acked_s": 50.0, "weight_percent": 10, "busy_percent": 60.0, **fields}
    return Observed(rollout=(0.0, 60.0), quiet=[], ended=ended, **seen)


BACK = Ending("ROLLED_BACK", 1, 10, "hang", "the judge: hang")


@pytest.mark.parametrize(
    ("acked_s", "bad", "is_as_wanted"), [(50.0, 10, True), (51.5, 10, False), (None, 10, False)]
)
def test_a_hang_must_end_within_30_s(acked_s: float | None, bad: int, is_as_wanted: bool) -> None:
    """The tenth hanging request opens at 21 s."""
    told = [*(turn(10.0 + at / 10) for at in range(400)), *(hanging(12.0 + at) for at in range(bad))]
    made = record_of(BY_NAME["hang"], observed(BACK, acked_s=acked_s), told, MADE)
    assert made.is_as_wanted is is_as_wanted
    assert made.hang_s == (None if acked_s is None else acked_s - 21.0)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Record) == made


def test_a_fault_that_never_began_is_doubtful() -> None:
    """A rollout that was taken back before proves nothing about the fault."""
    made = record_of(BY_NAME["late"], observed(BACK, begun_s=None, acked_s=None), [turn(1.0)], MADE)
    assert made.problems and made.back_s is None


def rollout(*changes: tuple[State, int, str, tuple[str, ...]]) -> pb.Rollout:
    """Return a rollout with changes of state, step, reason and failed gates."""
    made = pb.Rollout(state=changes[-1][0], step=changes[-1][1])
    made.settings.steps_percent.extend((10, 50, 100))
    for state, step, reason, failed in changes:
        gates = [pb.Gate(name=name, result="fails") for name in failed]
        gates.append(pb.Gate(name="nan", result="passes"))
        made.changes.append(
            pb.RolloutChange(state=state, step=step, reason=reason, verdict=pb.Verdict(gates=gates))
        )
    return made


def test_the_end_of_a_rollout_names_its_gates() -> None:
    """The change that took it back decides, not a later one."""
    state = snapshot_pb2
    baking = (state.ROLLOUT_STATE_BAKING, 2, "the step at 10 % passed", ())
    back = (state.ROLLOUT_STATE_ROLLING_BACK, 2, "the judge: errors", ("errors", "gap"))
    over = (state.ROLLOUT_STATE_ROLLED_BACK, 2, "weight 0 is in force", ())
    golden = (state.ROLLOUT_STATE_ROLLING_BACK, 1, "golden prompts: next-decode-0: prompt 3", ())
    assert following.ending(rollout(baking, back, over)) == Ending(
        "ROLLED_BACK", 2, 50, "errors, gap", "the judge: errors"
    )
    assert following.ending(rollout(golden, over)).gate == "golden"
    assert following.ending(rollout(baking)).state == "BAKING"
    assert following.is_final(rollout(over)) and not following.is_final(rollout(back))


def test_runs_continue_where_they_were_stopped(tmp_path: Path) -> None:
    """A line that was cut off is made again; a line that is no record is an error with its number."""
    records = Records(tmp_path / "rollouts" / "runs.jsonl")
    plan = planned(["good", "aa"], 2)
    assert [(case.name, run) for case, run in plan] == [("good", 1), ("aa", 1), ("good", 2), ("aa", 2)]
    assert Counter(case.name for case, _ in planned(["hang", "aa"], 0)) == {"hang": 5, "aa": 10}
    records.append(record_of(BY_NAME["good"], observed(BACK), [], MADE))
    with records.path.open("ab") as file:
        file.write(b'{"case": "aa", "ru')
    assert [(case.name, run) for case, run in records.missing(plan)] == [("aa", 1), ("good", 2), ("aa", 2)]
    records.append(record_of(AA, observed(BACK), [], MADE))
    assert [each.case for each in records.read()] == ["good", "aa"]
    records.path.write_text("{}\n")
    with pytest.raises(RecordError, match="line 1"):
        records.read()
    records.put_aside()
    assert records.read() == []


def test_the_page_has_a_row_per_case_and_the_comparison() -> None:
    """Bad answers stand beside their bounds."""
    told = [turn(10.0 + at / 10) for at in range(400)]
    good = Ending("COMPLETED", 3, 100, "", "kept")
    made = [
        record_of(BY_NAME["errors"], observed(BACK), [*told, turn(20.0, error="X")], MADE),
        record_of(BY_NAME["hang"], observed(BACK), told, MADE),
        msgspec.structs.replace(
            record_of(BY_NAME["good"], observed(good, begun_s=None), told, MADE),
            ttft_p95_s=0.103,
            quiet_p95_s=0.1,
        ),
    ]
    text = "\n".join(page.lines(made, "command", {"date": "2026-11-23"}))
    assert "| 5 % errors | 1 of 1 | rolled back | 10 | hang | 40.0 | 401 | 1 (48) |" in text
    assert "| good version (same salt) | 1 of 1 | completed | 100 | kept | - | - | 0 |" in text
    assert "| hang | 0 of 1 |" in text and "Ratio: 1.030" in text
    assert "Processors: cpu, 2 cores." in text
    assert "NOT as wanted" in page.summary(made[1])


def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    """Records that are complete need no mesh; the exit status says that a run is not as wanted."""
    results, target = tmp_path / "runs.jsonl", tmp_path / "rollouts.md"
    Records(results).append(record_of(BY_NAME["errors"], observed(BACK), [], MADE))
    target.write_text(f"# Rollouts\n\nBefore.\n\n{page.BEGIN}\nold\n{page.END}\n", encoding="utf-8")
    words = ["run", "--only", "errors", "--runs", "1", "--resume", "--results", str(results)]
    done = CliRunner().invoke(app, [*words, "--json", "--write", str(target)])
    assert done.exit_code == 0, done.output
    text = target.read_text(encoding="utf-8")
    assert "Before." in text and "\nold\n" not in text and "| 5 % errors | 1 of 1 |" in text
    assert '"case": "errors"' in (tmp_path / "rollouts-runs.json").read_text()
    assert CliRunner().invoke(app, ["run", "--only", "nothing"]).exit_code == 2


@pytest.mark.parametrize("is_same_version", [False, True])
def test_the_mesh_has_three_pools_and_reads_faults_of_the_new_version(
    tmp_path: Path, is_same_version: bool
) -> None:
    """No process starts. Only engines of `next` know the file of faults."""
    with Fleet() as fleet:
        made = mesh.tables("redis://127.0.0.1:1/0", tmp_path / "faults", is_same_version=is_same_version)
        path = fleet.write_config(made)
        listed = processes.processes_of(config.load(path), path, tmp_path)
    roles = Counter(each.role for each in listed)
    assert roles == {"engine": 6, "prefill": 3, "decode": 3, "router": 3, "frontend": 2, "control": 1}
    faulty = {each.name for each in listed if f"@{tmp_path / 'faults'}" in each.command}
    assert faulty == (set() if is_same_version else {"next-prefill-0-engine", "next-decode-0-engine"})
    assert {case.kills for case in CASES} <= {"", *(each.name for each in listed)}
    for case in CASES:
        found = faults.parse(case.faults)
        assert found.kills(np.array([*DEADLY_IDS, 1], np.int32)) == case.has_deadly_prompts


class AnsweringStub:
    """Answers each request with nothing, and stops the client after `ENOUGH` requests."""

    ENOUGH = 400

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.client: conversing.Client | None = None

    def Generate(self, request: Any, timeout: float) -> AnsweringStub:
        """Keep the prompt."""
        self.prompts.append(list(request.tokens.ids))
        if len(self.prompts) >= self.ENOUGH and self.client is not None:
            self.client.stop()
        return self

    def __aiter__(self) -> AnsweringStub:
        return self

    async def __anext__(self) -> Any:
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Do nothing: each answer has ended."""


@pytest.mark.parametrize("share", [0.0, DEADLY_SHARE, 1.0])
async def test_a_share_of_the_sessions_begins_with_the_deadly_prompt(share: float) -> None:
    """The others have the system prompt alone, so no engine dies in a case without deadly prompts."""
    stub, kept = AnsweringStub(), io.StringIO()
    stub.client = conversing.Client([cast("generation.Stub", stub)], "salt", kept, seed=3)
    await stub.client.run(100_000.0, share)
    deadly = sum(faults.Faults(die=DEADLY_IDS).kills(np.array(each, np.int32)) for each in stub.prompts)
    count = len(stub.prompts)
    assert abs(deadly - share * count) <= 4 * (count * share * (1 - share)) ** 0.5
    assert (deadly > 0) == (share > 0)


class ListedProcess:
    """A process that runs or has ended."""

    def __init__(self, *, is_running: bool) -> None:
        self._is_running = is_running

    def is_running(self) -> bool:
        """Return whether it runs."""
        return self._is_running


def test_only_dead_engines_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ended stays fallen: it is a problem of the run."""
    started: list[str] = []
    listed = {
        "next-prefill-0-engine": "engine",
        "next-decode-0-engine": "engine",
        "next-prefill-0": "prefill",
    }
    made = mesh.RolloutMesh.__new__(mesh.RolloutMesh)
    made._listed = {name: cast("Any", SimpleNamespace(name=name, role=role)) for name, role in listed.items()}
    made.running = {name: cast("Any", ListedProcess(is_running="decode" in name)) for name in listed}

    def launch(each: Any) -> Any:
        started.append(each.name)
        return ListedProcess(is_running=True)

    monkeypatch.setattr(made, "_launch", launch)
    made.start_fallen_engines()
    made.start_fallen_engines()
    assert started == ["next-prefill-0-engine"]
    assert made.fallen() == ["next-prefill-0"]
    made.running["next-prefill-0-engine"] = cast("Any", ListedProcess(is_running=False))
    assert made.fallen(but_engines=True) == ["next-prefill-0"]
    assert len(made.fallen()) == 2


@pytest.mark.parametrize("is_weighted", [True, False])
def test_the_tap_records_each_batch_of_a_weighted_rollout_once(is_weighted: bool) -> None:
    """The core takes every batch, also one that came before; the file has it once."""
    state = next(iter(WEIGHTED)) if is_weighted else None
    pools = (
        PoolTrack("next", "v1", Track.CANARY, 25),
        PoolTrack("stable", "v1", Track.STABLE, 75),
    )
    taken: list[int] = []
    core: Any = SimpleNamespace(
        on_observations=lambda receiver, batch, now_s: taken.append(batch.sequence),
        library=SimpleNamespace(running=SimpleNamespace(id="r-1", state=state)),
        content=Content(pools),
    )
    file = io.BytesIO()
    tap(core, file)
    row = snapshot_pb2.RequestEnd(pool="next", rollout="r-1", session=7, outcome="ok", ttft_s=0.1)
    receiver = SimpleNamespace(process_id="frontend-0", boot_id="b")
    for sequence in (1, 2, 1):
        core.on_observations(receiver, snapshot_pb2.ObservationBatch(sequence=sequence, ends=[row]), 5.0)
    assert taken == [1, 2, 1]
    lines = [msgspec.json.decode(line, type=RecordedBatch) for line in file.getvalue().splitlines()]
    assert len(lines) == (2 if is_weighted else 0)
    assert all(line.at_s == 5.0 and line.ends[0].ttft_s == 0.1 for line in lines)
