"""A rollout in words and tables: on messages, without a control plane."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from kvmesh.cli.control import rollout_tables as tables
from kvmesh.cli.control import rollout_text as text
from kvmesh.cli.control.durations import message
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots
from tests.unit.cli.control.messages import FINAL, STATES, rollout, rows_of, text_of


def at(time: Timestamp) -> str:
    """Return a time as its seconds."""
    return str(time.seconds)


GATE = pb.Gate(
    name="ttft",
    figure=1.31,
    bound=1.25,
    unit="ratio",
    p=0.0003,
    alpha=0.0005,
    result="fails",
    reason="slower",
)


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_a_screen_a_line_and_a_row(state: Any) -> None:
    """Each names the state, also one without any verdict."""
    word = snapshots.RolloutState.Name(state).removeprefix("ROLLOUT_STATE_")
    found = rollout(state)
    assert word in text_of(tables.status_screen(found, at))
    assert word in text.plain_line(found)
    assert word in text_of(tables.history_table([found], at))
    assert text.is_over(found) == (state in FINAL)
    assert text.exit_status(found) == (0 if state == snapshots.ROLLOUT_STATE_COMPLETED else 1)


def test_an_empty_message_has_a_screen() -> None:
    """A later release may leave everything out; the screen then says so."""
    shown = text_of(tables.status_screen(pb.Rollout(), at))
    assert "version unknown" in shown
    assert text.plain_line(pb.Rollout())


def test_a_state_of_a_later_release_is_shown_by_its_number() -> None:
    """An enum's unknown value has no name."""
    assert text.state_word(99) == "state 99"
    assert "state 99" in text.headline(rollout(99))


@pytest.mark.parametrize(
    ("state", "step", "marks"),
    [
        (snapshots.ROLLOUT_STATE_PREPARING, 0, ["ahead", "ahead", "ahead"]),
        (snapshots.ROLLOUT_STATE_BAKING, 1, ["present", "ahead", "ahead"]),
        (snapshots.ROLLOUT_STATE_PAUSED, 2, ["done", "present", "ahead"]),
        (snapshots.ROLLOUT_STATE_PROMOTING, 3, ["done", "done", "done"]),
        (snapshots.ROLLOUT_STATE_COMPLETED, 3, ["done", "done", "done"]),
        (snapshots.ROLLOUT_STATE_ROLLING_BACK, 2, ["done", "present", "ahead"]),
    ],
)
def test_the_present_step_is_marked(state: Any, step: int, marks: list[str]) -> None:
    """In a pipe and without colours by brackets."""
    words = text.step_words(rollout(state, step=step))
    assert [mark for _, mark in words] == marks
    assert [word for word, mark in words if mark == "present"] == (
        [f"[{(10, 50, 100)[step - 1]} %]"] if "present" in marks else []
    )


def test_a_rising_weight_is_shown_beside_the_weight_of_the_step() -> None:
    """The weight rises by at most 5 points at a time."""
    assert text.weight_text(rollout(weight_percent=35)) == "weight 35 % of 50 %"
    assert text.weight_text(rollout(weight_percent=50)) == "weight 50 %"
    back = rollout(snapshots.ROLLOUT_STATE_ROLLING_BACK, weight_percent=0)
    assert text.weight_text(back) == "weight 0 %"


def test_each_gate_has_its_figure_and_its_bound() -> None:
    """A missing figure is unknown, and not 0."""
    hang = pb.Gate(name="hang", result="inconclusive", canary_samples=1200, comparison_samples=7)
    head, *rows = rows_of(tables.gates_table(pb.Verdict(gates=[GATE, hang])))
    assert head == ["gate", "figure", "bound", "samples", "p", "fails below", "result", "reason"]
    assert rows[0] == ["ttft", "1.31 ratio", "1.25 ratio", "-", "0.0003", "0.0005", "fails", "slower"]
    assert rows[1] == ["hang", "unknown", "-", "1,200 / 7", "-", "-", "inconclusive", ""]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1234.5, "1,234.5"), (0.00002, "2e-05"), (3e9, "3e+09"), (float("nan"), "nan")],
)
def test_figures_of_any_size_are_readable(value: float, shown: str) -> None:
    """A figure may be a probability or a number of bytes."""
    assert text.figure_text(pb.Gate(figure=value)) == shown


