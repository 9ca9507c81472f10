"""Writes docs/rollout-status.svg (`make docs`): the screen of `kvmesh rollout status` for a recorded rollout.

docs/rollout-status.json is what `kvmesh rollout status --json` printed in a run of `python -m bench.rollouts run`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from kvmesh.cli.control.rollout_tables import status_screen
from kvmesh.control.v1 import control_pb2 as pb

DOCS: Final = Path(__file__).parent.parent / "docs"
RECORDED: Final = DOCS / "rollout-status.json"
PICTURE: Final = DOCS / "rollout-status.svg"
COLUMNS: Final = 144


def sample() -> pb.Rollout:
    """Return the recorded rollout."""
    return json_format.Parse(RECORDED.read_text(encoding="utf-8"), pb.Rollout())


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
