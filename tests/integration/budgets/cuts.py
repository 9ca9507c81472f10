"""Times at which requests end that exceed the runtime of their class, measured at the client.

`python -m tests.integration.budgets.cuts --runtime-s 30 --requests 64` prints the record of
docs/measurements/budgets.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.attach.v1 import attach_pb2
from kvmesh.config import MeshConfig, build
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.triton.client import TritonClient, opened
from kvmesh.triton.tensors import RequestTensors, payload_of
from tests.integration.generation import token_request
from tests.integration.harness import Mesh, running_mesh

STEP_S = 0.04
PREFILL_TOKEN_S = 0.0002
LOCAL_TOKENS = 64
"""Shorter prompts run on the decode replica alone."""
WRITER_KEY = "kvm_" + "w" * 43
"""The class of the tenant with a long runtime. Callers without a key have the ordinary class."""


def config_of(runtime_s: float, requests: int) -> MeshConfig:
    """Return a mesh for `requests` concurrent requests, with `runtime_s` as the runtime of the ordinary class."""
    output_tokens = max(256, round(4 * runtime_s / STEP_S))  # the default limit must fit
    return build(
        {
            "engine": {
                "arithmetic": "hashed",
                "kv_blocks": (requests + 8) * (output_tokens // 32 + 4),
                "prefill_kv_blocks": 1024,
                "max_sequence_tokens": output_tokens + 10_240,
                "step_s": STEP_S,
                "prefill_token_s": PREFILL_TOKEN_S,
            },
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "router": {"local_prefill_tokens_max": LOCAL_TOKENS},
            "frontend": {"anonymous_tenant": "web", "max_output_tokens_max": output_tokens},
            "classes": {
                "ordinary": {"runtime_max_s": runtime_s, "default_deadline_s": runtime_s},
                "long": {"runtime_max_s": 20 * runtime_s, "default_deadline_s": 20 * runtime_s},
            },
            "tenants": {"web": {"class": "ordinary"}, "writer": {"class": "long"}},
            "keys": {
                "writer": {"tenant": "writer", "sha256": sha256(WRITER_KEY.encode()).hexdigest()},
            },
        }
    )


@dataclass
class End:
    """The end of one stream. Times in seconds since the call, on the client's clock."""

    after_s: float
    tokens: int
    finish: pb.FinishReason.ValueType | None
    error: grpc.aio.AioRpcError | None
    last_token_s: float


@dataclass
class Cuts:
    """The ends of requests that all need longer than the runtime of their class."""

    runtime_s: float
    ends: list[End]
    back_s: float
    """From the last end until neither replica nor engine held any request."""
    answer_s: float
    """The longest response time of the frontend to another client around the cut: the delay that this machine adds."""

    def late_s(self, share: float) -> float:
        """Return the time after the runtime at which `share` of the streams had ended."""
        ordered = sorted(end.after_s - self.runtime_s for end in self.ends)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def row(self) -> str:
        """Return the row of the record."""
        ends = self.ends
        tokens = sorted(end.tokens for end in ends)
        return (
            f"| {self.runtime_s:g} s | {len(ends)} | {self.late_s(0) * 1000:.0f} ms | {self.late_s(0.5) * 1000:.0f} ms "
            f"| {self.late_s(0.95) * 1000:.0f} ms | {self.late_s(1) * 1000:.0f} ms "
            f"| {tokens[0]}..{tokens[-1]} | {self.back_s * 1000:.0f} ms "
            f"| {self.answer_s * 1000:.0f} ms |"
        )


