"""Each defect of an engine makes exactly the checks fail that are for it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engines.contract.errors import EngineError
from engines.contract.kv_events import BlocksStored, NumberedEvent
from engines.contract.outputs import RequestOutput
from engines.contract.request import EngineRequest, RequestKind
from engines.reference.handoff import decode
from engines.reference.sequence import Sequence
from kvmesh.conformance.checks.error_checks import LAST_TOKENS
from kvmesh.conformance.verdict import Outcome
from tests.unit.conformance.fake_server import MAX_SEQUENCE, FakeServer, Stream
from tests.unit.conformance.runs import by_outcome, failed, run

DELTAS = "streaming: deltas make up the one answer, without the prompt"
LENGTH, LONGEST = "finish: length", "limits: the longest sequence"
END, WORDS = "finish: end token", "finish: further end tokens"
CANCEL, STOP = (
    "cancel: a cancelled stream frees its blocks",
    "cancel: a stop request frees the blocks of its call",
)
CANCELS = "cancel: 24 cancels at random moments leave nothing"
EVENTS, AFTER = "kv_events: the blocks of a new prompt", "kv_events: after resumes"
PAIR, FIRST = (
    "disaggregated: tokens are those of an aggregated answer",
    "disaggregated: decode repeats the first token",
)
PULL = "disaggregated: a pull frees the handoff"
REPLAY, CUT = "disaggregated: a replayed handoff is refused", "disaggregated: a cut handoff is refused"
OTHER_PROMPT, MALFORMED = (
    "disaggregated: a handoff of another prompt is refused",
    "errors: a malformed handoff",
)
RELEASE = "release_handoff: a release frees the held blocks"
LOGPROBS, TOP = "logprobs: one for each token", "top_logprobs: the most likely tokens beside each token"
SEEDS, RESUME = (
    "seed: one seed gives the same tokens, others give others",
    "seeded_resume: a sampled answer goes on behind its first half",
)
BIAS, PENALTY = "logit_bias: a bias forces a token", "penalties: a penalty lets another token win"
LEAST, GUIDE = "min_tokens: the end token is delayed", "guided_output: a regular expression bounds the answer"
GUIDED_RESUME = "guided_resume: a guided answer goes on behind its first half"
REUSE, SHAPE = "reuse: a long prompt, asked twice", "load_report: shape"
STREAMING, EMPTY = "streaming: several responses before the end", "errors: an empty prompt"


def plain_streams(stream: Stream) -> bool:
    return stream.is_plain and stream.options.is_streaming


class RepeatsAToken(FakeServer):
    """The second response has the token of the first one again, in place of its own."""

    first: list[int]

    def send(self, stream: Stream, output: RequestOutput) -> None:
        if plain_streams(stream) and not stream.sent:
            self.first = output.tokens  # such calls run one at a time
        elif plain_streams(stream) and stream.sent == 1:
            output = replace(output, tokens=self.first)
        super().send(stream, output)


class LosesAToken(FakeServer):
    """The second response has no token."""

    def send(self, stream: Stream, output: RequestOutput) -> None:
        is_second = plain_streams(stream) and stream.sent == 1 and not output.is_final
        super().send(stream, replace(output, tokens=[]) if is_second else output)


class EchoesThePrompt(FakeServer):
    """A stream begins with the prompt."""

    def send(self, stream: Stream, output: RequestOutput) -> None:
        if plain_streams(stream) and not stream.sent:
            assert stream.request is not None
            output = replace(output, tokens=[*stream.request.prompt.tolist(), *output.tokens])
        super().send(stream, output)


class MiscountsTokens(FakeServer):
    """The output sequence_length is the length of the whole sequence."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        made = super().response(stream, output)
        if plain_streams(stream):
            made.raw_output_contents[1] = (100).to_bytes(4, "little")
        return made


class AnswersAtOnce(FakeServer):
    """Streams have one response, as without streaming."""

    def take(self, stream: Stream) -> None:
        super().take(stream)
        if stream.is_plain:
            stream.options = replace(stream.options, is_streaming=False)


