"""A mock worker whose streams have common steps, as those of an engine with continuous batching.

`python -m bench.peers.stepping_worker --port P --name worker-0 --interval-s 0.02`. The first token of a stream comes at
once. The others come at multiples of the interval, those of all streams together.
"""

from __future__ import annotations

from bench import control
from bench.peers.worker import Worker


class SteppingWorker(Worker):
    """Answers as a Worker."""

    def start_s(self, now_s: float) -> float:
        """Return the last step before now. See Worker."""
        return now_s // self.interval_s * self.interval_s


async def serve(port: int, name: str, interval_s: float) -> None:
    """Serve until the process ends."""
    async with await SteppingWorker(name, interval_s).serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    control.main(serve, __doc__)
