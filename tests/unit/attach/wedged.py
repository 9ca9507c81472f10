"""A process with a blocked event loop and running gRPC threads: serves Attach, reports its load, wedges, recovers.

It prints its port. It wedges for the given seconds at the first submit.
"""

from __future__ import annotations

import asyncio
import sys
import time

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.server import GRPCIO, MeshServer

REPORT_S = 0.5
"""Time between two load reports."""


class Wedged:
    """An Attachable that is its own session."""

    def __init__(self, wedged_s: float) -> None:
        self.wedged_s = wedged_s
        self.outboxes: list[DownwardOutbox] = []

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Wedged:
        """See Attachable."""
        self.outboxes.append(outbox)
        outbox.load(pb.LoadReport(engine_ready=True))
        return self

    def after_event(self) -> None:
        """See Attachable."""

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Block the loop at the first submit. gRPC's own thread still answers pings."""
        if message.submits and self.wedged_s:
            wedged_s, self.wedged_s = self.wedged_s, 0.0
            time.sleep(wedged_s)

    def on_closed(self, now_s: float) -> None:
        """See Session."""


async def main() -> None:
    """Serve until killed."""
    service = Wedged(float(sys.argv[1]))
    hello = pb.Hello(process_id="wedged", boot_id="boot", protocol_version=1)
    server = MeshServer("decode", "wedged", ("kvmesh.attach.v1.AttachService",), transport=GRPCIO)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(
        AttachService(service, hello, MonotonicClock()), server.grpc
    )
    sys.stdout.write(f"{await server.listen('127.0.0.1:0')}\n")
    sys.stdout.flush()
    while True:
        for outbox in service.outboxes:
            outbox.load(pb.LoadReport(engine_ready=True))
        await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    asyncio.run(main())
