"""`kvmesh health`: asks one process whether it serves; what a container's health check runs every few seconds.

So it imports little: gRPC and no more. `python -m kvmesh.cli.health` is the same without the rest of the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

import grpc

TIMEOUT_S: Final = 2.0

_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse with status = SERVING, and ModelReadyResponse with ready = true: field 1 is 1."""


def health(address: str, model: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Ask the process at `host:port`; return why it does not serve, or nothing if it does.

    `model` empty: a service, by grpc.health.v1. Else a Triton server: whether it has loaded that model.
    """
    method, request = "/grpc.health.v1.Health/Check", b""
    if model:
        name = model.encode()
        method, request = "/inference.GRPCInferenceService/ModelReady", b"\x0a" + bytes([len(name)]) + name
    with grpc.insecure_channel(address) as channel:
        try:
            answer = channel.unary_unary(method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "no answer"
            return f"{address} does not answer: {code}."
    return "" if answer == _SERVING else f"{address} answers, and does not serve now."


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the process serves, else 1 and one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="kvmesh health", description="Ask one process whether it serves.")
    parser.add_argument("address", help="host:port of a service's gRPC, or of a Triton server's with --model")
    parser.add_argument("--model", default="", help="name of the model that a Triton server must have loaded")
    options = parser.parse_args(arguments)
    fault = health(options.address, options.model)
    if fault:
        sys.stderr.write(f"{fault}\n")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
