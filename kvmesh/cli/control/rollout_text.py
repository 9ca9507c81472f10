"""A rollout in words: its headline, its steps, its gates, and the lines of `rollout status --watch` in a pipe. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from kvmesh.cli.control.durations import seconds_of, words
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots

PROMOTED: Final = (snapshots.ROLLOUT_STATE_COMPLETED,)
TAKEN_BACK: Final = (snapshots.ROLLOUT_STATE_ROLLED_BACK, snapshots.ROLLOUT_STATE_ABORTED)

TRACKS: Final = (
    (snapshots.TRACK_CANARY, "canary"),
    (snapshots.TRACK_BASELINE, "baseline"),
    (snapshots.TRACK_STABLE, "stable"),
)
"""Tracks with samples, in the order of tables."""

_BASELINE: Final = "baseline"
_STABLE: Final = "stable"
"""Arms of a comparison, as the judge names them."""

_NUMBER: Final = re.compile(r"\d[\d.,]*")


def word_of(enum: Any, value: int, prefix: str) -> str:
    """Return the name of an enum's value without its prefix; the number of a value of a later release."""
    return enum.Name(value).removeprefix(prefix) if value in enum.values() else f"state {value}"


def state_word(state: int) -> str:
    """Return the state as docs/rollouts.md writes it, for example "BAKING"."""
    return word_of(snapshots.RolloutState, state, "ROLLOUT_STATE_")


def verdict_word(kind: int) -> str:
    """Return the kind of a verdict, for example "needs more"."""
    name = word_of(pb.Verdict.Kind, kind, "KIND_").lower().replace("_", " ")
    return "none yet" if name == "unspecified" else name


def is_over(rollout: pb.Rollout) -> bool:
    """True if the rollout ended."""
    return rollout.state in (*PROMOTED, *TAKEN_BACK)


def exit_status(rollout: pb.Rollout) -> int:
    """Return the exit status of a watched rollout that ended: 0 promoted, 1 taken back."""
    return 0 if rollout.state in PROMOTED else 1


def headline(rollout: pb.Rollout) -> str:
    """Return one line: id, pools with versions, state, step, weight."""
    step = f", step {rollout.step} of {len(rollout.settings.steps_percent)}" if rollout.step else ""
    return (
        f"{rollout.rollout}: {pools_text(rollout)}: {state_word(rollout.state)}{step}, {weight_text(rollout)}"
    )


def pools_text(rollout: pb.Rollout) -> str:
    """Return both pools with their versions."""
    before = pool_text(rollout.from_pool, rollout.from_version)
    return f"{before} to {pool_text(rollout.settings.to_pool, rollout.to_version)}"


def pool_text(pool: str, version: str) -> str:
    """Return a pool with its version."""
    return f"{pool or '-'} ({version or 'version unknown'})"


def weight_text(rollout: pb.Rollout) -> str:
    """Return the canary's weight, and the step's weight while the two differ."""
    target = target_percent(rollout)
    is_rising = rollout.state == snapshots.ROLLOUT_STATE_BAKING and rollout.weight_percent != target
    return f"weight {rollout.weight_percent} %" + (f" of {target} %" if is_rising else "")


def target_percent(rollout: pb.Rollout) -> int:
    """Return the weight of the present step; 0 before the first step."""
    steps = rollout.settings.steps_percent
    return steps[rollout.step - 1] if 1 <= rollout.step <= len(steps) else 0


def step_words(rollout: pb.Rollout) -> list[tuple[str, str]]:
    """Return each step as text and mark: "done", "present" or "ahead"."""
    is_reached = rollout.state in (snapshots.ROLLOUT_STATE_PROMOTING, *PROMOTED)
    marked = []
    for number, percent in enumerate(rollout.settings.steps_percent, 1):
        mark = "done" if is_reached or number < rollout.step else "ahead"
        if number == rollout.step and not is_reached:
            mark = "present"
        marked.append((f"[{percent} %]" if mark == "present" else f"{percent} %", mark))
    return marked


def baked_text(rollout: pb.Rollout) -> str:
    """Return the time baked in the step, with its bounds."""
    settings = rollout.settings
    return (
        f"{words(rollout.baked_s)} of {words(seconds_of(settings.bake))}, "
        f"at most {words(seconds_of(settings.bake_max))}"
    )


def looks_text(verdict: pb.Verdict) -> str:
    """Return the looks that were taken, and the samples at which the next one is due."""
    looks = f"{_count(verdict.looks, 'look')} so far"
    if not verdict.next_look_samples:
        return f"{looks}, no further one in this step"
    canary = next((each.sessions for each in verdict.samples if each.track == snapshots.TRACK_CANARY), 0)
    return f"{looks}, the next at {verdict.next_look_samples:,} sessions of the canary ({canary:,} now)"


