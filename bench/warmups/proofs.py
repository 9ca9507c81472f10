"""Waits until the control plane has proved all replicas. Golden prompts beside the load would lower the steady goodput."""

from __future__ import annotations

import time
from typing import Final

import grpc

from bench.results import BenchError
from kvmesh.control.v1 import warm_up_pb2, warm_up_pb2_grpc

PROOF_S_MAX: Final = 120.0
LOOK_S: Final = 0.5
CALL_S: Final = 5.0


def wait(control: str, replicas: int) -> None:
    """Return once `replicas` replicas are proved. Raises BenchError after PROOF_S_MAX.

    `control`: address of a control process.
    """
    end_s, told = time.monotonic() + PROOF_S_MAX, "no answer"
    with grpc.insecure_channel(control) as channel:
        stub = warm_up_pb2_grpc.WarmUpServiceStub(channel)
        while time.monotonic() < end_s:
            try:
                lives = stub.ListLives(warm_up_pb2.ListLivesRequest(), timeout=CALL_S).lives
            except grpc.RpcError as error:
                told = f"{error.code().name}: {error.details()}"
            else:
                proved = sum(each.proved for each in lives)
                if proved >= replicas:
                    return
                told = f"{proved} of {replicas} replicas are proved"
            time.sleep(LOOK_S)
    raise BenchError(f"{told} after {PROOF_S_MAX:g} s")
