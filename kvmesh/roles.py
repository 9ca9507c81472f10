"""The roles of a mesh: program, ports, options and stop time of each. Pure. It imports no other module of kvmesh.

`kvmesh up`, `kvmesh health`, the measurements and the tests in containers build their commands from this table.
tests/unit/cli/test_roles.py compares deploy/images and deploy/compose with it, tools/manifests deploy/kubernetes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONFIG_PATH: Final = "/etc/kvmesh/kvmesh.toml"
"""Path of the configuration in a container."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A question of an orchestrator to a process: gRPC health, or a page over HTTP that answers 200 or not."""

    port: str
    """Kind of the port, as in `Role.ports`."""
    path: str = ""
    """Path of the page; empty: grpc.health.v1 of the process."""


GRPC_HEALTH: Final = Probe("grpc")
READY: Final = Probe("metrics", "/readyz")
"""Readiness of every server. A held replica, or a process that no peer can know yet, is SERVING by gRPC health."""

ALIVE: Final = Probe("metrics", "/healthz")
"""Liveness of every server: its event loop turns."""


@dataclass(frozen=True, slots=True)
class Role:
    """One role. Its ports are those of a container. `kvmesh up` uses free ports."""

    name: str
    module: str
    """Started as `python -m MODULE`. Empty: not a Python module."""
    ports: Mapping[str, int]
    """Ports by kind. Peers dial the first one."""
    needs: tuple[str, ...]
    """Roles that must be ready before this one starts."""
    stop_s: int
    """Longest graceful shutdown after SIGTERM, in seconds. A supervisor must not kill earlier."""
    ready: Probe | None = None
    """Question for readiness in plain text. READY is as good, and the only one under TLS. None: not a server of kvmesh."""
    pre_stop_s: int = 0
    """Seconds to serve on between the removal of the address from balancers and SIGTERM. 0: no balancer has it."""

    @property
    def port(self) -> int:
        """The port that peers dial."""
        return next(iter(self.ports.values()))


SERVICE_PORTS: Final = {"grpc": 7000, "metrics": 9100}
"""Ports of every service (see `Role.ports`)."""

FRONTEND_PORTS: Final = {**SERVICE_PORTS, "http": 8080}
"""Ports of a frontend: `http` is that of the OpenAI API."""

SERVICES: Final = ("frontend", "router", "prefill", "decode")
"""Roles that register in the mesh."""

CONTROL: Final = "control"
"""Role of the control plane. Its processes register in a key of their own (`controlplane.store`)."""

XDS: Final = "xds"
"""Role that serves the frontends' addresses to stock gRPC clients and Envoy. It registers nowhere, and no mesh needs it."""

SERVERS: Final = (*SERVICES, CONTROL, XDS)
"""Roles with a gRPC server of kvmesh."""

RECEIVERS: Final = (*SERVICES, XDS)
"""Roles that receive snapshots of the control plane."""

EDGE: Final = ("frontend", XDS)
"""Roles with clients outside the mesh. Their servers have the certificate in `frontend.certificate`, if there is one."""

INTERNAL: Final = tuple(role for role in SERVERS if role not in EDGE)
"""Roles with callers of the mesh alone. Their servers have the certificates in [trust]."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of engine that kvmesh can start: tritonserver with a model of its own."""

    module: str
    """Started as `python -m MODULE`."""
    ports: tuple[str, ...]
    """Kinds of its ports: `grpc`, which replicas dial, and the others of tritonserver and of the engine."""
    repository: str = ""
    """Module that writes a model repository for a tritonserver on a GPU host. Empty: there is none."""


REFERENCE: Final = "reference"
TENSORRT_LLM: Final = "tensorrt_llm"
EXTERNAL: Final = "external"
"""Engine kind of engines that run already: kvmesh dials them, and starts none."""

ENGINE_KINDS: Final[Mapping[str, EngineKind]] = {
    REFERENCE: EngineKind("engines.reference.serve", ("grpc", "http", "metrics", "kv")),
    TENSORRT_LLM: EngineKind(
        "engines.tensorrt_llm.serve", ("grpc", "http", "metrics"), "engines.tensorrt_llm.repository"
    ),
}
"""Kinds of engines, the values of `engine.kind` beside `external`."""

BALANCER_S: Final = 5
"""Seconds in which balancers and names forget an address (`Role.pre_stop_s`)."""

ROLES: Final[Mapping[str, Role]] = {
    role.name: role
    for role in (
        Role("redis", "", {"redis": 6379}, (), 10),
        Role(
            "engine",
            ENGINE_KINDS[REFERENCE].module,
            {"grpc": 9001, "http": 9000, "metrics": 9002, "kv": 9003},
            (),
            15,
        ),
        Role(CONTROL, "controlplane", SERVICE_PORTS, ("redis",), 10, GRPC_HEALTH),
        Role(XDS, "controlplane.xds", SERVICE_PORTS, ("redis",), 10, GRPC_HEALTH, BALANCER_S),
        Role("prefill", "services.prefill", SERVICE_PORTS, ("redis", "engine"), 35, READY),
        Role("decode", "services.decode", SERVICE_PORTS, ("redis", "engine"), 35, READY),
        Role("router", "services.router", SERVICE_PORTS, ("redis",), 35, READY),
        Role(
            "frontend",
            "services.frontend",
            FRONTEND_PORTS,
            ("redis", "router", "prefill", "decode"),
            35,
            GRPC_HEALTH,
            BALANCER_S,
        ),
    )
}
"""Roles in the order of their start."""


def grace_s(role: str, *, pre_stop_s: int | None = None, with_engine: bool = False) -> int:
    """Return the shortest time between the end of a pod's service and SIGKILL: it serves on, drains, and ends its engine.

    `pre_stop_s`: seconds to serve on; None: those of the table. `with_engine`: the engine is in the pod, and ends last.
    """
    found = ROLES[role]
    serving_on_s = found.pre_stop_s if pre_stop_s is None else pre_stop_s
    return serving_on_s + found.stop_s + (ROLES["engine"].stop_s if with_engine else 0)


def service_command(role: str, name: str, *, config: str, listen: str, more: tuple[str, ...]) -> list[str]:
    """Return the command of one of SERVERS. `listen`: "host:port". `more`: options beside those of all services."""
    options = ("--config", config, "--id", name, "--listen", listen)
    return [sys.executable, "-m", ROLES[role].module, *options, *more]


def engine_command(kind: str, host: str, ports: Mapping[str, int], *, more: tuple[str, ...]) -> list[str]:
    """Return the command of an engine of `kind`. `ports`: by kind, as in ENGINE_KINDS. `more`: its other options."""
    options = [part for name, port in ports.items() for part in (f"--{name}-port", str(port))]
    return [sys.executable, "-m", ENGINE_KINDS[kind].module, "--host", host, *more, *options]


def option_of(words: Sequence[str], name: str) -> str:
    """Return the last value of `--name` in a command, as argparse reads it. Empty: the option is missing."""
    found = ""
    for at, word in enumerate(words):
        if word == f"--{name}" and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found
