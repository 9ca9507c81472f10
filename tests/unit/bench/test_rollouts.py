"""The bench of the judge: power of simulated canaries, and rollouts redrawn from a recording."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.rollouts import parallel
from bench.rollouts.__main__ import app
from bench.rollouts.model import Fault, Model
from bench.rollouts.power import BEGIN, CASES, END, LOOKS, PowerCase, measure
from bench.rollouts.recording import (
    BLOCK_S,
    Block,
    RecordedBatch,
    RecordingError,
    Second,
    encode,
    read,
    read_all,
)
from bench.rollouts.redraw import Redrawer, RedrawnRollout, RedrawPlan, _Draw, figures, redraw
from controlplane.rollouts.judge.observation import STABLE, OpenRequest, RequestEnd

WAITING = '{"at_s": 1.0, "open_requests": [{%s}]}'
PLAN = RedrawPlan((20.0, 50.0), step_blocks=4)


def record(path: Path, seconds: int = 300, model: Model | None = None, sessions_per_s: float = 3.0) -> Path:
    """Write a recording of one version: conversations of four requests that begin at random."""
    random, model = Random(7), model or Model(requests_per_session=4, correlation=0.5)
    rows: dict[int, list[RequestEnd]] = {}
    started_s, number = 0.0, 0
    while started_s < seconds:
        started_s, number = started_s + random.expovariate(sessions_per_s), number + 1
        for end in model.session(random, STABLE, f"s{number}", started_s, pause_s=10.0):
            rows.setdefault(int(end.ended_s) + 1, []).append(end)
    batches = (RecordedBatch(float(second), tuple(rows.get(second, ()))) for second in range(seconds))
    path.write_bytes(b"".join(map(encode, batches)))
    return path


def test_the_power_of_the_landed_code_is_that_of_the_design() -> None:
    """16 canaries per row: near the design's figures, within four deviations of so few runs."""
    for row in measure(CASES[:3], 16, seed=3, jobs=1):
        for found, design in zip(row.found, row.case.design, strict=True):
            assert design is not None
            assert found == pytest.approx(design, abs=0.03 + 4 * (design * (1 - design) / 16) ** 0.5), row


def test_pooling_over_steps_hides_a_late_fault() -> None:
    """TTFT x1.3 after 400 good sessions: found by the step alone, hardly ever by all steps together."""
    alone, pooled = measure(CASES[4:6], 6, seed=3, jobs=1)
    assert alone.found[1] > 0.6
    assert pooled.found[1] < 0.4