def test_samples_are_shown_by_track() -> None:
    """Canary first, with its open requests."""
    samples = [
        pb.TrackSamples(track=snapshots.TRACK_STABLE, sessions=900, requests=2000),
        pb.TrackSamples(
            track=snapshots.TRACK_CANARY,
            sessions=100,
            requests=1200,
            errors=2,
            open=3,
            client_errors=4,
            output_tokens_mean=31.25,
            finish_reasons={"length": 20, "stop": 1176},
        ),
    ]
    rows = rows_of(tables.samples_table(pb.Verdict(samples=samples)))
    assert rows[1:] == [
        ["canary", "100", "1,200", "2", "4", "3", "31.2", "stop 1,176, length 20"],
        ["stable", "900", "2,000", "0", "0", "0", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("comparison", "is_weak", "baseline", "shown"),
    [
        ("", False, "young", "young, the baseline"),
        ("", False, "", "stable, the stable pool: a weaker comparison than with a baseline"),
        ("baseline", False, "young", "young, the baseline"),
        ("stable", False, "young", "stable, the stable pool"),
        ("stable", True, "", "stable, the stable pool: a weaker comparison than with a baseline"),
        ("the stable pool before", True, "young", "stable, the stable pool before"),
    ],
)
def test_the_comparison_is_the_one_of_the_judge(
    comparison: str, is_weak: bool, baseline: str, shown: str
) -> None:
    """From 50 % on it is no longer the baseline."""
    verdict = pb.Verdict(comparison=comparison, is_weak=is_weak)
    found = pb.Rollout(
        from_pool="stable", verdict=verdict, settings=pb.RolloutSettings(baseline_pool=baseline)
    )
    assert text.comparison_text(found) == shown


def test_a_pipe_has_failing_gates_and_the_next_look() -> None:
    """The text has the decisive figures without a terminal, too."""
    samples = [pb.TrackSamples(track=snapshots.TRACK_CANARY, sessions=310)]
    verdict = pb.Verdict(
        kind=pb.Verdict.KIND_FAIL, gates=[GATE], samples=samples, looks=3, next_look_samples=400
    )
    line = text.plain_line(rollout(snapshots.ROLLOUT_STATE_BAKING, verdict=verdict))
    assert "ttft fails: 1.31 ratio, bound 1.25 ratio" in line
    assert "the next at 400 sessions of the canary (310 now)" in line


def test_looks_say_when_the_next_one_is_due() -> None:
    """In sessions of the canary, beside those that are there."""
    samples = [pb.TrackSamples(track=snapshots.TRACK_CANARY, sessions=310)]
    due = pb.Verdict(looks=3, next_look_samples=400, samples=samples)
    assert text.looks_text(due) == "3 looks so far, the next at 400 sessions of the canary (310 now)"
    assert text.looks_text(pb.Verdict(looks=1)) == "1 look so far, no further one in this step"


def test_the_screen_names_conditions_silent_frontends_and_requirements() -> None:
    """An open requirement comes with the command that answers it."""
    found = rollout(
        waits_for=["30 s of baking", "2 more replicas"],
        silent_frontends=["frontend-1"],
        attestations=[pb.Attestation(requirement="load", passed=True, by="alice")],
        baked_s=84,
    )
    found.settings.requirements.extend(("load", "evaluation"))
    found.settings.bake.CopyFrom(message(120))
    found.settings.bake_max.CopyFrom(message(1800))
    shown = text_of(tables.status_screen(found, at))
    for words in (
        *("30 s of baking", "2 more replicas", "frontend-1: their traffic is not under control"),
        *(
            "load: met, says alice",
            "evaluation: open, `kvmesh rollout attest evaluation pass|fail` answers it",
        ),
        *("1 min 24 s of 2 min, at most 30 min", "young, the baseline"),
    ):
        assert words in shown, words


def test_a_weak_comparison_is_named() -> None:
    """Without a baseline the new pool is compared with a warmer and larger one."""
    found = rollout()
    found.settings.baseline_pool = ""
    assert "weaker" in text.comparison_text(found)


def test_the_report_has_every_number_that_decided() -> None:
    """Each change with the gates of its verdict."""
    samples = [pb.TrackSamples(track=snapshots.TRACK_CANARY, sessions=431)]
    verdict = pb.Verdict(kind=pb.Verdict.KIND_FAIL, reason="ttft fails", gates=[GATE], samples=samples)
    changes = [
        pb.RolloutChange(state=snapshots.ROLLOUT_STATE_BAKING, step=1, weight_percent=10),
        pb.RolloutChange(state=snapshots.ROLLOUT_STATE_ROLLING_BACK, reason="ttft fails", verdict=verdict),
    ]
    shown = text_of(tables.report(rollout(snapshots.ROLLOUT_STATE_ROLLED_BACK, changes=changes), at))
    for words in (
        "BAKING, step 1, weight 10 %",
        "ROLLING_BACK",
        "fail: ttft fails",
        "431",
        "1.31 ratio",
        "0.0003",
    ):
        assert words in shown, words


def test_markup_in_a_message_is_text() -> None:
    """A reason may come from a person, and may not format the terminal."""
    hostile = "[red]x[/red] [/nothing]"
    found = rollout(reason=hostile, waits_for=[hostile], silent_frontends=[hostile], from_version=hostile)
    found.changes.add(reason=hostile, by=hostile)
    found.verdict.gates.add(name=hostile, reason=hostile, result=hostile)
    assert text_of(tables.status_screen(found, at)).count("[/nothing]") >= 8
    assert hostile in text_of(tables.history_table([found], at))


def test_a_pipe_gets_a_new_line_only_for_a_change() -> None:
    """Counts that grow each second are no change; a new condition is one."""
    samples = [pb.TrackSamples(track=snapshots.TRACK_CANARY, sessions=10)]
    before = rollout(waits_for=["30 s of baking"], verdict=pb.Verdict(samples=samples), baked_s=30)
    same = rollout(waits_for=["29 s of baking"], verdict=pb.Verdict(), baked_s=31)
    assert text.change_key(before) == text.change_key(same)
    for other in (
        rollout(waits_for=["30 s of baking", "2 more replicas"]),
        rollout(waits_for=["30 s of baking"], weight_percent=45),
        rollout(waits_for=["30 s of baking"], step=3),
        rollout(snapshots.ROLLOUT_STATE_PAUSED, waits_for=["30 s of baking"]),
        rollout(waits_for=["30 s of baking"], silent_frontends=["frontend-0"]),
        rollout(waits_for=["30 s of baking"], verdict=pb.Verdict(looks=1)),
    ):
        assert text.change_key(other) != text.change_key(before)


def test_an_author_is_named_once() -> None:
    """A reason such as "paused by alice" has it already."""
    change = pb.RolloutChange(
        state=snapshots.ROLLOUT_STATE_PAUSED, by="alice", reason="paused by alice: lunch"
    )
    assert text.change_text(change) == "PAUSED, weight 0 %: paused by alice: lunch"
    change.reason = "no decision"
    assert text.change_text(change) == "PAUSED, weight 0 % by alice: no decision"
