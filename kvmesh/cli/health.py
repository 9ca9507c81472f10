"""`kvmesh health`: asks one process whether it serves; what a container's health check runs every few seconds.

So it imports little: gRPC, and the configuration where there is one. `python -m kvmesh.cli.health` is the same without the
rest of the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvmesh import health_reason
from kvmesh.roles import ROLES, SERVICES, option_of

if TYPE_CHECKING:
    from kvmesh.config import MeshConfig

TIMEOUT_S: Final = 2.0
DEFAULT_CONFIG: Final = "kvmesh.toml"

INTERNAL_ROLES: Final = tuple(role for role in SERVICES if role != "frontend")
ENGINE: Final = "engine"

ENGINE_MODEL: Final = "tensorrt_llm"
PROC: Final = Path("/proc")

_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse with status = SERVING, and ModelReadyResponse with ready = true: field 1 is 1."""

_NO_ANSWER: Final = " does not answer: "

_NAME_BYTES_MAX: Final = 127
"""Up to here a length is one byte on the wire."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whom to ask, and how. An empty `model`: a service, by grpc.health.v1; else a Triton server with that model."""

    address: str
    model: str = ""
    role: str = ""
    """Of the service; needed with `config`."""
    config: str = ""
    """Path of the kvmesh.toml that may ask for TLS; empty: plain."""
    is_operator: bool = False
    """True for who asks as the mesh's operator, where there is a certificate for that, and not as the process itself."""


def probe_of(words: Sequence[str]) -> Probe | None:
    """Return how to ask the process that was started by the command line `words`; None if it is none of ours."""
    role = next((word for word in words if word in (*SERVICES, ENGINE)), "")
    if role == ENGINE:
        port = option_of(words, "grpc-port") or ROLES[ENGINE].port
        return Probe(_dialable(f"{option_of(words, 'host')}:{port}"), ENGINE_MODEL)
    if role:
        address = _dialable(option_of(words, "listen") or f":{ROLES[role].port}")
        return Probe(address, role=role, config=option_of(words, "config"))
    return None


def health(probe: Probe, timeout_s: float = TIMEOUT_S) -> str:
    """Ask; return why the process does not serve, or nothing if it does. Raises ConfigError for a wrong `config`."""
    try:
        answer, reason = asyncio.run(_answer(probe, timeout_s))
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no answer"
        return f"{probe.address}{_NO_ANSWER}{code}."
    if answer == _SERVING:
        return ""
    return f"{probe.address} answers, and does not serve now{': ' if reason else ''}{reason}."


async def _answer(probe: Probe, timeout_s: float) -> tuple[bytes, str]:
    """Return the answer and the reason that comes with it."""
    method, request = "/grpc.health.v1.Health/Check", b""
    if probe.model:
        name = probe.model.encode()
        method, request = "/inference.GRPCInferenceService/ModelReady", b"\x0a" + bytes([len(name)]) + name
    async with _channel(probe) as channel:
        # Bytes in and out: the messages of both services would cost more to import than the call takes.
        call: Any = channel.unary_unary(method, None, None)
        asked = call(request, timeout=timeout_s)
        answer: bytes = await asked
        return answer, health_reason.reason_of(await asked.trailing_metadata())


async def _reason(probe: Probe) -> str:
    """Return what is wrong between the TLS there and ours, or an empty text."""
    from kvmesh.config import MeshConfig, load
    from kvmesh.trust.diagnosis import explain
    from kvmesh.trust.peers import Trust

    config = load(probe.config) if probe.config else MeshConfig()
    if probe.role in INTERNAL_ROLES and config.trust.certificate:
        return await Trust(config, _client_role(config, probe)).explain(probe.address, probe.role)
    if not await explain(probe.address, "", None):
        return ""
    if not probe.role:
        roles = f"{', '.join(SERVICES[:-1])} or {SERVICES[-1]}"
        return f"TLS is spoken there; say --role {roles}, and --config where the certificates are named"
    if probe.role not in INTERNAL_ROLES and config.frontend.certificate:
        return "its certificate is not the frontend's of this configuration, or it does not take ours"
    return f"TLS is spoken there, and by this configuration a {probe.role} speaks none"


def _channel(probe: Probe) -> grpc.aio.Channel:
    # Without certificates the configuration says nothing that matters here, and costs as much again to read.
    if probe.config and b"certificate" in Path(probe.config).read_bytes():
        from kvmesh.config import load

        config = load(probe.config)
        if config.trust.certificate or config.frontend.certificate:
            from kvmesh.cli.dial import Dial

            return Dial(config, _client_role(config, probe)).channel(probe.address, probe.role)
    return grpc.aio.insecure_channel(probe.address)


