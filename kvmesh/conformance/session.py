"""Calls to one engine: bounded in number and time, with ids of their own, and ended in every case.

INVARIANT: after `close` no call is open, and each id that may still run, or may have left a handoff, was stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from tritonclient.grpc import InferInput

from kvmesh.conformance import framed_calls
from kvmesh.conformance.framed_calls import Framed
from kvmesh.conformance.offer import Offer
from kvmesh.conformance.recording import Recording
from kvmesh.triton.client import Exchange, Responses, opened
from kvmesh.triton.errors import CallError, EngineError, EngineStalled
from kvmesh.triton.port import CallKind, EngineCall
from kvmesh.triton.tensors import RequestTensors, parameters_of, payload_of

CALL_S: Final = 20.0
"""Timeout of one call."""

CANCELLATION_S: Final = 0.1
"""Time in which an engine sees a cancel: TensorRT-LLM's backend looks every 100 ms. Until then a call counts as open."""

CLOSE_S: Final = 5.0
"""Longest time that `close` takes."""

LOOK_S: Final = 0.002
"""Period at which a call is looked at until enough responses came."""

MESSAGES_MAX: Final = 256
"""Messages of a subscription that wait to be taken."""

Change = Callable[[list[InferInput]], list[InferInput]]
"""Changes the inputs of a call, for bad input."""