class ForeignTokens(FakeServer):
    """The last token is outside the vocabulary."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        if stream.is_plain and output.is_final:
            output = replace(output, tokens=[-5])
        return super().response(stream, output)


class StopsEarly(FakeServer):
    """An answer of 16 tokens has 15."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, output_tokens_max=15) if request.output_tokens_max == 16 else request


class IgnoresEndId(FakeServer):
    """The answer goes on behind end_id, not behind stop words."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        has_least = request.adjustments.output_tokens_min
        return replace(request, end_ids=frozenset()) if request.end_ids and not has_least else request


class LeaksABlock(FakeServer):
    """Each cancelled call leaves a block, that of a stopped one not."""

    leaked = 0

    def cancel(self, sequence: Sequence) -> None:
        super().cancel(sequence)
        self.leaked += 1

    def load(self) -> dict[str, Any]:
        report = super().load()
        return {**report, "blocks_free": report["blocks_free"] - self.leaked}


class LeaksSeldom(LeaksABlock):
    """A call that is cancelled before its first token leaves a block."""

    def cancel(self, sequence: Sequence) -> None:
        before = self.leaked
        super().cancel(sequence)
        self.leaked = before + (not sequence.generated)


class LeaksAtStop(LeaksABlock):
    """A stopped call leaves a block."""

    def cancel(self, sequence: Sequence) -> None:
        FakeServer.cancel(self, sequence)

    def stop(self, request_id: str) -> None:
        self.leaked += 1
        super().stop(request_id)


class NeverFrees(FakeServer):
    """A cancelled call stays in the engine for ever."""

    def cancel(self, sequence: Sequence) -> None:
        sequence.is_hung = True


class FreesLate(FakeServer):
    """A cancelled call runs to its end."""

    def cancel(self, sequence: Sequence) -> None:
        pass


class WrongEventTokens(FakeServer):
    """Events tell other tokens."""

    def tell_events(self, stream: Stream, events: Tokens[NumberedEvent]) -> None:
        super().tell_events(stream, [self._broken(each) for each in events])

    def _broken(self, one: NumberedEvent) -> NumberedEvent:
        event = one.event
        if not isinstance(event, BlocksStored):
            return one
        blocks = tuple((value, tokens[4:] + tokens[:4]) for value, tokens in event.blocks)
        return NumberedEvent(one.event_id, BlocksStored(event.parent, blocks))


class OrphanEvents(WrongEventTokens):
    """Events tell each block without its parent."""

    def tell_events(self, stream: Stream, events: Tokens[NumberedEvent]) -> None:
        for one in events:
            if isinstance(one.event, BlocksStored):
                event = BlocksStored(None, one.event.blocks[-1:])
                FakeServer.tell_events(self, stream, [NumberedEvent(one.event_id, event)])


class EventGap(FakeServer):
    """Event ids jump."""

    def tell_events(self, stream: Stream, events: Tokens[NumberedEvent]) -> None:
        super().tell_events(stream, [NumberedEvent(2 * each.event_id, each.event) for each in events])


class SilentEvents(FakeServer):
    """No event comes behind the snapshot."""

    def tell_events(self, stream: Stream, events: Tokens[NumberedEvent]) -> None:
        pass


class NoReuse(FakeServer):
    """Nothing is reused."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        if output.perf is not None:
            output = replace(output, perf=replace(output.perf, reused_blocks=0))
        return super().response(stream, output)


class LosesFirstToken(FakeServer):
    """Decode begins behind the first token of the prefill."""

    def send(self, stream: Stream, output: RequestOutput) -> None:
        is_decode = stream.request is not None and stream.request.kind is RequestKind.GENERATION_ONLY
        if is_decode and not stream.sent:
            output = replace(output, tokens=output.tokens[1:])
        super().send(stream, output)