async def cut(mesh: Mesh, runtime_s: float, count: int, seed: int) -> Cuts:
    """Send `count` requests that need four times `runtime_s`, half of them with a much later deadline."""
    rng = random.Random(seed)
    lengths = [rng.choice((LOCAL_TOKENS // 2, LOCAL_TOKENS + 16)) for _ in range(count)]
    prompts = [[rng.randrange(5, 4096) for _ in range(tokens)] for tokens in lengths]
    output_tokens = mesh.config.frontend.max_output_tokens_max
    seen_s: list[float] = []
    answers = asyncio.create_task(ask(mesh, runtime_s - 0.3, seen_s))
    ends = await asyncio.gather(
        *(
            run(mesh, prompt, output_tokens, 10 * runtime_s if at % 2 else None)
            for at, prompt in enumerate(prompts)
        )
    )
    back_s = await mesh.idle(10)
    answers.cancel()
    await asyncio.wait((answers,))
    return Cuts(runtime_s, list(ends), back_s, max(seen_s))


async def ask(mesh: Mesh, after_s: float, seen_s: list[float]) -> None:
    """Query the frontend's health every 20 ms, from `after_s` on; append the seconds of each response."""
    clock = asyncio.get_running_loop()
    stub: Any = health_pb2_grpc.HealthStub(mesh.channel("frontend-0"))
    await asyncio.sleep(after_s)
    while True:
        began_s = clock.time()
        await stub.Check(health_pb2.HealthCheckRequest())
        seen_s.append(clock.time() - began_s)
        await asyncio.sleep(0.02)


async def run(
    mesh: Mesh,
    prompt: Sequence[int],
    output_tokens: int,
    timeout_s: float | None,
    key: str = "",
    ttft_s: float = 0.0,
) -> End:
    """Send one request and read it to its end."""
    clock = asyncio.get_running_loop()
    request = token_request(prompt, max_output_tokens=output_tokens)
    if ttft_s:
        request.limits.ttft_timeout.FromNanoseconds(round(ttft_s * 1e9))
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    end = End(0.0, 0, None, None, 0.0)
    began_s = clock.time()
    call = mesh.client().Generate(request, timeout=timeout_s, metadata=metadata)
    try:
        async for message in call:
            match message.WhichOneof("event"):
                case "tokens":
                    end.tokens += len(message.tokens.ids)
                    end.last_token_s = clock.time() - began_s
                case "finished":
                    end.finish = message.finished.finish_reason
                    end.after_s = clock.time() - began_s
    except grpc.aio.AioRpcError as error:
        end.error = error
        end.after_s = clock.time() - began_s
    finally:
        call.cancel()
    return end


async def engine_counters(mesh: Mesh, engine: str) -> dict[str, Any]:
    """Return the engine's own counters since its start, without its resident memory, which changes without a request."""
    client = TritonClient(mesh.parts[engine].address)
    try:
        settings = mesh.config.engine
        facts = await client.facts(
            role="decode", model_version=settings.salt, block_tokens=settings.block_tokens
        )
        stream = client.stream(
            RequestTensors(facts.inputs).of_service(),
            request_id="load_report",
            parameters={"request_type": "load_report"},
        )
        async with opened(stream):
            async for response in stream:
                payload = payload_of(response, "load_report")
                if payload is not None:
                    counters = msgspec.json.decode(payload, type=dict[str, Any])
                    del counters["resident_bytes"]
                    return counters
    finally:
        await client.close()
    raise AssertionError(f"{engine} reported nothing")


async def refusal_of(mesh: Mesh, part: str, submit: attach_pb2.Submit) -> attach_pb2.Refusal:
    """Submit to a replica as a router does, and return the refusal."""
    from kvmesh.attach.v1 import attach_pb2_grpc

    stub: Any = attach_pb2_grpc.AttachServiceStub(mesh.channel(part))  # the stub's types are of the sync API
    hello = attach_pb2.Hello(process_id="test", boot_id="test", protocol_version=1)
    call = stub.Attach()
    try:
        await call.write(attach_pb2.AttachRequest(hello=hello, submits=[submit]))
        async for message in call:
            if message.refusals:
                return attach_pb2.Refusal.FromString(message.refusals[0].SerializeToString())
    finally:
        call.cancel()
    raise AssertionError(f"{part} said nothing")


async def _main(runtime_s: float, count: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running_mesh(config_of(runtime_s, count), Path(folder)) as mesh:
            await run(mesh, [9] * 50, 3, 10.0)
            await mesh.idle(5)
            cuts = await cut(mesh, runtime_s, count, seed)
    finishes = {pb.FinishReason.Name(end.finish) if end.finish else str(end.error) for end in cuts.ends}
    print(
        "| runtime | requests | first cut | p50 | p95 | last | tokens | all free after | slowest health check |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print(cuts.row())
    print(f"finish reasons: {sorted(finishes)}, seed={seed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime-s", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(_main(given.runtime_s, given.requests, given.seed))
