"""Cold shapes of a real tritonserver: steps that take longer after boot, counted in its load reports."""

import time
from contextlib import aclosing
from pathlib import Path

from kvmesh.triton.tensors import load_of
from tests.integration.engine.servers import Client, launch
from tests.patience import patience

_COLD_S = 0.4


async def _await_cold_steps(client: Client, expected: int) -> None:
    """Return when a load report counts so many cold steps; fail if it counts more."""
    async with patience(10.0), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            cold = load_of(report).cold_steps
            assert cold is not None and cold <= expected
            if cold == expected:
                return
    raise AssertionError("subscription ended")


async def test_first_runs_of_a_shape_are_cold_and_later_ones_are_not(tmp_path: Path) -> None:
    """A prompt and its decode steps are slow once; a second prompt of the same shape is fast; a new shape is slow."""
    server = launch(tmp_path / "engine", f"--cold-s={_COLD_S}", "--cold-runs=1", "--block-tokens=8")
    try:
        server.wait_ready()
        client = Client(server.grpc)
        await _await_cold_steps(client, 0)
        began_s = time.monotonic()
        assert len((await client.run([17, 23, 99], 4)).tokens) == 4
        assert time.monotonic() - began_s >= 2 * _COLD_S
        await _await_cold_steps(client, 2)
        assert len((await client.run([18, 24, 98, 5], 4)).tokens) == 4
        await _await_cold_steps(client, 2)
        await client.run([5] * 9, 4)
        await _await_cold_steps(client, 3)
        await client.close()
    finally:
        server.kill()
