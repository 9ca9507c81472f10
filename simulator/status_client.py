"""Requests the status of a running router, as the mesh's operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import grpc

from kvmesh.advertise import peer
from kvmesh.bad_option import BadOption
from kvmesh.config import MeshConfig, load
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.trust.names import OPERATOR
from kvmesh.trust.peers import Trust

CALL_S: Final = 5.0
DEFAULT_CONFIG: Final = Path("kvmesh.toml")
ROLE: Final = "router"


async def status_of(option: str, address: str, config: Path | None) -> pb.GetStatusResponse:
    """Return the status of the router at `address`.

    `config`: the configuration file of the mesh, for TLS; None: DEFAULT_CONFIG in the working folder, if it exists.
    Raises BadOption if there is no answer, ConfigError for an invalid address or configuration.
    """
    peer(address, option)
    if config is None and DEFAULT_CONFIG.exists():
        config = DEFAULT_CONFIG
    trust = Trust(MeshConfig() if config is None else load(config), OPERATOR)
    async with trust.channel(address, ROLE) as to_router:
        stub: Any = router_pb2_grpc.RouterServiceStub(to_router)
        try:
            status: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise BadOption(f'{option} = "{address}" is not a router.') from None
            reason = await trust.explain(address, ROLE) or error.code().name
            raise BadOption(f'{option} = "{address}" does not answer: {reason}.') from None
    return status
