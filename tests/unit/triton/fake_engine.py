"""An engine without a server: the EnginePort of tests. It works only in `step`, and time is an argument.

Tokens are a pure function of the whole history. So a lost or repeated token changes all later ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from kvmesh.attach import frames
from kvmesh.triton.capabilities import Capabilities, ModelFacts
from kvmesh.triton.errors import CallError, EngineLost, HandoffLost, InvalidRequest
from kvmesh.triton.port import CallKind, EngineCall, EngineLoad, EngineSink, FirstAnswer

VOCABULARY = 64
END_TOKEN = 0
"""Appears once in 64 tokens."""


def next_token(history: Sequence[int]) -> int:
    """Return the token after `history`."""
    return xxhash.xxh3_64_intdigest(frames.pack_ids(history)) % VOCABULARY


def expected(prompt: Sequence[int], output: int, end_token_id: int) -> list[int]:
    """Return the tokens that an engine generates after `prompt`."""
    history = list(prompt)
    while len(history) < len(prompt) + output:
        history.append(next_token(history))
        if history[-1] == end_token_id:
            break
    return history[len(prompt) :]


def facts(**changes: object) -> ModelFacts:
    """Return a model with all capabilities: 64 blocks of 4 tokens, 128 tokens in a sequence."""
    settings: dict[str, object] = {
        "capabilities": Capabilities(True, True, True, True, True, end_token=True),
        "tokens_per_block": 4,
        "kv_blocks": 64,
        "max_sequence_tokens": 128,
        "vocab_size": VOCABULARY,
        "kv_address": "127.0.0.1:9",
        "model_version": "v1",
        "load_report": True,
        "stop": True,
        "inputs": frozenset(),
        "outputs": frozenset(),
    }
    return ModelFacts(**{**settings, **changes})  # type: ignore[arg-type]  # fields by name


FOREIGN, INVALID = "foreign", "invalid"
"""Faults of an engine: a token id outside the vocabulary, and a refusal of the request at every attempt."""


@dataclass(slots=True)
class Run:
    """A call in progress."""

    call: EngineCall
    prompt: tuple[int, ...]
    made: list[int] = field(default_factory=list)
    lie: str = ""
    """`FOREIGN` or `INVALID`: the fault after `lie_at` tokens. Empty: no fault."""
    lie_at: int = 0

    def next_token(self) -> int:
        """Return the next token."""
        if self.lie == FOREIGN and len(self.made) == self.lie_at:
            return VOCABULARY
        return next_token((*self.prompt, *self.made))

    def is_over(self) -> bool:
        """True if the last token is made."""
        return len(self.made) >= self.call.max_output_tokens or (
            bool(self.made) and self.made[-1] == self.call.end_token_id
        )


class FakeEngine:
    """An EnginePort. Handoffs are its own ones, or those of `peer` for a decode engine.

    `live`: calls by id. `held`: handoffs that are neither pulled nor released. `hides_end_token`: as in TensorRT-LLM's C++
    backend, an answer that ends by itself lacks its end token. A prompt with an empty answer then has no handoff.
    """

    def __init__(
        self,
        sink: EngineSink,
        *,
        boot_id: str = "boot-1",
        peer: FakeEngine | None = None,
        hides_end_token: bool = False,
    ) -> None:
        self.sink = sink
        self.hides_end_token = hides_end_token
        self.boot_id = boot_id
        self.live: dict[int, Run] = {}
        self.held: dict[bytes, int] = {}
        """First tokens by handoff."""
        self.released: list[bytes] = []
        self.started_total = 0
        self.lie: Callable[[EngineCall], tuple[str, int]] = lambda _: ("", 0)
        """The fault of each new call, and the number of tokens before it."""
        self.peer = peer
        self._numbers = itertools.count(1)

    def start(self, call_id: int, call: EngineCall) -> None:
        """See EnginePort."""
        assert call_id not in self.live, f"call {call_id} started twice"
        self.started_total += 1
        lie, lie_at = self.lie(call)
        self.live[call_id] = Run(call, frames.unpack_ids(call.token_ids), lie=lie, lie_at=lie_at)

    def cancel(self, call_id: int) -> None:
        """See EnginePort."""
        self.live.pop(call_id, None)

    def release(self, context_phase_params: bytes) -> None:
        """See EnginePort."""
        self.released.append(context_phase_params)
        self.held.pop(context_phase_params, None)

    def open_calls(self) -> int:
        """See EnginePort."""
        return len(self.live)

    def step(self, now_s: float, tokens: int = 1, chosen: Callable[[int], bool] = lambda _: True) -> None:
        """Let each call with a `chosen` id make `tokens` tokens."""
        for call_id in list(self.live):
            run = self.live.get(call_id)
            if run is None or not chosen(call_id):
                continue
            if run.lie == INVALID and len(run.made) >= run.lie_at:
                self.fail(call_id, InvalidRequest("Invalid value for x"), now_s)
            elif run.call.kind is CallKind.CONTEXT_ONLY:
                self._prefill(call_id, run, now_s)
            else:
                self._generate(call_id, run, tokens, now_s)

    def fail(self, call_id: int, error: CallError, now_s: float) -> None:
        """End a call with `error`."""
        del self.live[call_id]
        self.sink.on_error(call_id, error, now_s)

    def crash(self, boot_id: str, now_s: float) -> None:
        """Lose all state and come back as another boot."""
        while self.live:  # a failed call may start the next one
            self.fail(next(iter(self.live)), EngineLost("Socket closed"), now_s)
        self.sink.on_ready(False, now_s)
        self.held.clear()
        self.boot_id = boot_id
        self.report(now_s)

    def report(self, now_s: float) -> None:
        """Report readiness and load, as a real engine does when its load stream opens."""
        self.sink.on_ready(True, now_s)
        self.sink.on_load(EngineLoad(self.boot_id, 64, 64, handoffs_held=len(self.held)), now_s)

    def _prefill(self, call_id: int, run: Run, now_s: float) -> None:
        token = run.next_token()
        if self.hides_end_token and token == run.call.end_token_id:
            del self.live[call_id]
            self.sink.on_first(call_id, FirstAnswer(), now_s)
            self.sink.on_end(call_id, now_s)
            return
        handoff = f"{self.boot_id}/{next(self._numbers)}".encode()
        self.held[handoff] = token
        del self.live[call_id]
        self.sink.on_first(call_id, FirstAnswer(handoff, reused_blocks=1), now_s)
        self.sink.on_tokens(call_id, (token,), (-0.5,) if run.call.logprobs else (), now_s)
        self.sink.on_end(call_id, now_s)

    def _generate(self, call_id: int, run: Run, tokens: int, now_s: float) -> None:
        fresh: list[int] = []
        is_first = not run.made
        if is_first and run.call.kind is CallKind.GENERATION_ONLY:
            source = self.peer.held if self.peer else self.held
            token = source.pop(run.call.context_phase_params, None)
            if token is None:
                self.fail(call_id, HandoffLost("KV handoff 1 is unknown or expired at x"), now_s)
                return
            fresh.append(run.next_token() if run.lie else token)
            run.made += fresh
        while not run.is_over() and len(fresh) < tokens:
            run.made.append(run.next_token())
            fresh.append(run.made[-1])
        if run.is_over():
            del self.live[call_id]
        if is_first:
            self.sink.on_first(call_id, FirstAnswer(), now_s)
        if self.hides_end_token and fresh and fresh[-1] == run.call.end_token_id:
            del fresh[-1]
        if fresh:
            self.sink.on_tokens(call_id, fresh, [-0.5] * len(fresh) if run.call.logprobs else (), now_s)
        if run.is_over():
            self.sink.on_end(call_id, now_s)