class Client(Protocol):
    """The part of TritonClient that a session uses."""

    address: str

    async def describe(self) -> tuple[Any, Any]: ...

    async def is_ready(self, timeout_s: float = ...) -> bool: ...

    def stream(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Responses: ...

    def request(self, inputs: list[InferInput], request_id: str, parameters: dict[str, str]) -> Any: ...

    def exchange(self) -> Exchange: ...

    async def request_once(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float = ...,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """When a call is cancelled: after `responses` responses, or, if 0, `after_s` seconds after it was begun."""

    responses: int = 0
    after_s: float = 0.0
    by_stop: bool = False
    """By a request with the tensor `stop`, instead of the end of the stream."""


def random_moment(chance: random.Random, *, has_stop: bool) -> Moment:
    """Return a moment before the first token, or behind some responses."""
    by_stop = has_stop and chance.random() < 0.5
    if chance.random() < 0.5:
        return Moment(after_s=chance.uniform(0.0, 0.01), by_stop=by_stop)
    return Moment(responses=chance.randint(1, 8), by_stop=by_stop)


class Messages:
    """The messages of one subscription."""

    def __init__(self) -> None:
        self.error: CallError | None = None
        """The error that ended the subscription."""
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(MESSAGES_MAX)
        self._is_read = False

    @property
    def is_over(self) -> bool:
        """True if the subscription has ended and all its messages were taken."""
        return self._is_read and self._queue.empty()

    async def get(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next message. None: the subscription is over, or `wait_s` seconds are."""
        if self.is_over:
            return None
        try:
            async with asyncio.timeout(wait_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def read(self, stream: Responses, what: str) -> None:
        """Read the stream to its end."""
        try:
            async for response in stream:
                payload = payload_of(response, what)
                if payload is not None:
                    await self._queue.put(msgspec.json.decode(payload, type=dict[str, Any]))
        except CallError as error:
            self.error = error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.error = EngineError(f"a message is no JSON object: {error}")
        finally:
            self._is_read = True
            if not self._queue.full():
                self._queue.put_nowait(None)  # wakes `get`


class Session:
    """Calls of all checks to one engine.

    `most_open`: largest number of calls that were open at once since it was set to 0.
    """

    def __init__(
        self, client: Client, offer: Offer, concurrency: int, prefix: str, *, call_s: float = CALL_S
    ) -> None:
        """`prefix`: beginning of all request ids, unique for each run."""
        self.client = client
        self.offer = offer
        self.call_s = call_s
        self.most_open = 0
        self._open_count = 0
        self._tensors = RequestTensors(frozenset(offer.inputs), offer.vocab_size)
        self._free = asyncio.Semaphore(concurrency)
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._open: dict[str, Responses] = {}
        self._handoffs: dict[bytes, str] = {}
        """Handoffs that were made and neither pulled nor released -> request id."""
        self._unstopped: set[str] = set()
        """Ids of cancelled calls whose end was not seen."""

    def call(self, prompt: Sequence[int], output: int, **fields: Any) -> EngineCall:
        """Return a call with a new id. `fields`: further fields of EngineCall."""
        fields = {"kind": CallKind.CONTEXT_AND_GENERATION, "timeout_s": self.call_s, **fields}
        return EngineCall(
            request_id=f"{self._prefix}-{next(self._numbers)}",
            token_ids=np.array(prompt, dtype="<i4").tobytes(),
            max_output_tokens=output,
            **fields,
        )

    async def ask(
        self,
        prompt: Sequence[int],
        output: int,
        *,
        change: Change | None = None,
        parameters: dict[str, str] | None = None,
        wait_s: float = 0.0,
        **fields: Any,
    ) -> Recording:
        """Run a call to its end, and return what came. An error of the engine is in the recording.

        Raises EngineError if the responses cannot be recorded. Then the call is cancelled.
        `change`: changes the inputs. `parameters`: replace those of the call. `wait_s`: timeout; 0: that of all calls.
        """
        call = self.call(prompt, output, **fields)
        inputs = self._tensors.of_call(call)
        made = Recording()
        async with self._place():
            await self._read(
                call.request_id,
                change(inputs) if change else inputs,
                parameters_of(call) if parameters is None else parameters,
                made,
                wait_s or self.call_s,
            )
        if made.handoff:
            self._handoffs[made.handoff] = call.request_id
        return _readable(made)

    async def cancelled(self, prompt: Sequence[int], output: int, moment: Moment, **fields: Any) -> Recording:
        """Run a call, cancel it at `moment`, and return what came before. A call that ends earlier is not cancelled.

        Raises EngineError if the responses cannot be recorded.
        """
        call = self.call(prompt, output, **fields)
        made = Recording()
        async with self._place():
            reading = asyncio.create_task(
                self._read(
                    call.request_id, self._tensors.of_call(call), parameters_of(call), made, self.call_s
                )
            )
            try:
                await self._until(moment, made, reading)
                if not reading.done():
                    await self._cancel(call.request_id, reading, by_stop=moment.by_stop)
            finally:
                if not reading.done():
                    reading.cancel()
                    await asyncio.wait((reading,))
        return _readable(made)

    async def framed(
        self,
        prompts: Sequence[Sequence[int]],
        output: int,
        *,
        cancel_after: int = 0,
        cancel_s: float = 0.0,
    ) -> list[Framed]:
        """Run calls at once on one step stream, and return what came. See framed_calls.run."""
        calls = [self.call(prompt, output) for prompt in prompts]
        async with AsyncExitStack() as places:
            for _ in calls:
                await places.enter_async_context(self._place())
            answers = await framed_calls.run(
                self.client,
                self._tensors,
                calls,
                cancel_after=cancel_after,
                cancel_s=cancel_s,
                timeout_s=self.call_s,
            )
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer.error, EngineStalled):
                self._unstopped.add(call.request_id)
        return answers

    async def release(self, handoff: bytes) -> None:
        """Release a handoff. Raises CallError."""
        await self.client.request_once(
            self._tensors.of_release(handoff), parameters={"request_type": "release_handoff"}
        )
        self._handoffs.pop(handoff, None)

    async def stop(self, request_id: str) -> None:
        """Stop the calls with this id, and release the handoffs that they made. Raises CallError."""
        await self.client.request_once(self._tensors.of_stop(), request_id=request_id)

    def pulled(self, handoff: bytes) -> None:
        """Note that another engine has taken this handoff."""
        self._handoffs.pop(handoff, None)

    @asynccontextmanager
    async def subscribed(self, what: str, **parameters: str) -> AsyncIterator[Messages]:
        """Open a subscription to `kv_events` or `load_report` with these request parameters."""
        stream = self.client.stream(
            self._tensors.of_service(),
            request_id=f"{self._prefix}-{what}-{next(self._numbers)}",
            parameters={"request_type": what, **parameters},
        )
        messages = Messages()
        async with opened(stream):
            reading = asyncio.create_task(messages.read(stream, what), name=f"subscription:{what}")
            try:
                yield messages
            finally:
                if stream.is_sent:  # see Responses
                    stream.cancel()
                else:
                    reading.cancel()
                await asyncio.wait((reading,))

    async def clear(self) -> None:
        """End what a check has left open: streams, calls that may still run, handoffs. Errors are dropped."""
        for stream in self._open.values():
            stream.cancel()
        handoffs, self._handoffs = self._handoffs, {}
        unstopped, self._unstopped = self._unstopped | set(self._open), set()
        can_release = self.offer.capabilities.release_handoff
        if "stop" in self.offer.inputs:
            unstopped |= set() if can_release else set(handoffs.values())
            for request_id in unstopped:
                with suppress(CallError):
                    await self.stop(request_id)
        for handoff in handoffs if can_release else ():
            with suppress(CallError):
                await self.release(handoff)

    async def close(self) -> None:
        """End everything that is open, within CLOSE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.clear()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait until one more call may be open."""
        async with self._free:
            self._open_count += 1
            self.most_open = max(self.most_open, self._open_count)
            try:
                yield
            finally:
                self._open_count -= 1

    async def _read(
        self,
        request_id: str,
        inputs: list[InferInput],
        parameters: dict[str, str] | None,
        made: Recording,
        timeout_s: float,
    ) -> None:
        """Read the responses to one call into `made`, until its end or its timeout."""
        stream = self.client.stream(inputs, request_id=request_id, parameters=parameters, timeout_s=timeout_s)
        self._open[request_id] = stream
        try:
            async with asyncio.timeout(timeout_s), opened(stream):
                async for response in stream:
                    try:
                        made.add(response)
                    except EngineError as error:
                        made.unreadable = error
                        break
        except CallError as error:
            made.error = error
        except TimeoutError:
            made.error = EngineStalled(f"no end within {timeout_s:g} s")
        finally:
            del self._open[request_id]
            if not made.is_final and (made.error is None or isinstance(made.error, EngineStalled)):
                self._unstopped.add(request_id)

    async def _until(self, moment: Moment, made: Recording, reading: asyncio.Task[None]) -> None:
        if not moment.responses:
            await asyncio.wait((reading,), timeout=moment.after_s)
            return
        while not reading.done() and len(made.responses) < moment.responses:
            await asyncio.wait((reading,), timeout=LOOK_S)

    async def _cancel(self, request_id: str, reading: asyncio.Task[None], *, by_stop: bool) -> None:
        stream = self._open.get(request_id)
        if by_stop and stream is not None and stream.is_sent:
            # A stop may overtake its call. It is repeated, as a replica does.
            ends_s = asyncio.get_running_loop().time() + self.call_s
            while not reading.done() and asyncio.get_running_loop().time() < ends_s:
                await self.stop(request_id)
                await asyncio.wait((reading,), timeout=CANCELLATION_S)
            return
        if stream is not None and stream.is_sent:  # see Responses
            stream.cancel()
        else:
            reading.cancel()
        await asyncio.wait((reading,))
        await asyncio.sleep(CANCELLATION_S)
        self._unstopped.discard(request_id)


def _readable(made: Recording) -> Recording:
    if made.unreadable is not None:
        raise made.unreadable
    return made
