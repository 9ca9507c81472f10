"""Receivers and control processes under mutual TLS: only a certificate of the role `control` is accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.clock import MonotonicClock
from kvmesh.redis_link import RedisLink
from kvmesh.server import MeshServer
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.published import Term, publish
from kvmesh.snapshot.receiver import Receiver
from kvmesh.tasks import end
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust
from tests.certificates import Folder
from tests.integration.snapshot.control_server import ControlServer, until
from tests.integration.trust.ends import config_of
from tests.one_redis import ONE_REDIS
from tests.unit.snapshot.test_content import STABLE

pytestmark = ONE_REDIS

ONE = publish(Term(1, "control-0"), 1, Content((STABLE,)))


@pytest.mark.parametrize("role", ["control", "router"])
async def test_a_receiver_accepts_only_the_role_control(
    tmp_path: Path, redis_url: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process with the certificate of another role cannot pose as a leader, whatever Redis says."""
    config = config_of(Folder(tmp_path / "certificates"))
    link = RedisLink(redis_url)
    control = ControlServer("control-0", link, "kvmesh")
    control.publish(ONE)
    trust = Trust(config, role)
    server = MeshServer(role, "x", (), credentials=trust.server_credentials(), guards=trust.guards())
    await control.start(on=server)
    receiver = Receiver(
        link,
        "kvmesh",
        Identity("router-0", "b", "router"),
        Fence(),
        ControlDialer(Trust(config, "router"), MonotonicClock(), Networks()),
        state_dir=None,
        on_change=lambda _: None,
        clock=MonotonicClock(),
    )
    task = asyncio.create_task(receiver.run())
    try:
        if role == "control":
            await until(lambda: receiver.current == ONE, "the snapshot")
        else:
            await until(lambda: "no stream to the control process" in caplog.text, "the refusal")
            assert receiver.current is None and control.call_count == 0
    finally:
        await end([task])
        await control.stop()
        await link.close()