def comparison_text(rollout: pb.Rollout) -> str:
    """Return the comparison arm as the judge names it. Before its first verdict: by the settings."""
    verdict, baseline = rollout.verdict, rollout.settings.baseline_pool
    is_baseline = verdict.comparison == _BASELINE or not (verdict.comparison or verdict.is_weak)
    if baseline and is_baseline:
        return f"{baseline}, the baseline"
    if verdict.comparison in ("", _STABLE):
        is_weak = verdict.is_weak or not verdict.comparison
        weaker = ": a weaker comparison than with a baseline" if is_weak else ""
        return f"{rollout.from_pool}, the stable pool{weaker}"
    return f"{rollout.from_pool}, {verdict.comparison}"


def requirement_lines(rollout: pb.Rollout) -> list[str]:
    """Return each requirement with its attestation, or with the command that gives it."""
    attested = {each.requirement: each for each in rollout.attestations}
    lines = []
    for name in rollout.settings.requirements:
        found = attested.pop(name, None)
        if found is None:
            lines.append(f"{name}: open, `kvmesh rollout attest {name} pass|fail` answers it")
        else:
            lines.append(f"{name}: {'met' if found.passed else 'not met'}, says {found.by or 'an operator'}")
    return lines


def figure_text(gate: pb.Gate) -> str:
    """Return the figure of a gate with its unit; "unknown" if it is missing."""
    return _with_unit(gate.figure, gate.unit) if gate.HasField("figure") else "unknown"


def bound_text(gate: pb.Gate) -> str:
    """Return the bound of a gate; "-" without one."""
    return _with_unit(gate.bound, gate.unit) if gate.HasField("bound") else "-"


def samples_text(gate: pb.Gate) -> str:
    """Return the samples of the canary and of its comparison; "-" for a gate without samples."""
    if not (gate.canary_samples or gate.comparison_samples):
        return "-"
    return f"{gate.canary_samples:,} / {gate.comparison_samples:,}"


def reported_texts(samples: pb.TrackSamples) -> tuple[str, str]:
    """Return the mean output tokens and the finish reasons of a track, which are reported and not judged."""
    mean = f"{samples.output_tokens_mean:.1f}" if samples.HasField("output_tokens_mean") else "-"
    reasons = sorted(samples.finish_reasons.items(), key=lambda found: (-found[1], found[0]))
    return mean, ", ".join(f"{reason or 'none'} {number:,}" for reason, number in reasons) or "-"


def chance_texts(gate: pb.Gate) -> tuple[str, str]:
    """Return the probability, and the level below which the test fails; "-" without a test."""
    return (
        f"{gate.p:.2g}" if gate.HasField("p") else "-",
        f"{gate.alpha:.2g}" if gate.HasField("alpha") else "-",
    )


def change_text(change: pb.RolloutChange) -> str:
    """Return a change of state in one line, without its time."""
    step = f", step {change.step}" if change.step else ""
    is_named = not change.by or f" by {change.by}" in change.reason
    by = "" if is_named else f" by {change.by}"
    why = f": {change.reason}" if change.reason else ""
    return f"{state_word(change.state)}{step}, weight {change.weight_percent} %{by}{why}"


def plain_line(rollout: pb.Rollout) -> str:
    """Return the state in one line, for a pipe."""
    samples = ", ".join(
        f"{name} {_count(found.sessions, 'session')} with {_count(found.errors, 'error')}"
        for track, name in TRACKS
        for found in rollout.verdict.samples
        if found.track == track
    )
    parts = [headline(rollout)]
    if rollout.verdict.kind:
        parts.append(f"verdict {verdict_word(rollout.verdict.kind)}")
    parts += [gate_line(gate) for gate in rollout.verdict.gates if gate.result == "fails"]
    if samples:
        parts.append(samples)
        if not is_over(rollout):
            parts.append(looks_text(rollout.verdict))
    if rollout.waits_for and not is_over(rollout):
        parts.append(f"waits for {', '.join(rollout.waits_for)}")
    if rollout.silent_frontends:
        parts.append(f"silent frontends {', '.join(rollout.silent_frontends)}")
    if rollout.reason:
        parts.append(rollout.reason)
    return "; ".join(parts)


def gate_line(gate: pb.Gate) -> str:
    """Return a gate with its figure and its bound, in a few words."""
    return f"{gate.name} {gate.result}: {figure_text(gate)}, bound {bound_text(gate)}"


def change_key(rollout: pb.Rollout) -> tuple[Any, ...]:
    """Return what makes a new line in a pipe. Counts that grow each second are left out."""
    verdict = rollout.verdict
    return (
        *(rollout.rollout, rollout.state, rollout.step, rollout.weight_percent, verdict.kind, verdict.looks),
        *(_without_numbers(rollout.waits_for), tuple(rollout.silent_frontends), len(rollout.attestations)),
        _without_numbers((rollout.reason,)),
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _without_numbers(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("#", text) for text in texts)


def _with_unit(value: float, unit: str) -> str:
    digits = (
        f"{value:,.3f}".rstrip("0").rstrip(".") if 0.001 <= abs(value) < 1e6 or not value else f"{value:.3g}"
    )
    return f"{digits} {unit}".rstrip()
