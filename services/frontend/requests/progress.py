"""Progress of a request: its output ids, the positions that the client took, the cached and recomputed tokens. Pure."""

from __future__ import annotations

from array import array
from typing import Final

from kvmesh.attach import frames, token_log
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.attempts import Attempt
from services.frontend.requests.charge import Reach
from services.frontend.requests.output import Output
from services.frontend.requests.request_spec import RequestSpec

FLOW_CONTROL_WINDOW: Final = 64
"""Flow-control window: positions that may be sent ahead of those that the client's transport took.

Each extension is at least half a window, except the last one of the output.
"""


class TokenError(ValueError):
    """A token id outside the vocabulary: the engine serves another model."""


class Progress:
    """See the module.

    INVARIANT: `ids` only grows, equals the ids that `output` was fed, and its length is the next position.
    """

    __slots__ = (
        "_computed_tokens",
        "_ends",
        "_spec",
        "cached_tokens",
        "closed_s",
        "computed_output",
        "delivered",
        "first_token_s",
        "ids",
        "output",
        "previous_window_end",
        "recomputed_tokens",
        "window_end",
        "writing_since_s",
    )

    def __init__(self, spec: RequestSpec, output: Output) -> None:
        self._spec = spec
        self._ends = spec.end_token_ids | spec.stop_token_ids
        self.output = output
        self.ids = array("i")
        self.delivered = 0
        """The client's transport took positions [0, delivered)."""
        self.writing_since_s: float | None = None
        """Time at which the client's transport got the message that it holds, plus standstills since. None: no message."""
        self.closed_s = 0.0
        """Seconds that the transport had held its message at the request's end, or at the client's leaving if longer."""
        self.computed_output = 0
        """Decode reported positions [0, computed_output) as computed, perhaps beyond the flow-control window."""
        self.window_end = 0
        """Flow-control window: the running attempt may send positions [0, window_end)."""
        self.previous_window_end = 0
        """Value of `window_end` before it last grew."""
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None
        """Cached tokens of the prompt, in the first attempt that reported them."""
        self.recomputed_tokens = 0
        self._computed_tokens = 0
        """Some engine is known to have computed tokens [0, _computed_tokens) of prompt and output."""

    @property
    def reach(self) -> Reach:
        """Positions up to which output was handed to the transport, received and computed, for the charge."""
        produced = len(self.ids)
        computed = min(max(produced, self.computed_output), self._spec.max_output_tokens)
        return Reach(self.output.taken, produced, computed, self.closed_s)

    def count_closed(self, watched_s: float) -> None:
        """Note how long the transport has held its message. Called when the request ends and when its client leaves.

        `watched_s`: time until which this process was seen to run (`ClosedWindows.watched_s`).
        """
        if self.writing_since_s is not None:
            self.closed_s = max(self.closed_s, watched_s - self.writing_since_s)

    def stood_still(self, gap_s: float, now_s: float) -> None:
        """Note that this process did not run for `gap_s`: the transport may have taken the message in that time."""
        if self.writing_since_s is not None:
            self.writing_since_s = min(now_s, self.writing_since_s + gap_s)

    def take_received(self, now_s: float) -> None:
        """Start behind the output that the client received before."""
        received = self._spec.execution.received_ids
        if not received:
            return
        used = self.output.feed(received)
        self.output.forget_waiting()
        self.ids.extend(received[:used])
        self.delivered = used
        self._computed_tokens = self._spec.prompt_tokens + used - 1
        self.first_token_s = now_s

    def add(self, row: frames.Row, now_s: float) -> bool:
        """Add tokens; return True if some were new. Raises token_log.Gap or TokenError."""
        new = token_log.admit(row, len(self.ids))
        if new is None:
            return False
        beside = len(new.alternatives) // new.count
        ids = frames.unpack_ids(new.token_ids)[: self._spec.max_output_tokens - len(self.ids)]
        if not ids:
            return False
        if not self._ends.isdisjoint(ids):
            ids = ids[: next(index for index, each in enumerate(ids, start=1) if each in self._ends)]
        try:
            if min(ids) < 0:
                raise TokenError(f"token id is {min(ids)}")
            logprobs = frames.unpack_logprobs(new.logprobs)[: len(ids)]
            used = self.output.feed(ids, logprobs, new.alternatives[: beside * len(ids)])
        except IndexError:
            raise TokenError(f"token id is {max(ids)}") from None
        self.ids.extend(ids[:used])
        if self.first_token_s is None:
            self.first_token_s = now_s
        return True

    def count_prompt(self, attempt: Attempt, row: attach.FirstToken) -> None:
        """Count the cached tokens of the attempt's prompt, and those that were computed again."""
        if self.cached_tokens is None:
            self.cached_tokens = min(row.cached_token_count, self._spec.prompt_tokens)
        again = min(attempt.context_tokens, self._computed_tokens) - row.cached_token_count
        self.recomputed_tokens += max(0, again)
        self._computed_tokens = max(self._computed_tokens, attempt.context_tokens)

    def count_lost(self, attempt: Attempt) -> None:
        """Count the tokens that the lost attempt had computed: all of its context if its progress is unknown."""
        known = self._spec.prompt_tokens + len(self.ids) - 1 if self.ids else attempt.context_tokens
        self._computed_tokens = max(self._computed_tokens, known)

    def completion(self) -> pb.FinishReason.ValueType:
        """Return the finish reason if all tokens that the output can have have arrived; else UNSPECIFIED."""
        if self.output.stop_string is not None:
            return pb.FINISH_REASON_STOP_STRING
        if self.is_ended:
            return self.end_reason
        if len(self.ids) >= self._spec.max_output_tokens:
            return pb.FINISH_REASON_LENGTH
        return pb.FINISH_REASON_UNSPECIFIED

    @property
    def is_ended(self) -> bool:
        """True if a token has ended the output."""
        return bool(self.ids) and self.ids[-1] in self._ends

    @property
    def end_reason(self) -> pb.FinishReason.ValueType:
        """Finish reason of an output that a token ended. An engine that hides end tokens leaves END_TOKEN."""
        is_clients = bool(self.ids) and self.ids[-1] in self._spec.stop_token_ids
        return pb.FINISH_REASON_STOP_TOKEN if is_clients else pb.FINISH_REASON_END_TOKEN

    def open_window(self) -> int:
        """Return the end of the flow-control window of a new slot."""
        self.window_end = min(self.delivered + FLOW_CONTROL_WINDOW, self._spec.max_output_tokens)
        return self.window_end

    def advance_window(self, delivered: int) -> int | None:
        """Note that the client's transport took [0, delivered). Return the new `window_end`, or None for no change.

        The window changes in steps of at least half a window, and by any step to the end of the output.
        """
        self.delivered = delivered
        window_end = min(delivered + FLOW_CONTROL_WINDOW, self._spec.max_output_tokens)
        is_last = window_end == self._spec.max_output_tokens and window_end > self.window_end
        if window_end - self.window_end < FLOW_CONTROL_WINDOW // 2 and not is_last:
            return None
        self.previous_window_end, self.window_end = self.window_end, window_end
        return window_end