def _client_role(config: MeshConfig, probe: Probe) -> str:
    """Return as which role to ask."""
    from kvmesh.config import ConfigError
    from kvmesh.trust.names import OPERATOR
    from kvmesh.trust.peers import Trust

    if not probe.is_operator:
        return probe.role
    try:
        Trust(config, OPERATOR)
    except ConfigError:  # inside a container there are the files of its own role alone
        return probe.role
    return OPERATOR


def _from_mesh_file(probe: Probe) -> Probe | None:
    """Return the same with role and configuration, if the mesh that runs in this folder has that process."""
    from kvmesh.cli.mesh_file import NoMesh, read_mesh
    from kvmesh.config import MeshConfig, load

    config = load(DEFAULT_CONFIG) if Path(DEFAULT_CONFIG).exists() else MeshConfig()
    try:
        mesh = read_mesh(Path(config.mesh.data_dir).resolve())
    except NoMesh:
        return None
    for member in mesh.processes:
        if member.address == probe.address and member.role in SERVICES:
            return replace(probe, role=member.role, config=mesh.config)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 and one sentence on stdout if the process serves, else 1 and one on stderr; 2 if the question is wrong."""
    parser = argparse.ArgumentParser(prog="kvmesh health", description="Ask one process whether it serves.")
    add = parser.add_argument
    add(
        "address",
        nargs="?",
        default="",
        help="host:port of a service's gRPC, or of a Triton server's with --model",
    )
    add("--model", default="", help="name of the model that a Triton server must have loaded")
    add(
        "--role",
        default="",
        metavar="ROLE",
        help=f"of the service, where the configuration asks for TLS: {', '.join(SERVICES)}",
    )
    add("--config", default="", help=f"the mesh's kvmesh.toml, read with --role; default: ./{DEFAULT_CONFIG}")
    add(
        "--process",
        type=int,
        default=0,
        help="ask this process, found by its command line, in place of an address",
    )
    given = parser.parse_args(arguments)
    config = given.config or (DEFAULT_CONFIG if given.role and Path(DEFAULT_CONFIG).exists() else "")
    probe: Probe | None = Probe(given.address, given.model, given.role, config, is_operator=True)
    if given.process:
        probe = probe_of(_command_line(given.process))
        if probe is None:
            return _say(f"--process = {given.process} is no process of a mesh.")
    elif not given.address:
        return _say("An ADDRESS or --process is needed.")
    elif not _is_address(given.address):
        return _say(
            f'ADDRESS = "{given.address}" is not HOST:PORT with a port of 1 to 65535 (IPv6: [::1]:7000).'
        )
    if given.role not in ("", *SERVICES):
        return _say(f'--role = "{given.role}" is no role: {", ".join(SERVICES)} are allowed.')
    if len(given.model.encode()) > _NAME_BYTES_MAX:
        return _say(f"--model is longer than {_NAME_BYTES_MAX} bytes.")
    if given.config and not given.role:
        return _say(f"--config needs --role: {', '.join(SERVICES)}.")
    assert probe is not None
    try:
        fault = health(probe)
        if _NO_ANSWER in fault and not (given.process or given.role or given.model):
            known = _from_mesh_file(probe)  # a plain answer needed none of that
            if known is not None:
                probe, fault = known, health(known)
        if _NO_ANSWER in fault and not given.process:  # a container's check stays cheap, also where it fails
            reason = asyncio.run(_reason(probe))
            fault = f"{probe.address}{_NO_ANSWER}{reason}." if reason else fault
    except (OSError, ValueError) as error:  # ConfigError is a ValueError
        return _say(str(error))
    if fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    sys.stdout.write(f"{probe.address} serves.\n")
    return 0


def _command_line(process: int) -> list[str]:
    try:
        text = (PROC / str(process) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    is_host = bool(host) and (":" not in host or (host.startswith("[") and host.endswith("]")))
    return is_host and port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535


def _dialable(address: str) -> str:
    """Return `address` with the loopback in place of a wildcard."""
    host, _, port = address.rpartition(":")
    if host == "[::]":
        return f"[::1]:{port}"
    return f"127.0.0.1:{port}" if host in ("", "*", "0.0.0.0") else address


def _say(sentence: str) -> int:
    sys.stderr.write(f"{sentence}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
