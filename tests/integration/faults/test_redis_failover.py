"""A mesh whose Redis fails over by Redis Sentinel."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.redis_binary import redis_binary
from kvmesh.redis_link import key
from kvmesh.redis_url import VARIABLE
from tests.integration.faults.conftest import STEP_S
from tests.integration.faults.streams import requests, run_through, undisturbed
from tests.integration.harness import configure, running_mesh, until
from tests.integration.redis.sentinels import SentinelSet

pytestmark = pytest.mark.mesh

PAUSE_MAX_S = 4.0


async def test_a_failover_of_redis_costs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is killed under 16 streams, and the new one has none of its keys. All leases and the index are written
    again there.
    """
    (tmp_path / "redis").mkdir()
    servers = SentinelSet(redis_binary(), tmp_path / "redis", password="correct-horse")
    monkeypatch.setenv(VARIABLE, servers.url)
    config = configure(
        engine={"arithmetic": "hashed", "kv_blocks": 512, "prefill_kv_blocks": 512, "step_s": STEP_S},
        prefill={"replicas": 1},
        decode={"replicas": 1},
        router={"snapshot_interval_s": 2.0},
        redis={"url": servers.url},
    )
    try:
        await servers.start()
        async with running_mesh(config, tmp_path) as mesh:
            wanted = requests(11, 60)
            expected = await undisturbed(mesh, wanted)
            master, replica = servers.data
            leases = [
                key(config.mesh.name, "proc", name) for name in mesh.running("router", "prefill", "decode")
            ]

            async def has_leases() -> bool:
                return int(await replica.ask("EXISTS", *leases)) == len(leases)

            async def is_whole() -> bool:
                status = await mesh.status("router-0")
                views = [view.placeable and view.index_block_count > 0 for view in status.replicas]
                return status.redis_connected and len(views) == 2 and all(views)

            async def fail_over() -> None:
                await until(is_whole, 20, "the index is whole")
                await replica.ask("CONFIG", "SET", "replica-read-only", "no")
                master.kill()
                await replica.ask("FLUSHALL")
                assert not await has_leases()
                await until(has_leases, 20, "all leases are at the new master")
                await until(is_whole, 20, "the index is whole again")

            run = await run_through(mesh, wanted, expected, fail_over)
            assert run.wrong == [] and run.answers >= 2 * len(wanted)
            assert run.longest_pause_s < PAUSE_MAX_S
            assert "'role': 'master'" in str(await replica.ask("INFO", "replication"))
            await mesh.idle(5)
    finally:
        servers.stop()
    for log in tmp_path.glob("*.log"):
        assert "horse" not in log.read_text(errors="replace"), log.name