class WrongDecode(FakeServer):
    """The third token of decode is wrong: the KV cache was damaged."""

    def send(self, stream: Stream, output: RequestOutput) -> None:
        is_decode = stream.request is not None and stream.request.kind is RequestKind.GENERATION_ONLY
        super().send(
            stream,
            replace(output, tokens=[999]) if is_decode and stream.sent == 2 and output.tokens else output,
        )


class TakesReplays(FakeServer):
    """A handoff can be pulled again and again."""

    def begin_send(self, handoff_id: int) -> list[int] | None:
        held = super().begin_send(handoff_id)
        return list(range(8)) if held is None else held


class TakesAnyBlob(FakeServer):
    """A handoff that cannot be read is answered as if the call were aggregated."""

    def submit(self, stream: Stream, request: EngineRequest) -> None:
        try:
            super().submit(stream, request)
        except EngineError:
            kind = RequestKind.CONTEXT_AND_GENERATION
            super().submit(stream, replace(request, kind=kind, context_phase_params=b""))


PREFILLED: set[bytes] = set()
"""Prompts of handoffs."""


class TakesAnyPrompt(FakeServer):
    """A handoff of another prompt is answered as if the call were aggregated."""

    def submit(self, stream: Stream, request: EngineRequest) -> None:
        if request.kind is RequestKind.GENERATION_ONLY:
            decode(request.context_phase_params)
            if request.prompt.tobytes() not in PREFILLED:
                kind = RequestKind.CONTEXT_AND_GENERATION
                request = replace(request, kind=kind, context_phase_params=b"")
        elif request.kind is RequestKind.CONTEXT_ONLY:
            PREFILLED.add(request.prompt.tobytes())
        super().submit(stream, request)


class IgnoresRelease(FakeServer):
    """release_handoff does nothing."""

    def release(self, blob: bytes) -> None:
        pass


class LosesALogprob(FakeServer):
    """One response lacks its log-probability."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        if stream.sent == 3:
            output = replace(output, log_probs=[])
        return super().response(stream, output)


class PositiveLogprobs(FakeServer):
    """Log-probabilities have no sign."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        output = replace(output, log_probs=[-value for value in output.log_probs])
        return super().response(stream, output)


class LosesAlternatives(FakeServer):
    """One token lacks its alternatives."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        if stream.sent == 3:
            output = replace(output, top_ids=[], top_log_probs=[])
        return super().response(stream, output)


class IgnoresSeed(FakeServer):
    """Each call has a seed of its own."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, sampling=replace(request.sampling, seed=stream.key))


class OneSeed(FakeServer):
    """All seeds are one."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, sampling=replace(request.sampling, seed=7))


class SeedByCall(FakeServer):
    """The draws depend on the position in the call, so a resumed call draws others."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        seed = request.sampling.seed + len(request.prompt)
        return replace(request, sampling=replace(request.sampling, seed=seed))


class IgnoresBias(FakeServer):
    """A bias changes nothing."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, adjustments=replace(request.adjustments, bias=None))


class IgnoresPenalty(FakeServer):
    """A penalty changes nothing."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, adjustments=replace(request.adjustments, frequency_penalty=0.0))


class IgnoresLeast(FakeServer):
    """min_tokens changes nothing."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, adjustments=replace(request.adjustments, output_tokens_min=0))


class IgnoresGuide(FakeServer):
    """A guide changes nothing."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        return replace(request, guide=None)


class HangsAtAnError(FakeServer):
    """An empty prompt gets neither an error nor an end."""

    def refuse(self, stream: Stream, text: str) -> None:
        if "prompt of" not in text:
            super().refuse(stream, text)


class DiesOfAnError(FakeServer):
    """An empty prompt ends the engine."""

    def refuse(self, stream: Stream, text: str) -> None:
        self.is_alive = self.is_alive and "prompt of" not in text
        super().refuse(stream, text)


