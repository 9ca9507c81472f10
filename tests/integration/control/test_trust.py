"""Rights at the control plane, with real certificates over TLS and without any certificate."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane import core
from controlplane.main import ControlProcess
from kvmesh.config import MeshConfig, build
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc
from kvmesh.errors import ErrorDetails, from_rpc_error
from kvmesh.roles import RECEIVERS
from kvmesh.trust.names import CERTIFICATE_ROLES
from kvmesh.trust.peers import Trust
from tests.certificates import Folder
from tests.integration.control.control_process import (
    POOLS,
    control,
    hello,
    leading,
    operator,
    snapshot_of,
    until,
    watching,
)


@pytest.fixture(autouse=True)
def quick_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receiver is waited for."""
    monkeypatch.setattr(core, "TAKEOVER_S", 0.1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MeshConfig:
    """A mesh with certificates for each role."""
    return build({**POOLS, "trust": Folder(tmp_path_factory.mktemp("certs")).section()})


@asynccontextmanager
async def called_by(one: ControlProcess, config: MeshConfig, role: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with the certificate of `role`."""
    async with Trust(config, role).channel(one.server.address, "control") as channel:
        yield channel


async def fault_of(call: Any) -> ErrorDetails | None:
    """Return the refusal of a call; None: it was answered."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def refused_watch(channel: grpc.aio.Channel, role: str) -> str:
    """Return the reason of the refusal of a receiver's stream.

    A refusal that comes before the hello is written may lose its details in gRPC, so it is tried again.
    """
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with watching("", hello("x-0", role), channel) as call:
                await call.read()
        if reason := from_rpc_error(error.value).reason:
            return reason
    return ""


@pytest.mark.parametrize("role", CERTIFICATE_ROLES)
async def test_a_certificate_gives_the_rights_of_its_role(url: str, config: MeshConfig, role: str) -> None:
    """Every role reads, operators and control processes change, receivers watch as what they are."""
    async with leading(url, config=config) as one, called_by(one, config, role) as channel:
        stub: Any = control_pb2_grpc.ControlPlaneServiceStub(channel)
        assert await fault_of(stub.GetControlPlane(pb.GetControlPlaneRequest())) is None
        fault = await fault_of(stub.Freeze(pb.FreezeRequest()))
        is_writer = role in ("operator", "control")
        assert (fault is None) == is_writer
        if fault is not None:
            assert (fault.code, fault.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PEER_REFUSED")
            assert "operator.kvmesh.internal" in fault.message
        for claimed in RECEIVERS:
            if claimed == role:
                async with watching("", hello("x-0", claimed), channel) as call:
                    await snapshot_of(call)
                continue
            assert await refused_watch(channel, claimed) == "PEER_REFUSED"


async def test_the_audit_has_the_name_in_the_certificate(url: str, config: MeshConfig) -> None:
    """And the address of the caller."""
    async with leading(url, config=config) as one, called_by(one, config, "operator") as channel:
        stub: Any = control_pb2_grpc.ControlPlaneServiceStub(channel)
        await stub.Freeze(pb.FreezeRequest())

        async def is_audited() -> bool:
            rows = await one.redis.execute("XRANGE", "kvmesh:control:events", "-", "+")
            found = [dict(row[1]) for row in rows]
            return any(
                each[b"by"] == b"operator.kvmesh.internal" and each[b"source"].startswith(b"ipv4:127.0.0.1:")
                for each in found
                if each[b"what"] == b"mesh.unfreeze"
            )

        await until(is_audited, "the audit has the command")


async def test_another_mesh_and_plain_text_reach_nothing(
    url: str, config: MeshConfig, tmp_path: Path
) -> None:
    """One authority may serve several meshes."""
    other = Folder(tmp_path, mesh="other", roles=("operator",))
    foreign = build({"mesh": {"name": "other"}, "trust": other.section()})
    async with leading(url, config=config) as one:
        async with called_by(one, foreign, "operator") as channel:
            stub: Any = control_pb2_grpc.ControlPlaneServiceStub(channel)
            fault = await fault_of(stub.GetControlPlane(pb.GetControlPlaneRequest(), timeout=20))
            assert fault is not None and fault.code is grpc.StatusCode.UNAVAILABLE
        async with operator(one.server.address) as plain:
            fault = await fault_of(plain.GetControlPlane(pb.GetControlPlaneRequest(), timeout=20))
            assert fault is not None and fault.code is grpc.StatusCode.UNAVAILABLE


def own_address() -> str:
    """Return an address of this host that is no loopback address; empty: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


async def test_without_certificates_changes_come_from_this_host(url: str) -> None:
    """From its loopback and from its own address, which is the one in the lease. test_compose has a caller elsewhere."""
    host = own_address()
    if not host or host.startswith("127."):
        pytest.skip("NOT TESTED: this host has no address beside the loopback")
    async with control(url, listen="0.0.0.0:0") as one:
        port = one.server.address.rpartition(":")[2]
        await until(lambda: one.core.publisher.published is not None, "a snapshot is published")
        async with operator(f"127.0.0.1:{port}") as near:
            assert await fault_of(near.Freeze(pb.FreezeRequest())) is None
        async with operator(f"{host}:{port}") as own:
            assert await fault_of(own.GetControlPlane(pb.GetControlPlaneRequest())) is None
            assert await fault_of(own.Freeze(pb.FreezeRequest())) is None
        async with watching(f"{host}:{port}", hello()) as call:
            await snapshot_of(call)
