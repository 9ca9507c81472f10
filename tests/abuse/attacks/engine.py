"""An extra decode replica with a lying engine: a proxy before a correct engine that corrupts its responses."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from kvmesh import errors
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.ports import free_ports
from kvmesh.triton import step_frames
from tests.abuse import bystanders
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.attacks import engine_frames
from tests.abuse.attacks.engine_frames import FrameLie
from tests.abuse.target import FRONT, Target, bearer
from tests.chaos.clients import request_of
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import generate
from tests.integration.harness import Part, beside, until

HONEST: Final = "decode-1"
LIAR: Final = "decode-2"
STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
AT_ONCE: Final = 10
FIRST_NUMBER: Final = 1_000_000
"""First call number of this attack, above the numbers of the legitimate clients."""

HONEST_TOKENS: Final = 2
"""Correct responses before a stream is corrupted in its middle."""

READMITTED_S_MAX: Final = 15.0

BOOT: Final = re.compile(rb'"boot_id": ?"([0-9a-f]{16})"')
LIARS_BOOT: Final = b"00000000deadbeef"
"""Boot that the lying engine names as its own: a replica refuses an engine whose boot another replica has."""

DEADLINE_S: Final = 40.0
"""Longer than the failure detectors need for a silent engine."""


def vocabulary(ids: list[int]) -> list[int]:
    """Return ids outside every vocabulary."""
    return [one + 1_000_000 for one in ids]


def negative(ids: list[int]) -> list[int]:
    """Return ids below zero."""
    return [-1 - one for one in ids]


def many(ids: list[int]) -> list[int]:
    """Return far more tokens than any request may have."""
    return ids * 5_000


Spoil = Callable[[Any, int], AsyncIterator[Any]]
"""Yields the messages that replace response number n of a call."""


def with_ids(change: Callable[[list[int]], list[int]]) -> Spoil:
    """Return a corruption that changes the tokens with `change`."""

    async def spoil(response: Any, number: int) -> AsyncIterator[Any]:
        answer = response.infer_response
        for index, output in enumerate(answer.outputs):
            if output.name == "output_ids":
                raw = answer.raw_output_contents[index]
                ids = [
                    int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4)
                ]
                changed = change(ids)
                answer.raw_output_contents[index] = b"".join(
                    one.to_bytes(4, "little", signed=True) for one in changed
                )
                output.shape[-1] = len(changed)
        yield response

    return spoil


async def torn(response: Any, number: int) -> AsyncIterator[Any]:
    """Send tensors with incomplete numbers."""
    contents = response.infer_response.raw_output_contents
    for index, raw in enumerate(contents):
        contents[index] = raw[:3]
    yield response


async def final_twice(response: Any, number: int) -> AsyncIterator[Any]:
    """Send the last response twice."""
    yield response
    if response.infer_response.parameters["triton_final_response"].bool_param:
        yield response


async def refused(response: Any, number: int) -> AsyncIterator[Any]:
    """Refuse the request in the middle of its stream."""
    if number < HONEST_TOKENS:
        yield response
        return
    raise _Refused


async def silent(response: Any, number: int) -> AsyncIterator[Any]:
    """Stop sending in the middle of a stream."""
    if number >= HONEST_TOKENS:
        await asyncio.Event().wait()
    yield response


async def unfinished(response: Any, number: int) -> AsyncIterator[Any]:
    """End the stream in its middle as if it were complete."""
    if number >= HONEST_TOKENS:
        raise _Over
    yield response


LIES: Final[dict[str, FrameLie]] = {
    "ids outside the vocabulary": engine_frames.with_ids(vocabulary),
    "ids below zero": engine_frames.with_ids(negative),
    "more tokens than asked for": engine_frames.with_ids(many),
    "torn frames": engine_frames.torn,
    "frames of another version": engine_frames.other_version,
    "the last rows and all frames twice": engine_frames.twice,
    "a gap in the middle": engine_frames.gap,
    "a refusal in the middle": engine_frames.refused,
    "an end in the middle": engine_frames.unfinished,
    "silence in the middle": engine_frames.silent,
}
"""Lies of an engine with step frames."""

STREAM_LIES: Final[dict[str, Spoil]] = {
    "ids outside the vocabulary": with_ids(vocabulary),
    "ids below zero": with_ids(negative),
    "more tokens than asked for": with_ids(many),
    "torn tensors": torn,
    "the last answer twice": final_twice,
    "INVALID_ARGUMENT in the middle": refused,
    "an end in the middle": unfinished,
    "silence in the middle": silent,
}
"""Lies of an engine with a stream for each call."""


class _Refused(Exception):
    """The call ends with INVALID_ARGUMENT."""


class _Over(Exception):
    """The call ends well."""


class Proxy:
    """Forwards every call to a correct engine as bytes, and corrupts responses with tokens by `lie`."""

    def __init__(self, engine: str) -> None:
        self.lie: Spoil | None = None
        self.frame_lie: FrameLie | None = None
        self.spoilt = 0
        self._boot = b""
        self._channel = grpc.aio.insecure_channel(engine, options=(("grpc.max_receive_message_length", -1),))

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of any method."""
        method = details.method

        async def handle(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> None:
            call = self._channel.stream_stream(method, None, None)(self._to_engine(requests))
            number = 0
            try:
                async for honest in call:
                    answer = self._with_own_boot(honest)
                    if method != STREAM_INFER or (self.lie is None and self.frame_lie is None):
                        await context.write(answer)
                        continue
                    async for spoilt in self._spoilt(answer, number):
                        await context.write(spoilt)
                    number += 1
            except _Refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this request is wrong, says a liar")
            except _Over:
                pass
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(handle)

    def _with_own_boot(self, answer: bytes) -> bytes:
        """Return the answer with the liar's boot: ids of equal lengths, so that no length in the message changes."""
        if not self._boot and (found := BOOT.search(answer)):
            self._boot = found[1]
        return answer.replace(self._boot, LIARS_BOOT) if self._boot else answer

    async def _to_engine(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.replace(LIARS_BOOT, self._boot) if self._boot else request

    async def _spoilt(self, answer: bytes, number: int) -> AsyncIterator[bytes]:
        response = service_pb2.ModelStreamInferResponse.FromString(answer)
        outputs = [output.name for output in response.infer_response.outputs]
        if self.frame_lie is not None and outputs == [step_frames.OUTPUT]:
            self.spoilt += 1
            for payload in engine_frames.lied(response.infer_response.raw_output_contents[0], self.frame_lie):
                response.infer_response.raw_output_contents[0] = payload
                response.infer_response.outputs[0].shape[-1] = len(payload)
                yield response.SerializeToString()
            return
        if self.lie is None or "output_ids" not in outputs:
            yield answer
            return
        self.spoilt += 1
        async for spoilt in self.lie(response, number):
            yield spoilt.SerializeToString()

    async def close(self) -> None:
        """Close the channel to the engine."""
        await self._channel.close(None)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._proxy.service(details)


@asynccontextmanager
async def lying_replica(target: Target) -> AsyncIterator[Proxy]:
    """Add a decode replica with a lying engine; remove it at the end."""
    mesh = target.mesh
    host = mesh.config.mesh.host
    honest = mesh.parts[HONEST]
    engine = honest.command[list(honest.command).index("--engine") + 1]
    proxy, server = Proxy(engine), grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
    server.add_generic_rpc_handlers((_Handlers(proxy),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    listen = f"{host}:{next(free_ports(host, 1))}"
    options = {"--id": LIAR, "--listen": listen, "--engine": f"{host}:{port}"}
    command = beside(honest.command, options)
    mesh.parts[LIAR] = Part(LIAR, command, listen, Path(mesh.folder) / f"{LIAR}.log")
    try:
        await mesh.start(LIAR)
        await mesh.placeable()
        yield proxy
        part = mesh.parts[LIAR]
        assert not part.has_fallen, f"the replica of the lying engine ended: {part.tail()[-500:]}"
    finally:
        proxy.lie = proxy.frame_lie = None
        part = mesh.parts.pop(LIAR)
        if part.is_running:
            await part.end(signal.SIGTERM)
        await mesh.placeable()
        await server.stop(0)
        await proxy.close()


async def lying(target: Target, dose: Dose) -> Outcome:
    """Apply one corruption after the other to calls that have a correct replica beside the lying one."""
    outcome = Outcome()
    config = target.mesh.config
    truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
    metadata = bearer(target.key)
    number = FIRST_NUMBER
    frame_lies = LIES if config.engine.step_frames else {}
    stream_lies = {} if config.engine.step_frames else STREAM_LIES
    lies = [*frame_lies, *stream_lies]
    if target.is_short:
        lies = [*lies[:2], lies[5], lies[-3]]
    async with lying_replica(target) as proxy:
        for name in lies:
            proxy.lie, proxy.frame_lie, proxy.spoilt = stream_lies.get(name), frame_lies.get(name), 0
            streams = [bystanders.stream_of(number + index) for index in range(dose.count // len(lies))]
            number += len(streams)
            gate = asyncio.Semaphore(AT_ONCE)
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(target.address(FRONT), options=options) as channel:
                stub: Any = _Keyed(inference_pb2_grpc.InferenceServiceStub(channel), metadata)

                async def one(
                    stream: Stream, name: str = name, stub: Any = stub, gate: asyncio.Semaphore = gate
                ) -> None:
                    async with gate:
                        answer = await generate(stub, request_of(stream), timeout_s=DEADLINE_S)
                    outcome.did["calls"] += 1
                    outcome.saw[answer.code.name] += 1
                    right = truth.tokens(stream)
                    if answer.error is not None:
                        reason = errors.from_rpc_error(answer.error).reason
                        _note(outcome, f"{name}: a call ended with {answer.code.name} {reason}")
                    if answer.ids != (right if answer.error is None else right[: len(answer.ids)]):
                        _note(outcome, f"{name}: a call got wrong tokens")

                async with asyncio.TaskGroup() as group:
                    for stream in streams:
                        group.create_task(one(stream))
            outcome.did["spoilt answers"] += proxy.spoilt
            outcome.did["lies"] += proxy.spoilt > 0
            proxy.lie = proxy.frame_lie = None
            if not target.is_short and not await _is_readmitted(target):
                break
    if not outcome.did["spoilt answers"]:
        outcome.violations.append("no call reached the lying engine: the attack proves nothing")
    return outcome


async def _is_readmitted(target: Target) -> bool:
    """Wait until the router uses the lying replica again after its ejection, so that the next lie reaches calls."""
    try:
        await until(lambda: _is_placed_on(target), READMITTED_S_MAX, f"{LIAR} is placed on", every_s=0.1)
    except AssertionError:
        return False
    return True


async def _is_placed_on(target: Target) -> bool:
    status = await target.mesh.status("router-0")
    return any(view.replica == LIAR and view.placeable for view in status.replicas)


class _Keyed:
    """A stub that sends a key with every call."""

    def __init__(self, stub: Any, metadata: Any) -> None:
        self._stub, self._metadata = stub, metadata

    def Generate(self, request: Any, timeout: float) -> Any:
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)


def _note(outcome: Outcome, what: str) -> None:
    if what not in outcome.violations:
        outcome.violations.append(what)


LYING = Attack(
    name="lying-engine",
    about="An extra decode replica with a lying engine: wrong ids, torn tensors, ends and refusals in the middle, silence",
    run=lying,
    long=Dose(400, 60.0),
    short=Dose(30, 5.0),
    bounds=Bounds(p99_s=10.0),
)