class WrongLoad(FakeServer):
    """More blocks are free than there are."""

    def load(self) -> dict[str, Any]:
        return {**super().load(), "blocks_free": 1000}


class LoadWithoutBoot(FakeServer):
    """Load reports lack the boot id."""

    def report(self, stream: Stream) -> None:
        report = self.load()
        del report["boot_id"]
        self.tell(stream, "load_report", msgspec.json.encode(report))


class NoHeartbeat(FakeServer):
    """A load report comes once."""

    def report(self, stream: Stream) -> None:
        if stream.sent_bytes == 0 or len(self.loads) == 1:  # the watch, which is alone at first, has all
            super().report(stream)


class NotTheLongest(FakeServer):
    """The longest sequence is refused."""

    def taken(self, request: EngineRequest, stream: Stream) -> EngineRequest:
        if len(request.prompt) == MAX_SEQUENCE - LAST_TOKENS:
            raise EngineError("Invalid value for input_ids: too many")
        return request


FOUND: dict[type[FakeServer], set[str]] = {
    RepeatsAToken: {DELTAS, PAIR},
    LosesAToken: {DELTAS, LENGTH, LONGEST, PAIR},
    EchoesThePrompt: {DELTAS, LENGTH, LONGEST, PAIR},
    MiscountsTokens: {DELTAS},
    AnswersAtOnce: {STREAMING},
    ForeignTokens: {DELTAS, END, WORDS, PAIR},
    StopsEarly: {LENGTH, LOGPROBS, BIAS, RESUME, GUIDED_RESUME},
    IgnoresEndId: {END, WORDS},
    LeaksABlock: {CANCEL, CANCELS},
    LeaksSeldom: {CANCELS},
    LeaksAtStop: {STOP, CANCELS},
    NeverFrees: {CANCEL},
    FreesLate: {CANCEL},
    WrongEventTokens: {EVENTS, AFTER},
    OrphanEvents: {EVENTS, AFTER},
    EventGap: {EVENTS, AFTER},
    SilentEvents: {EVENTS, AFTER},
    NoReuse: {REUSE},
    LosesFirstToken: {PAIR, FIRST},
    WrongDecode: {PAIR},
    TakesReplays: {REPLAY},
    TakesAnyPrompt: {OTHER_PROMPT},
    TakesAnyBlob: {CUT, MALFORMED},
    IgnoresRelease: {RELEASE},
    LosesALogprob: {LOGPROBS},
    PositiveLogprobs: {LOGPROBS},
    LosesAlternatives: {TOP},
    IgnoresSeed: {SEEDS, RESUME},
    OneSeed: {SEEDS},
    SeedByCall: {RESUME},
    IgnoresBias: {BIAS, PENALTY},
    IgnoresPenalty: {PENALTY},
    IgnoresLeast: {LEAST},
    IgnoresGuide: {GUIDE},
    HangsAtAnError: {EMPTY},
    DiesOfAnError: {EMPTY},
    WrongLoad: {SHAPE},
    LoadWithoutBoot: {SHAPE},
    NoHeartbeat: {SHAPE},
    NotTheLongest: {LONGEST},
}
"""Defect -> the checks that must fail."""


@pytest.mark.parametrize("defect", FOUND, ids=lambda defect: defect.__name__)
def test_a_defect_fails_exactly_its_checks(defect: type[FakeServer]) -> None:
    """All other checks pass, are not judged, or name a fallback."""
    rows, _ = run(defect, pair=defect)
    found = failed(rows)
    assert set(found) == FOUND[defect], found


def test_a_sound_engine_passes_all_checks() -> None:
    """Whatever the seed: nothing fails, and nothing is left in the engine. The fake has no step frames."""
    for _ in range(2):
        seed = random.Random().randrange(1 << 32)
        rows, server = run(seed=seed)
        expected = {f"{row.capability}: {row.check}" for row in rows if row.capability != "step_frames"}
        assert set(by_outcome(rows, Outcome.PASS)) == expected, seed
        assert server.is_empty(), seed
