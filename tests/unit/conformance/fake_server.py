"""A Triton server without sockets or threads: the client of a session, on the core of the reference engine.

It needs an event loop, whose time may be virtual. Tests break one of its methods to see which check finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferInput, model_config_pb2, service_pb2

from engines.contract import errors as texts
from engines.contract import request_parsing
from engines.contract.errors import EngineError
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.kv_events import EventReplayBuffer, NumberedEvent, batch_messages, snapshot_messages
from engines.contract.outputs import RequestOutput
from engines.contract.request import (
    ControlRequest,
    EngineRequest,
    RequestKind,
    RequestLimits,
    ResponseOptions,
)
from engines.contract.tensors import GUIDE_INPUTS, INPUTS, OUTPUTS
from engines.reference.config import EngineConfig
from engines.reference.core import EngineCore, KvPull
from engines.reference.handoff import decode
from engines.reference.hashed import HashedArithmetic
from engines.reference.sequence import Guide, ReferenceRequest, Sequence
from kvmesh.triton import errors
from kvmesh.triton.client import Exchange
from kvmesh.triton.errors import CallError, EngineLost

CONFIG = EngineConfig(
    "hashed", kv_blocks=512, block_tokens=8, step_tokens_max=512, running_max=16, vocab_size=1024
)
STEP_S = 0.01
HEARTBEAT_S = 1.0
DIGITS = range(300, 310)
GUIDE_TOKENS = 4

_DTYPES = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "UINT8": np.uint8}


class DigitsGuide:
    """A guide over a vocabulary without text: GUIDE_TOKENS digits for a regular expression, digits for ever for JSON."""

    def __init__(self, text: GuideText) -> None:
        self._left = GUIDE_TOKENS if text.kind is GuideKind.REGEX else 1 << 30

    @property
    def is_over(self) -> bool:
        return self._left == 0

    def consume(self, token: int) -> None:
        assert token in DIGITS, token
        self._left -= 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(CONFIG.vocab_size, dtype=np.bool_)
        mask[list(DIGITS)] = True
        return mask


@dataclass(eq=False)
class Stream:
    """Responses of one request, as TritonClient gives them."""

    server: FakeServer
    inputs: list[InferInput]
    request_id: str
    parameters: dict[str, str]
    is_sent: bool = False
    key: int = 0
    request: EngineRequest | None = None
    options: ResponseOptions = field(default_factory=ResponseOptions)
    sent: int = 0
    sent_bytes: int = 0
    whole: RequestOutput = field(default_factory=RequestOutput)
    _queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if not self.is_sent:
            self.is_sent = True
            self.server.take(self)
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, CallError):
            raise item
        return item

    def cancel(self) -> None:
        self._queue.put_nowait(None)
        self.server.on_cancel(self)

    def put(self, item: Any) -> None:
        self._queue.put_nowait(item)

    def tensor(self, name: str) -> npt.NDArray[Any] | None:
        """Return an input as an array with its batch dimension."""
        for one in self.inputs:
            if one.name() == name:
                raw = one._get_content()
                if one.datatype() == "BYTES":
                    return np.array([[raw[4:]]], dtype=np.object_)
                return np.frombuffer(raw, dtype=_DTYPES[one.datatype()]).reshape(one.shape())
        return None

    @property
    def is_plain(self) -> bool:
        """True for a greedy call of prompt and output alone: defects of streams hit these only."""
        request = self.request
        return (
            request is not None
            and request.kind is RequestKind.CONTEXT_AND_GENERATION
            and request.sampling.is_greedy
            and not self.options.has_log_probs
            and request.adjustments.change_nothing
            and request.guide is None
        )


class FakeServer:
    """The client and the server in one. All servers of a test share `peers`, by address."""

    def __init__(
        self, address: str, peers: dict[str, FakeServer] | None = None, config: EngineConfig = CONFIG
    ) -> None:
        self.address = address
        self.is_alive = True
        self.inputs = {each.name: each.data_type.removeprefix("TYPE_") for each in (*INPUTS, *GUIDE_INPUTS)}
        self.inputs = {name: "BYTES" if kind == "STRING" else kind for name, kind in self.inputs.items()}
        self.outputs = {each.name: each.data_type.removeprefix("TYPE_") for each in OUTPUTS}
        self.parameters = {
            "tokens_per_block": str(config.block_tokens),
            "kv_blocks": str(config.kv_blocks),
            "max_sequence_tokens": str(MAX_SEQUENCE),
            "vocab_size": str(config.vocab_size),
            "max_batch_sequences": str(config.running_max),
            "kv_address": address,
            "release_handoff": "true",
            "seeded_resume": "true",
            "output_start": "true",
        }
        self.arithmetic = HashedArithmetic(vocab_size=config.vocab_size)
        self.store = self.arithmetic.new_store(config.kv_blocks, config.block_tokens)
        self.core = EngineCore(config, f"boot-{address}", "digest", address, 8, compile_guide=self.guide)
        self.streams: dict[int, Stream] = {}
        self.loads: list[Stream] = []
        self.events: list[Stream] = []
        self.replay = EventReplayBuffer()
        self.peers = peers if peers is not None else {}
        self.peers[address] = self
        self.limits = RequestLimits(config.vocab_size, MAX_SEQUENCE, has_guides=True)
        self._sequences: dict[int, Sequence] = {}
        self._keys = itertools.count(1)
        self._stepping: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._now_ns = 0

    # The client.

    async def describe(self) -> tuple[Any, Any]:
        metadata = service_pb2.ModelMetadataResponse(name="tensorrt_llm")
        for listed, found in ((metadata.inputs, self.inputs), (metadata.outputs, self.outputs)):
            for name, kind in found.items():
                listed.add(name=name, datatype=kind)
        config = model_config_pb2.ModelConfig(max_batch_size=1)
        config.model_transaction_policy.decoupled = True
        for name, value in self.parameters.items():
            config.parameters[name].string_value = value
        return metadata, config

    async def is_ready(self, timeout_s: float = 5.0) -> bool:
        return self.is_alive and timeout_s > 0

    def stream(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        assert timeout_s is None or timeout_s > 0
        return Stream(self, inputs, request_id, parameters or {})

    def subscription(
        self, inputs: list[InferInput], *, request_id: str, parameters: dict[str, str] | None
    ) -> Stream:
        return self.stream(inputs, request_id=request_id, parameters=parameters)

    def request(self, inputs: list[InferInput], request_id: str, parameters: dict[str, str]) -> Any:
        raise AssertionError("this server offers no step frames")

    def exchange(self) -> Exchange:
        raise AssertionError("this server offers no step frames")

    async def request_once(self, inputs: list[InferInput], **options: Any) -> None:
        stream = self.stream(inputs, **options)
        try:
            async for _ in stream:
                pass
        finally:
            stream.cancel()

    # The server.

    def take(self, stream: Stream) -> None:
        """Begin a request."""
        if not self.is_alive:
            stream.put(EngineLost("the server is gone"))
            return
        try:
            parameters = json.dumps(stream.parameters)
            kind = request_parsing.parse_request_kind(parameters, stream.tensor)
            if isinstance(kind, ControlRequest):
                self.serve(kind, stream)
                return
            stream.key = next(self._keys)
            stream.options = request_parsing.parse_response_options(stream.tensor)
            parsed = request_parsing.parse_request(
                kind, stream.key, stream.request_id, parameters, stream.tensor, self.limits, 0
            )
            stream.request = self.taken(parsed, stream)
            self.submit(stream, stream.request)
        except EngineError as error:
            self.refuse(stream, str(error))

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        """Return the request that runs. A server with a defect runs another one."""
        return request

    def refuse(self, stream: Stream, text: str) -> None:
        stream.put(errors.of_text(text))

    def submit(self, stream: Stream, request: EngineRequest) -> None:
        blob = request.context_phase_params
        accepted = ReferenceRequest(
            **{each.name: getattr(request, each.name) for each in fields(EngineRequest)},
            handoff=decode(blob) if blob else None,
        )
        self.streams[stream.key] = stream
        sequence = self.core.submit(accepted)
        if sequence is not None:
            self._sequences[stream.key] = sequence
        self.go()

    def guide(self, text: GuideText) -> Guide:
        return DigitsGuide(text)

    def serve(self, kind: ControlRequest, stream: Stream) -> None:
        if kind is ControlRequest.STOP:
            self.stop(stream.request_id)
            stream.put(None)
        elif kind is ControlRequest.RELEASE_HANDOFF:
            self.release(request_parsing.parse_handoff(stream.tensor))
            stream.put(None)
        elif kind is ControlRequest.LOAD_REPORT:
            self.loads.append(stream)
            self.report(stream)
            if self._beating is None or self._beating.done():
                self._beating = asyncio.create_task(self._beat())
        else:
            self.subscribe(stream)
        self.go()

    def subscribe(self, stream: Stream) -> None:
        """Begin a subscription to KV events."""
        cursor = request_parsing.parse_event_cursor(json.dumps(stream.parameters))
        self.publish()
        missed = None if cursor is None else self.replay.after(cursor.event_id)
        if missed is None:
            snapshot = self.core.pool.snapshot()
            for message in snapshot_messages(self.core.boot_id, self.replay.last_id, snapshot):
                self.tell(stream, "kv_events", message)
            self.end_if_full(stream)
        else:
            self.tell_events(stream, missed)
        self.events.append(stream)

    def stop(self, request_id: str) -> None:
        for sequence in [each for each in self._sequences.values() if each.request.request_id == request_id]:
            self.core.cancel(sequence)
        self.core.release_handoffs_of(request_id)

    def release(self, blob: bytes) -> None:
        self.core.release_handoff(decode(blob))

    def on_cancel(self, stream: Stream) -> None:
        """End the request of a stream that its client has cancelled."""
        if stream in self.loads:
            self.loads.remove(stream)
            if not self.loads and self._beating is not None:
                self._beating.cancel()
        elif stream in self.events:
            self.events.remove(stream)
        elif (sequence := self._sequences.get(stream.key)) is not None:
            self.cancel(sequence)
            self.go()

    def cancel(self, sequence: Sequence) -> None:
        self.core.cancel(sequence)

    def go(self) -> None:
        """Step while there is work."""
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_all())

    async def _step_all(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self.step():
                return

    def step(self) -> bool:
        """Run one step. Return False if nothing was to do."""
        core = self.core
        self._now_ns += int(STEP_S * 1e9)
        plan = core.plan(self._now_ns)
        pulls, core.pulls_to_start = core.pulls_to_start, []
        for pull in pulls:
            self._pull(pull)
        if plan:
            logits = self.arithmetic.forward(core.chunk_inputs(plan), self.store)
            core.commit(plan, logits, self._now_ns, STEP_S)
        outputs, core.outputs = core.outputs, []
        for key, output in outputs:
            self.deliver(key, output)
        core.pulls_to_abort.clear()
        self.publish()
        for stream in list(self.loads):
            self.report(stream)
        return bool(plan or pulls or outputs or core.scheduler.waiting)

    def _pull(self, pull: KvPull) -> None:
        sequence, handoff = self._sequences[pull.key], pull.handoff
        source = self.peers[handoff.address]
        ids = source.begin_send(handoff.handoff_id)
        if ids is None:
            text = texts.HANDOFF_UNKNOWN.format(handoff=handoff.handoff_id, peer=handoff.address)
            sequence.is_pulling = False
            self.core.pull_failed(sequence, text)
            return
        blocks = source.store[ids[pull.first_block : pull.first_block + len(pull.block_ids)]]
        self.store[list(pull.block_ids)] = blocks
        source.core.handoff_sent(handoff.handoff_id, is_acknowledged=True)
        self.core.pulled(sequence, self._now_ns)
        source.go()

    def begin_send(self, handoff_id: int) -> list[int] | None:
        return self.core.handoffs.begin_send(handoff_id)

    def deliver(self, key: int, output: RequestOutput) -> None:
        """Send the output of a call."""
        stream = self.streams.get(key)
        if stream is None:
            return
        is_single = not stream.options.is_streaming
        if is_single:
            stream.whole.merge(output)
            output = stream.whole
        if output.is_final:
            self.streams.pop(key)
            self._sequences.pop(key, None)
        if output.error is not None:
            self.refuse(stream, output.error)
        elif output.is_final or not is_single:
            if output.tokens or output.is_complete:
                self.send(stream, output)
            if output.is_final:
                stream.put(None)

    def send(self, stream: Stream, output: RequestOutput) -> None:
        """Send one response with tokens."""
        stream.sent += 1
        stream.put(self.response(stream, output))

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        made = service_pb2.ModelInferResponse(id=stream.request_id)
        made.parameters["triton_final_response"].bool_param = output.is_final
        add_output(made, "output_ids", np.array(output.tokens, np.int32))
        add_output(made, "sequence_length", np.array([len(output.tokens)], np.int32))
        if output.handoff is not None:
            add_output(made, "context_phase_params", np.frombuffer(output.handoff, np.uint8))
        if stream.options.has_log_probs:
            add_output(made, "output_log_probs", np.array(output.log_probs, np.float32))
        if output.top_ids:
            add_output(made, "top_log_prob_ids", np.array(output.top_ids, np.int32))
            add_output(made, "top_log_probs", np.array(output.top_log_probs, np.float32))
        if stream.options.has_perf and output.perf is not None:
            add_output(made, "kv_cache_reused_blocks", np.array([output.perf.reused_blocks], np.int32))
        return made

    def load(self) -> dict[str, Any]:
        """Return the load report."""
        return dict(msgspec.to_builtins(self.core.load()))

    def report(self, stream: Stream) -> None:
        self.tell(stream, "load_report", msgspec.json.encode(self.load()))

    async def _beat(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                for stream in list(self.loads):
                    self.report(stream)

    def publish(self) -> None:
        """Tell the events since the last call."""
        fresh = []
        for event in self.core.pool.drain_events():
            fresh.append(NumberedEvent(self.replay.last_id + 1, event))
            self.replay.add(fresh[-1])
        for stream in list(self.events):
            self.tell_events(stream, fresh)

    def tell_events(self, stream: Stream, events: Tokens[NumberedEvent]) -> None:
        for message in batch_messages(self.core.boot_id, events):
            self.tell(stream, "kv_events", message)
        self.end_if_full(stream)

    def tell(self, stream: Stream, output: str, payload: bytes) -> None:
        """Send one message of a subscription."""
        made = service_pb2.ModelInferResponse()
        add_output(made, output, np.frombuffer(payload, np.uint8))
        stream.put(made)
        stream.sent_bytes += len(payload)

    def end_if_full(self, stream: Stream) -> None:
        """End a subscription behind `max_bytes`."""
        limit = request_parsing.parse_max_bytes(json.dumps(stream.parameters))
        if limit is not None and stream.sent_bytes > limit:
            stream.put(None)

    def is_empty(self) -> bool:
        """True if no sequence and no handoff is left, and all blocks are free or can be evicted."""
        load = self.core.load()
        busy = load.sequences_running + load.sequences_waiting + load.handoffs_held
        return busy == 0 and load.blocks_free == load.blocks_total


MAX_SEQUENCE = 256


def add_output(made: Any, name: str, values: npt.NDArray[Any]) -> None:
    """Add an output tensor to a ModelInferResponse."""
    made.outputs.add(name=name)
    made.raw_output_contents.append(values.tobytes())
