"""The steady rate is measured once all replicas are proved: golden prompts beside the load would lower it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from bench.results import BenchError
from bench.warmups import proofs
from kvmesh.control.v1 import warm_up_pb2 as pb
from kvmesh.control.v1 import warm_up_pb2_grpc


class Control(warm_up_pb2_grpc.WarmUpServiceServicer):
    """Has no leader at first. Then one more replica is proved in each answer, up to `most`."""

    def __init__(self) -> None:
        self.most = 3
        self.answers = 0

    def ListLives(self, request: pb.ListLivesRequest, context: grpc.ServicerContext) -> pb.ListLivesResponse:
        self.answers += 1
        if self.answers == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no leader")
        proved = min(self.answers - 2, self.most)
        return pb.ListLivesResponse(lives=[pb.Life(proved=at < proved) for at in range(3)])


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Control, str]]:
    monkeypatch.setattr(proofs, "LOOK_S", 0.01)
    service, server = Control(), grpc.server(ThreadPoolExecutor(1))  # type: ignore[abstract]
    warm_up_pb2_grpc.add_WarmUpServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_the_bench_waits_for_every_proof(control: tuple[Control, str]) -> None:
    service, address = control
    proofs.wait(address, 3)
    assert service.answers == 5  # no leader, then 0, 1, 2 and 3 proofs


def test_a_proof_that_does_not_come_ends_the_run(
    control: tuple[Control, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, address = control
    service.most = 2
    monkeypatch.setattr(proofs, "PROOF_S_MAX", 0.5)
    with pytest.raises(BenchError, match=r"2 of 3 replicas are proved after 0\.5 s"):
        proofs.wait(address, 3)
