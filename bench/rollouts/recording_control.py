"""A control process that appends the observations of a weighted rollout to a file: `--record FILE`, and its own options.

The process is the real one. A line is written as the leader takes a batch, in the format of `recording`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from bench.rollouts.recording import RecordedBatch, encode
from controlplane import options as control_options
from controlplane.core import ControlCore
from controlplane.main import ControlProcess
from controlplane.observing import batch_of, tracks_of
from controlplane.rollouts.document import WEIGHTED
from controlplane.snapshots.receivers import Receiver
from kvmesh import process
from kvmesh.config import ConfigError
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.roles import CONTROL
from kvmesh.service_options import ServiceOptions


def tap(core: ControlCore, file: BinaryIO) -> None:
    """Record each batch that `core` takes from now on, before the core takes it."""
    take = core.on_observations
    seen: dict[str, int] = {}

    def on_observations(receiver: Receiver, batch: pb.ObservationBatch, now_s: float) -> None:
        frontend = f"{receiver.process_id}/{receiver.boot_id}"
        if batch.sequence > seen.get(frontend, 0):  # an unconfirmed batch comes again
            seen[frontend] = batch.sequence
            _record(core, file, frontend, batch, now_s)
        take(receiver, batch, now_s)

    core.on_observations = on_observations  # type: ignore[method-assign]  # the tap


def _record(
    core: ControlCore, file: BinaryIO, frontend: str, batch: pb.ObservationBatch, now_s: float
) -> None:
    document = core.library.running
    if document is None or document.state not in WEIGHTED:
        return
    found = batch_of(batch, frontend, tracks_of(core.content), document.id, now_s)
    file.write(encode(RecordedBatch(now_s, found.ends, found.open_requests)))
    file.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status, as the control process does."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--record", type=Path, required=True)
    given, rest = parser.parse_known_args(arguments)

    async def serve(options: ServiceOptions) -> None:
        control = ControlProcess(options)
        with given.record.open("ab") as file:
            tap(control.core, file)
            await control.serve()

    return process.main(
        CONTROL, lambda: control_options.parse(rest, os.environ), serve, (ConfigError, OSError)
    )


if __name__ == "__main__":
    sys.exit(main())