def test_power_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts of the page stay; the record stands beside it."""
    monkeypatch.setattr("bench.rollouts.power.CASES", (PowerCase("all fail", Fault(error_share=1.0)),))
    page = tmp_path / "rollouts.md"
    page.write_text(f"# Rollouts\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["power", "--runs", "10", "--jobs", "1", "--json", "--write", str(page)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert rows == [{"fault": "all fail", "runs": 10, "found": {str(look): 1.0 for look in LOOKS}}]
    text = page.read_text(encoding="utf-8")
    assert "Before." in text
    assert "After." in text
    assert "old" not in text
    assert "| all fail | 10 | 100.0 | 100.0 | 100.0 |" in text
    assert json.loads((tmp_path / "rollouts-power.json").read_text(encoding="utf-8"))["rows"] == rows


def test_redrawn_rollouts_of_one_version_pass(tmp_path: Path) -> None:
    """Conversations of one version: no false rollback in 20 rollouts, each with looks."""
    found = figures(list(redraw([record(tmp_path / "r.jsonl")], PLAN, 20, seed=1, jobs=1)))
    assert (found.rollouts, found.false_rollbacks) == (20, 0)
    assert found.upper_bound == pytest.approx(1 - 0.05 ** (1 / 20))
    assert found.looks_mean >= 2.0
    assert found.inconclusive_share < 0.5


def test_a_redraw_counts_rollbacks_by_gate(tmp_path: Path) -> None:
    """A session whose requests hang fails a rollout if it is on the canary: some rollouts, in some step."""
    path = record(tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        hanging = {"track": STABLE, "session": "s177", "age_s": 20.0, "has_first_token": False}
        line["open_requests"] = [hanging] * 10
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = figures(list(redraw([path], PLAN, 15, seed=1, jobs=1)))
    assert 0 < found.false_rollbacks < 15
    assert found.by_gate == {"hang": found.false_rollbacks}
    assert sum(found.by_step.values()) == found.false_rollbacks
    assert found.upper_bound > found.false_rollbacks / 15


def test_a_redraw_depends_on_its_seed_alone(tmp_path: Path) -> None:
    """Two processes give the results of one, in the same order."""
    path = record(tmp_path / "r.jsonl", seconds=120)
    one = list(redraw([path], PLAN, 5, seed=1, jobs=1))
    assert list(redraw([path], PLAN, 5, seed=1, jobs=2)) == one
    assert [Redrawer(read(path), PLAN).rollout(f"1/{each}") for each in range(5)] == one


def test_recordings_have_sessions_of_their_own(tmp_path: Path) -> None:
    """Two files with the same names of sessions: none of them is one session of both."""
    paths = [record(tmp_path / name, seconds=61) for name in ("one.jsonl", "two.jsonl")]
    blocks = read_all(paths)
    assert [block.recording for block in blocks] == [0, 0, 1, 1]
    for batch in _Draw(blocks, "seed").batches(50.0, has_baseline=False):
        assert all(end.session.startswith(("0.0/", "1.0/")) for end in batch.ends)
    names = [
        {
            end.session
            for batch in _Draw(blocks[at : at + 1], "seed").batches(50.0, has_baseline=False)
            for end in batch.ends
        }
        for at in (0, 2)
    ]
    assert all(names) and not names[0] & names[1]


def test_figures_count_gates_and_steps() -> None:
    """Two of four rollouts failed."""
    found = figures(
        [
            RedrawnRollout((), 3, 10, 1),
            RedrawnRollout(("ttft",), 0, 1, 0),
            RedrawnRollout(("ttft", "gap"), 2, 5, 0),
            RedrawnRollout((), 3, 8, 0),
        ]
    )
    assert (found.false_rollbacks, found.by_gate, found.by_step) == (2, {"ttft": 2, "gap": 1}, {0: 1, 2: 1})
    assert found.upper_bound == pytest.approx(0.9024, abs=1e-4)
    assert found.looks_mean == 6.0
    assert found.inconclusive_share == pytest.approx(1 / 12)


def test_open_requests_without_a_session_are_spread_over_the_tracks() -> None:
    """Each of them has a track of its own, and stays without a session."""
    waiting = (OpenRequest(STABLE, "", 0.0, True),) * 300
    drawn = _Draw([Block(0.0, (Second((), waiting),))], "1/0")
    (batch,) = drawn.batches(25.0, has_baseline=True)
    tracks = Counter(each.track for each in batch.open_requests)
    assert {each.session for each in batch.open_requests} == {""}
    assert 40 < tracks["canary"] < 110 and 40 < tracks["baseline"] < 110 and tracks["stable"] > 100


def test_a_recording_keeps_rows_and_leaves_the_rest_of_a_block(tmp_path: Path) -> None:
    """95 s make three blocks of 30 s; open requests and gaps between batches are kept."""
    path = tmp_path / "r.jsonl"
    waiting = OpenRequest(STABLE, "w", 1.0, False)
    batches = [
        RecordedBatch(100.0 + second, open_requests=(waiting,)) for second in range(95) if second != 40
    ]
    path.write_bytes(b"".join(map(encode, batches)))
    blocks = read(path)
    assert [block.began_s for block in blocks] == [100.0, 130.0, 160.0]
    assert [len(block.seconds) for block in blocks] == [BLOCK_S] * 3
    assert [len(second.open_requests) for second in blocks[1].seconds] == [1] * 10 + [0] + [1] * 19


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{}"], "line 1: Object missing required field `at_s`"),
        (["nonsense"], "line 1"),
        (['{"at_s": 1.0}', '{"at_s": 0.5}'], "line 2: at_s is 0.5; 1.0 or later is allowed"),
        (['{"at_s": 1.0}'], "shorter than one block"),
        ([""], "line 1"),
        (
            [
                '{"at_s": 1.0, "open_requests": [{"track": "x", "session": "s", "age_s": 1.0, "has_first_token": true}]}'
            ],
            "track",
        ),
        (
            [WAITING % '"track": "stable", "session": "s", "age_s": -1.0, "has_first_token": true'],
            r"open_requests\[0\].age_s is -1.0",
        ),
    ],
)
def test_a_wrong_recording_is_refused(tmp_path: Path, lines: list[str], text: str) -> None:
    """With its line and field, and exit status 2."""
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(RecordingError, match=text):
        read(path)
    assert CliRunner().invoke(app, ["redraw", str(path), "--jobs", "1"]).exit_code == 2


def test_a_compressed_recording_has_the_same_blocks(tmp_path: Path) -> None:
    """One that was cut off is refused."""
    plain, packed = tmp_path / "r.jsonl", tmp_path / "r.jsonl.xz"
    data = b"".join(encode(RecordedBatch(100.0 + second)) for second in range(95))
    plain.write_bytes(data)
    packed.write_bytes(lzma.compress(data))
    assert read(packed) == read(plain) != ()
    packed.write_bytes(lzma.compress(data)[:-20])
    with pytest.raises(RecordingError, match=r"no whole \.xz file"):
        read(packed)


@pytest.mark.parametrize("steps", ["", "a", "50,10", "0,10", "10,101", "10,10"])
def test_wrong_steps_are_refused(tmp_path: Path, steps: str) -> None:
    """Weights rise, above 0 and up to 100."""
    done = CliRunner().invoke(app, ["redraw", str(record(tmp_path / "r.jsonl", 60)), "--steps", steps])
    assert done.exit_code == 2


def test_the_command_prints_share_and_bound(tmp_path: Path) -> None:
    """For people, as JSON, and on the page."""
    path, target = str(record(tmp_path / "r.jsonl", 90)), tmp_path / "rollouts.md"
    common = ["redraw", path, "--rollouts", "2", "--jobs", "1", "--steps", "50", "--step-blocks", "1"]
    shown = CliRunner().invoke(app, common)
    assert shown.exit_code == 0
    assert (
        "0 of 2 rollouts rolled back (0.00%), upper 95 % bound 77.64% (aim: at most 2%). The seed is 1"
        in shown.stdout
    )
    told: dict[str, Any] = json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)
    assert (told["rollouts"], told["false_rollbacks"], told["seed"]) == (2, 0, 1)
    assert CliRunner().invoke(app, [*common, "--write", str(target)]).exit_code == 0
    page = target.read_text(encoding="utf-8").partition("<!-- redraw")[2]
    assert "0 of 2 rollouts rolled back" in " ".join(page.split())  # wherever the lines of the page break


def broken() -> Any:
    """Return a worker that fails."""

    def run(task: int) -> int:
        raise ValueError(f"task {task}")

    return run


def test_errors_of_a_process_are_raised() -> None:
    """And a number of processes out of range is refused."""
    with pytest.raises(ValueError, match="task 5"):
        list(parallel.results(broken, [5, 6], 2))
    with pytest.raises(ValueError, match="jobs is 3; 1 to 2 is allowed"):
        list(parallel.results(broken, [5], 3))
