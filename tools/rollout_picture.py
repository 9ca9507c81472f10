"""Writes docs/rollout-status.svg (`make docs`): the screen of `kvmesh rollout status` for a rollout at 25 %."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from kvmesh.cli.control.durations import message
from kvmesh.cli.control.rollout_tables import status_screen
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots

PICTURE: Final = Path(__file__).parent.parent / "docs" / "rollout-status.svg"
COLUMNS: Final = 118
BEGAN_S: Final = 1_795_428_902
"""2026-11-23 10:15:02 UTC."""


def sample() -> pb.Rollout:
    """Return a rollout at its third step, with figures of the size that the reference engines give."""
    return pb.Rollout(
        rollout="r-20261123-101502",
        settings=pb.RolloutSettings(
            to_pool="next",
            baseline_pool="stable-young",
            steps_percent=(1, 5, 25, 50, 100),
            bake=message(120),
            bake_max=message(1800),
            keep_old=message(3600),
            expectation=pb.EXPECTATION_EXACT,
            on_inconclusive=pb.ON_INCONCLUSIVE_ROLLBACK,
            requirements=("evaluation",),
        ),
        state=snapshots.ROLLOUT_STATE_BAKING,
        step=3,
        weight_percent=25,
        from_pool="stable",
        from_version="v1",
        to_version="v2",
        started_at=Timestamp(seconds=BEGAN_S),
        changed_at=Timestamp(seconds=BEGAN_S + 437),
        baked_s=84,
        reason="step 2 passed",
        waits_for=("36 s of baking", "88 sessions of the canary", "attestation evaluation"),
        verdict=verdict(),
        changes=changes(),
        started_by="operator",
        revision=41,
    )


def verdict() -> pb.Verdict:
    """Return the verdict of a look at 200 sessions."""
    more = "needs more"
    return pb.Verdict(
        kind=pb.Verdict.KIND_NEEDS_MORE,
        reason="ttft: the upper bound is not below 1.25 yet",
        looks=3,
        next_look_samples=400,
        samples=(
            pb.TrackSamples(track=snapshots.TRACK_CANARY, sessions=312, requests=1186, errors=1, open=9),
            pb.TrackSamples(track=snapshots.TRACK_BASELINE, sessions=305, requests=1170, errors=0, open=8),
            pb.TrackSamples(track=snapshots.TRACK_STABLE, sessions=611, requests=2402, errors=2, open=17),
        ),
        gates=(
            gate("errors", 0.32, 2.5, "points", p=0.41, result="passes"),
            gate("ttft", 1.31, 1.25, "ratio", p=0.08, result=more, reason="upper 99 % bound"),
            gate("gap", 1.02, 1.25, "ratio", p=0.37, result="passes"),
            gate("computed_share", 1.04, None, "ratio", p=0.22, result="passes"),
            gate("golden", 0, 0, "tokens", result="passes"),
            gate("output_length", 0.99, None, "ratio", result="reported"),
        ),
    )


def gate(
    name: str,
    figure: float,
    bound: float | None,
    unit: str,
    *,
    p: float | None = None,
    result: str,
    reason: str = "",
) -> pb.Gate:
    """Return one gate; its test, if it has one, fails below the level of the design."""
    alpha = None if p is None else 5e-4
    return pb.Gate(
        name=name, figure=figure, bound=bound, unit=unit, p=p, alpha=alpha, result=result, reason=reason
    )


def changes() -> list[pb.RolloutChange]:
    """Return the changes of state so far."""
    rows = (
        (0, snapshots.ROLLOUT_STATE_PENDING, 0, 0, "", "operator"),
        (1, snapshots.ROLLOUT_STATE_PREPARING, 0, 0, "all checks pass", ""),
        (9, snapshots.ROLLOUT_STATE_BAKING, 1, 1, "golden tokens are equal", ""),
        (221, snapshots.ROLLOUT_STATE_BAKING, 2, 5, "step 1 passed", ""),
        (437, snapshots.ROLLOUT_STATE_BAKING, 3, 25, "step 2 passed", ""),
    )
    return [
        pb.RolloutChange(
            state=state,
            step=step,
            weight_percent=weight,
            at=Timestamp(seconds=BEGAN_S + after_s),
            reason=reason,
            by=by,
        )
        for after_s, state, step, weight, reason, by in rows
    ]


def utc_time(at: Timestamp) -> str:
    """Return a time of the picture, the same on every machine."""
    return f"{at.ToDatetime():%Y-%m-%d %H:%M:%S}"


def picture() -> str:
    """Return the picture."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(status_screen(sample(), utc_time), markup=False, highlight=False)
    return console.export_svg(title="kvmesh rollout status --watch", unique_id="rollout-status")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
