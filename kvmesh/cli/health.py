"""`kvmesh health`: asks one process whether it serves. A container's health check runs it every few seconds.

It therefore imports little: gRPC, and the configuration if one is given. `python -m kvmesh.cli.health` runs the same check
without the rest of the command line.
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
from kvmesh.roles import INTERNAL, ROLES, SERVERS, option_of

if TYPE_CHECKING:
    from kvmesh.config import MeshConfig

TIMEOUT_S: Final = 2.0
DEFAULT_CONFIG: Final = "kvmesh.toml"

ENGINE: Final = "engine"

ENGINE_MODEL: Final = "tensorrt_llm"
PROC: Final = Path("/proc")

_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse with status = SERVING, and ModelReadyResponse with ready = true: field 1 is 1."""

_NO_ANSWER: Final = " does not answer: "

_NAME_BYTES_MAX: Final = 127
"""A length up to this takes one byte on the wire."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The process to ask, and the protocol: grpc.health.v1 if `model` is empty, else Triton with that model."""

    address: str
    model: str = ""
    role: str = ""
    """Role of the service; required with `config`."""
    config: str = ""
    """Path of the kvmesh.toml, which may require TLS; empty: plain text."""
    is_operator: bool = False
    """True: asks with the operator's certificate if there is one. False: asks with the certificate of `role`."""


def probe_of(words: Sequence[str]) -> Probe | None:
    """Return the probe for the process with the command line `words`; None if the process is not part of a mesh."""
    role = next((word for word in words if word in (*SERVERS, ENGINE)), "")
    if role == ENGINE:
        port = option_of(words, "grpc-port") or ROLES[ENGINE].port
        return Probe(_dialable(f"{option_of(words, 'host')}:{port}"), ENGINE_MODEL)
    if role:
        address = _dialable(option_of(words, "listen") or f":{ROLES[role].port}")
        return Probe(address, role=role, config=option_of(words, "config"))
    return None


def health(probe: Probe, timeout_s: float = TIMEOUT_S) -> str:
    """Ask the process; return why it does not serve, or an empty text. Raises ConfigError for a wrong `config`."""
    try:
        answer, reason = asyncio.run(_answer(probe, timeout_s))
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no answer"
        return f"{probe.address}{_NO_ANSWER}{code}."
    if answer == _SERVING:
        return ""
    return f"{probe.address} answers, but does not serve now{': ' if reason else ''}{reason}."


async def _answer(probe: Probe, timeout_s: float) -> tuple[bytes, str]:
    """Return the answer, and the reason in its trailing metadata."""
    method, request = "/grpc.health.v1.Health/Check", b""
    if probe.model:
        name = probe.model.encode()
        method, request = "/inference.GRPCInferenceService/ModelReady", b"\x0a" + bytes([len(name)]) + name
    async with _channel(probe) as channel:
        # Raw bytes in both directions: importing the messages of both services would take longer than the call.
        call: Any = channel.unary_unary(method, None, None)
        asked = call(request, timeout=timeout_s)
        answer: bytes = await asked
        return answer, health_reason.reason_of(await asked.trailing_metadata())


async def _reason(probe: Probe) -> str:
    """Return the fault between the TLS of the process and the local TLS, or an empty text."""
    from kvmesh.config import MeshConfig, load
    from kvmesh.trust.diagnosis import explain
    from kvmesh.trust.peers import Trust

    config = load(probe.config) if probe.config else MeshConfig()
    if probe.role in INTERNAL and config.trust.certificate:
        return await Trust(config, _client_role(config, probe)).explain(probe.address, probe.role)
    if not await explain(probe.address, "", None):
        return ""
    if not probe.role:
        roles = f"{', '.join(SERVERS[:-1])} or {SERVERS[-1]}"
        return f"the server requires TLS; give --role {roles}, and --config with the certificates"
    if probe.role not in INTERNAL and config.frontend.certificate:
        return "its certificate is not the one of frontend.certificate, or it refuses the local certificate"
    return f"the server requires TLS, but this configuration has no TLS for a {probe.role}"


def _channel(probe: Probe) -> grpc.aio.Channel:
    # Only certificates matter here. Parsing a configuration without any would make the check slower for nothing.
    if probe.config and b"certificate" in Path(probe.config).read_bytes():
        from kvmesh.config import load

        config = load(probe.config)
        if config.trust.certificate or config.frontend.certificate:
            from kvmesh.cli.dial import Dial

            return Dial(config, _client_role(config, probe)).channel(probe.address, probe.role)
    return grpc.aio.insecure_channel(probe.address)


def _client_role(config: MeshConfig, probe: Probe) -> str:
    """Return the role of the certificate to show: the operator's, or the one of the probed process."""
    from kvmesh.config import ConfigError
    from kvmesh.trust.names import OPERATOR
    from kvmesh.trust.peers import Trust

    if not probe.is_operator:
        return probe.role
    try:
        Trust(config, OPERATOR)
    except ConfigError:  # a container has only the files of its own role
        return probe.role
    return OPERATOR


def _from_mesh_file(probe: Probe) -> Probe | None:
    """Return `probe` with role and configuration, if mesh.json of this folder has a process at its address."""
    from kvmesh.cli.mesh_file import NoMesh, read_meshes
    from kvmesh.config import MeshConfig, load

    config = load(DEFAULT_CONFIG) if Path(DEFAULT_CONFIG).exists() else MeshConfig()
    try:
        meshes = read_meshes(Path(config.mesh.data_dir).resolve())
    except NoMesh:
        return None
    for mesh in meshes.values():
        for member in mesh.processes:
            if member.address == probe.address and member.role in SERVERS:
                return replace(probe, role=member.role, config=mesh.config)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; print one sentence. Returns 0 if the process serves, 1 if not, 2 if the command line is wrong."""
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
        help=f"role of the service, required if the configuration has TLS: {', '.join(SERVERS)}",
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
            return _say(f"--process = {given.process} is not a process of a mesh.")
    elif not given.address:
        return _say("An ADDRESS or --process is needed.")
    elif not _is_address(given.address):
        return _say(
            f'ADDRESS = "{given.address}" is not HOST:PORT with a port of 1 to 65535 (IPv6: [::1]:7000).'
        )
    if given.role not in ("", *SERVERS):
        return _say(f'--role = "{given.role}" is unknown: allowed are {", ".join(SERVERS)}.')
    if len(given.model.encode()) > _NAME_BYTES_MAX:
        return _say(f"--model is too long: allowed are up to {_NAME_BYTES_MAX} bytes.")
    if given.config and not given.role:
        return _say(f"--config needs --role: {', '.join(SERVERS)}.")
    assert probe is not None
    try:
        fault = health(probe)
        if _NO_ANSWER in fault and not (given.process or given.role or given.model):
            known = _from_mesh_file(probe)  # a plain-text answer needs no role
            if known is not None:
                probe, fault = known, health(known)
        if _NO_ANSWER in fault and not given.process:  # a container's check stays cheap when it fails
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
