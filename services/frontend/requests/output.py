"""Output that waits for a client: ids and certain text that accumulated since its last message.

Pure. The request's flow-control window bounds the output that waits: ids and text of one window.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvmesh.attach import frames
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.detokenizer import Detokenizer
from services.frontend.requests.stop_strings import StopStrings


class BareTokens:
    """The fields of pb.Tokens without protobuf, for surfaces that send no protobuf: a seventh of the time."""

    __slots__ = ("ids", "logprobs", "position", "text", "top_logprobs")

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.position = 0
        self.logprobs: list[float] = []
        self.top_logprobs: list[pb.TopLogprobs] = []


class Output:
    """Output of one request: positions [0, end), of which [0, taken) were handed to the client's writer.

    INVARIANT: taken <= end. The text handed out with ids is exactly the certain text of positions [0, taken). Any frontend
    can therefore continue for a client that returns with its ids. Text that becomes certain only because the output ended
    is handed out last, without ids.
    """

    __slots__ = (
        "_alternatives",
        "_detokenizer",
        "_ids",
        "_logprobs",
        "_stop",
        "_tail",
        "_text",
        "end",
        "kept_logprobs",
        "stop_string",
        "taken",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        with_logprobs: bool,
        with_alternatives: bool = False,
    ) -> None:
        """`with_alternatives`: the most likely tokens at each position are handed out as well."""
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None
        self._ids: list[int] = []
        self._logprobs: list[float] | None = [] if with_logprobs else None
        self._alternatives: list[bytes] | None = [] if with_alternatives else None
        """Pairs of id and log-probability for each waiting token."""
        self._text: list[str] = []
        self._tail = ""
        self.taken = 0
        self.end = 0
        self.kept_logprobs: array[float] | None = None
        """Log-probabilities of positions [0, end), for a comparison with another answer. None: they are not kept."""
        self.stop_string: str | None = None
        """The stop string that ended the output; nothing may be fed afterwards."""

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary; only ids below it may be fed."""
        return self._detokenizer.vocabulary_size

    def feed(self, ids: Sequence[int], logprobs: Sequence[float] = (), alternatives: bytes = b"") -> int:
        """Add tokens at the end; return the number of used ones: fewer than given if a stop string ended the output.

        Missing log-probabilities are NaN. `alternatives`: as in frames.Row.
        """
        used = len(ids)
        if self._stop is None:
            text = self._detokenizer.feed(ids)
            if text:
                self._text.append(text)
        else:
            used = self._feed_until_stop(self._stop, ids)
        self._ids.extend(ids[:used])
        if self._logprobs is not None:
            known = logprobs if len(logprobs) == len(ids) else [float("nan")] * len(ids)
            self._logprobs.extend(known[:used])
            if self.kept_logprobs is not None:
                self.kept_logprobs.extend(known[:used])
        if self._alternatives is not None:
            size = len(alternatives) // len(ids) if ids else 0
            self._alternatives += [alternatives[at * size : (at + 1) * size] for at in range(used)]
        self.end += used
        return used

    def flush(self) -> None:
        """End the output: undecided text becomes certain. Not allowed after a stop string."""
        assert self.stop_string is None
        text = self._detokenizer.flush()
        if self._stop is not None:
            text = self._stop.feed(text)
            self.stop_string = self._stop.matched
            text += self._stop.flush()
        self._tail = text

    def forget_waiting(self) -> None:
        """Drop the waiting output: the client has it from another frontend."""
        self.take()

    def has_waiting(self) -> bool:
        """True if there is something to send."""
        return bool(self._ids or self._text or self._tail)

    def take(self) -> pb.Tokens | None:
        """Return the waiting output, or None; it counts as handed out. See `take_into`."""
        tokens = pb.Tokens()
        return tokens if self.take_into(tokens) else None

    def take_into(self, tokens: pb.Tokens | BareTokens) -> bool:
        """Put the waiting output into the empty message `tokens`; it counts as handed out. False: nothing waits.

        Text that became certain only by `flush` is a message of its own, the last.
        """
        if not self._ids and not self._text:
            if not self._tail:
                return False
            tokens.text, self._tail = self._tail, ""
            tokens.position = self.taken
            return True
        text = self._text
        if text:
            tokens.text = text[0] if len(text) == 1 else "".join(text)
            text.clear()
        tokens.ids.extend(self._ids)
        tokens.position = self.taken
        self._ids.clear()
        if self._logprobs:
            tokens.logprobs.extend(self._logprobs)
            self._logprobs.clear()
        if self._alternatives:
            tokens.top_logprobs.extend(map(_top_logprobs, self._alternatives))
            self._alternatives.clear()
        self.taken = self.end
        return True

    def _feed_until_stop(self, stop: StopStrings, ids: Sequence[int]) -> int:
        for index, each in enumerate(ids):
            text = self._detokenizer.feed((each,))
            if not text:
                continue
            certain = stop.feed(text)
            if certain:
                self._text.append(certain)
            if stop.matched is not None:
                self.stop_string = stop.matched
                return index + 1
        return len(ids)


def _top_logprobs(alternatives: bytes) -> pb.TopLogprobs:
    """Return one position's alternatives as a message. Id -1 stands for one that the engine did not report."""
    pairs = zip(*frames.unpack_alternatives(alternatives), strict=True)
    known = [(token_id, value) for token_id, value in pairs if token_id >= 0]
    return pb.TopLogprobs(ids=[each for each, _ in known], logprobs=[value for _, value in known])
