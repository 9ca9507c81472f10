"""A control process that notes each publication and its acknowledgements: `--times FILE`, and its own options.

The process is the real one. A line of the file has the version of a snapshot, and the seconds from its publication to its
acknowledgement (ACK) by one receiver.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from controlplane import options as control_options
from controlplane.core import ControlCore
from controlplane.main import ControlProcess
from controlplane.snapshots.receivers import Receiver
from kvmesh import process
from kvmesh.config import ConfigError
from kvmesh.roles import CONTROL
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.published import Name, Published, Term


def tap(core: ControlCore, file: TextIO) -> None:
    """Write the time of each acknowledgement that `core` takes from now on, once for each receiver and snapshot."""
    publish, take = core.publisher.publish, core.on_applied
    published_s: dict[Name, float] = {}
    seen: set[tuple[Name, str]] = set()

    def on_publish(term: Term, content: Content, wall_s: float, reason: str, by: str) -> Published:
        began_s = time.monotonic()
        snapshot = publish(term, content, wall_s, reason, by)
        published_s[snapshot.name] = began_s
        return snapshot

    def on_applied(receiver: Receiver, name: Name, now_s: float) -> None:
        take(receiver, name, now_s)
        if name in published_s and (name, receiver.process_id) not in seen:
            seen.add((name, receiver.process_id))
            file.write(f"{name.version} {time.monotonic() - published_s[name]:.6f}\n")
            file.flush()

    core.publisher.publish = on_publish  # type: ignore[method-assign]  # the tap
    core.on_applied = on_applied  # type: ignore[method-assign]  # the tap


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status, as the control process does."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--times", type=Path, required=True)
    given, rest = parser.parse_known_args(arguments)

    async def serve(options: ServiceOptions) -> None:
        control = ControlProcess(options)
        with given.times.open("a", encoding="ascii") as file:
            tap(control.core, file)
            await control.serve()

    return process.main(
        CONTROL, lambda: control_options.parse(rest, os.environ), serve, (ConfigError, OSError)
    )


if __name__ == "__main__":
    sys.exit(main())
