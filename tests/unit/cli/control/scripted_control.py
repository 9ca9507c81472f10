"""A control process that answers as a test says: a real gRPC server, so that the commands run as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any, NamedTuple, TypeAlias

import grpc
import pytest
from redis import Redis

from kvmesh import error_details
from kvmesh.cli.main import main
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc as stubs
from kvmesh.errors import DETAILS_KEY
from kvmesh.redis_url import VARIABLE

MESH = "kvmesh"


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


class Status(_Status, grpc.Status):  # type: ignore[misc]  # the stub has no bytes among trailers
    """A status with details."""


@dataclass(frozen=True)
class Refusal:
    """An answer that refuses."""

    code: grpc.StatusCode
    message: str
    reason: str = "REFUSED"
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()

    def status(self) -> grpc.Status:
        """Return the refusal with its google.rpc details."""
        details = error_details.status(
            *(self.code.value[0], self.message, self.reason, "kvmesh", self.metadata, None, self.violations)
        )
        return Status(self.code, self.message, ((DETAILS_KEY, details),))


def redirect(address: str) -> Refusal:
    """Return the answer of a follower."""
    code = grpc.StatusCode.FAILED_PRECONDITION
    return Refusal(code, "this process does not lead", "NOT_LEADER", {"leader_address": address})


Answer: TypeAlias = Any
"""A message, a Refusal, or a function of the request that returns one of them."""


class ScriptedControl(stubs.ControlPlaneServiceServicer):
    """Answers each method with the next of its answers, the last one for ever."""

    def __init__(self, **answers: Answer | list[Answer]) -> None:
        self.script(**answers)
        self.requests: list[Any] = []

    def script(self, **answers: Answer | list[Answer]) -> None:
        """Replace the answers."""
        self._answers = {
            name: list(found) if isinstance(found, list) else [found] for name, found in answers.items()
        }

    def answer(self, method: str, request: Any, context: Any) -> Any:
        """Return the next answer of a method, or abort."""
        self.requests.append(request)
        answers = self._answers.get(method, [])
        if not answers:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not scripted")
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isfunction(found):
            found = found(request)
        if isinstance(found, Refusal):
            context.abort_with_status(found.status())
        return found

    def CordonReplica(self, request: Any, context: Any) -> Any:
        return self.answer("CordonReplica", request, context)

    def UncordonReplica(self, request: Any, context: Any) -> Any:
        return self.answer("UncordonReplica", request, context)

    def StartRollout(self, request: Any, context: Any) -> Any:
        return self.answer("StartRollout", request, context)

    def GetRollout(self, request: Any, context: Any) -> Any:
        return self.answer("GetRollout", request, context)

    def ListRollouts(self, request: Any, context: Any) -> Any:
        return self.answer("ListRollouts", request, context)

    def ChangeRollout(self, request: Any, context: Any) -> Any:
        return self.answer("ChangeRollout", request, context)

    def GetSnapshot(self, request: Any, context: Any) -> Any:
        return self.answer("GetSnapshot", request, context)

    def ListSnapshots(self, request: Any, context: Any) -> Any:
        return self.answer("ListSnapshots", request, context)

    def RevertSnapshot(self, request: Any, context: Any) -> Any:
        return self.answer("RevertSnapshot", request, context)

    def ListReceivers(self, request: Any, context: Any) -> Any:
        return self.answer("ListReceivers", request, context)

    def Freeze(self, request: Any, context: Any) -> Any:
        return self.answer("Freeze", request, context)

    def GetControlPlane(self, request: Any, context: Any) -> Any:
        return self.answer("GetControlPlane", request, context)

    def WatchRollout(self, request: Any, context: Any) -> Iterator[Any]:
        """Send the rollouts of the next answer; a Refusal among them ends the stream."""
        for found in self.answer("WatchRollout", request, context):
            if isinstance(found, Refusal):
                context.abort_with_status(found.status())
            yield pb.WatchRolloutResponse(rollout=found)


@contextmanager
def served(
    *controls: ScriptedControl, credentials: grpc.ServerCredentials | None = None
) -> Iterator[list[str]]:
    """Serve each control process at an address of its own; yield the addresses. `credentials` None: plain text."""
    servers, addresses = [], []
    for control in controls:
        server = grpc.server(ThreadPoolExecutor(max_workers=8))
        stubs.add_ControlPlaneServiceServicer_to_server(control, server)
        free = "127.0.0.1:0"
        port = server.add_secure_port(free, credentials) if credentials else server.add_insecure_port(free)
        addresses.append(f"127.0.0.1:{port}")
        server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            server.stop(0).wait()


def register(url: str, *addresses: str, leader: str = "", is_old: bool = False) -> None:
    """Write the leases of control processes, as they do. `is_old`: they were renewed long ago."""
    client = Redis.from_url(url)
    seconds, _ = client.time()
    # In the future, so that a slow test does not outlive the lease.
    at_ms = (int(seconds) + (-60 if is_old else 60)) * 1000
    for number, address in enumerate(addresses):
        name = f"control-{number}"
        lease = {"process_id": name, "boot_id": "b", "address": address, "version": "1", "at_ms": at_ms}
        client.hset(f"{MESH}:control:procs", name, json.dumps(lease))
    if leader:
        held = {"process_id": "control-x", "boot_id": "b", "address": leader, "term": 7}
        client.set(f"{MESH}:control:leader", json.dumps(held), px=60_000)
    client.close()


class Shell:
    """Runs `kvmesh` in this process, as a user does."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self._capsys = capsys
        monkeypatch.setenv(VARIABLE, url)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TZ", "UTC")

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown = self._capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    def json(self, *words: str) -> Any:
        """Return the JSON that a command prints."""
        return json.loads(self.run(*words, "--json")[1])
