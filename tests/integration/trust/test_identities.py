"""Authentication of callers over a real connection: by key, by certificate, or by the name from a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.call import GrpcCall
from kvmesh.config import MeshConfig, build
from kvmesh.errors import from_rpc_error
from kvmesh.server import MeshServer
from kvmesh.tenants.catalogue import Catalogue
from kvmesh.trust.edge import Edge
from kvmesh.trust.peers import Trust
from services.frontend.surface.identity import identify
from tests.both_transports import transport
from tests.certificates import Folder

__all__ = ["transport"]

KEY = "kvm_of-search"
CLIENTS = ("search.acme.example", "edge.acme.example", "stranger.example")
METHOD = "/test.Who/Ask"


def config_of(folder: Folder | None) -> MeshConfig:
    """Return tenants of all kinds; with a folder clients show certificates."""
    tls: dict[str, Any] = {}
    identities, gateways = [], []
    if folder is not None:
        files = {"certificate": folder.files("frontend").certificate, "key": folder.files("frontend").key}
        tls = {"frontend": {**files, "client_authority": str(folder.path / "authority.pem")}}
        tls["trust"] = folder.section()
        identities, gateways = [CLIENTS[0]], [CLIENTS[1]]
    tables = {
        "tenants": {
            "search": {"identities": identities},
            "edge": {"gateway_identities": gateways},
            "mail": {},
        },
        "keys": {"k": {"tenant": "search", "sha256": sha256(KEY.encode()).hexdigest()}},
    }
    return build({**tables, **tls})


@asynccontextmanager
async def asked(config: MeshConfig) -> AsyncIterator[str]:
    """A server that answers with the caller's tenant."""
    catalogue = Catalogue(config)

    async def ask(_: bytes, context: Any) -> bytes:
        return identify(GrpcCall(context), catalogue).tenant.name.encode()

    credentials = Edge(config, Trust(config, "frontend")).server_credentials()
    server = MeshServer("frontend", "frontend-0", [], credentials=credentials)
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(ask)}
    server.grpc.add_registered_method_handlers("test.Who", handlers)  # type: ignore[attr-defined]  # stubs lack it
    try:
        yield await server.listen("127.0.0.1:0")
    finally:
        await server.grpc.stop(0)


async def answer(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    """Return the tenant or the reason."""
    ask: Any = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
    try:
        found: bytes = await ask(b"", metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        assert KEY not in str(error)
        return from_rpc_error(error).reason
    return found.decode()


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ([], "CREDENTIALS_MISSING"),
        ([("authorization", f"Bearer {KEY}")], "search"),
        ([("authorization", f"bearer  {KEY} ")], "search"),
        ([("authorization", KEY)], "CREDENTIALS_UNKNOWN"),
        ([("authorization", f"Basic {KEY}")], "CREDENTIALS_UNKNOWN"),
        ([("authorization", "Bearer ")], "CREDENTIALS_UNKNOWN"),
        ([("authorization", f"Bearer {KEY}x")], "CREDENTIALS_UNKNOWN"),
        ([("authorization", f"Bearer {KEY}"), ("kvmesh-tenant", "search")], "search"),
        ([("authorization", f"Bearer {KEY}"), ("kvmesh-tenant", "mail")], "TENANT_UNKNOWN"),
        ([("kvmesh-tenant", "mail")], "CREDENTIALS_MISSING"),
    ],
)
async def test_keys_on_a_plain_connection(metadata: list[tuple[str, str]], wanted: str) -> None:
    """The scheme is case-insensitive; any value that is not exactly a key of the mesh is unknown."""
    async with asked(config_of(None)) as address, grpc.aio.insecure_channel(address) as channel:
        assert await answer(channel, *metadata) == wanted


async def test_certificates_name_tenants_and_gateways(tmp_path: Path) -> None:
    """A verified name stands for its tenant, a gateway's certificate for the tenant that it names; a key takes
    precedence over both.
    """
    folder = Folder(tmp_path / "certificates", roles=["frontend"])
    for name in CLIENTS:
        folder.sign(name)
    named, bearer = ("kvmesh-tenant", "mail"), ("authorization", f"Bearer {KEY}")
    wanted = {
        CLIENTS[0]: ("search", "TENANT_UNKNOWN", "search"),
        CLIENTS[1]: ("edge", "mail", "search"),
        CLIENTS[2]: ("CREDENTIALS_UNKNOWN", "CREDENTIALS_UNKNOWN", "search"),
    }
    async with asked(config_of(folder)) as address:
        for name, answers in wanted.items():
            files = folder.files(name)
            credentials = grpc.ssl_channel_credentials(
                *(Path(path).read_bytes() for path in (files.authority, files.key, files.certificate))
            )
            options = [("grpc.ssl_target_name_override", "frontend.kvmesh.internal")]
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                got = (await answer(channel), await answer(channel, named), await answer(channel, bearer))
            assert got == answers, name


def test_the_common_name_counts_only_without_alternative_names() -> None:
    """RFC 6125, 6.4.4: otherwise a certificate would stand for a name that its authority did not verify."""

    class Context:
        def __init__(self, **properties: list[bytes]) -> None:
            self.properties = properties

        def auth_context(self) -> dict[str, list[bytes]]:
            return self.properties

    def identities(**properties: list[bytes]) -> list[str]:
        return list(GrpcCall(Context(**properties)).identities)  # type: ignore[arg-type]  # what it looks at

    assert identities() == []
    assert identities(x509_common_name=[b"a"]) == ["a"]
    assert identities(x509_common_name=[b"a"], x509_subject_alternative_name=[b"b", b"c"]) == ["b", "c"]
