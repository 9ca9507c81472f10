"""Answers in OpenAI's form: events and whole bodies say the same, whatever messages the output comes in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.config import MeshConfig
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import ModelTokenizer
from services.frontend.requests.output import BareTokens, Output
from services.frontend.surface.openai.answer_format import (
    ChatKind,
    CompletionKind,
    EventStream,
    Facts,
    Kind,
    WholeAnswer,
)
from services.frontend.surface.openai.continuation import Continuation, position_of
from services.frontend.surface.openai.token_texts import TokenTexts

TOKENIZER = ModelTokenizer.load(MeshConfig().mesh.model_path)
STARTED = pb.Started(request_id="r", model_version="v")


def output(stop: Sequence[str] = ()) -> Output:
    return Output(TOKENIZER.detokenizer(), tuple(stop), with_logprobs=True)


def waiting(out: Output) -> Iterator[BareTokens]:
    """Yield all waiting output."""
    while out.take_into(tokens := BareTokens()):
        yield tokens


def messages(
    ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str]
) -> tuple[list[BareTokens], pb.Finished]:
    """Return the messages of an answer with tokens `ids` that are handed out at `cuts`."""
    out, made = output(stop), list[BareTokens]()
    for index, each in enumerate(ids):
        out.feed([each], [-0.5])
        if index in cuts:
            made += waiting(out)
        if out.stop_string is not None:
            break
    if out.stop_string is None:
        out.flush()
    made += waiting(out)
    reason = pb.FINISH_REASON_STOP_STRING if out.stop_string else pb.FINISH_REASON_LENGTH
    usage = pb.Usage(prompt_token_count=3, cached_token_count=2, output_token_count=out.end)
    return made, pb.Finished(finish_reason=reason, stop_string=out.stop_string or "", usage=usage)


def facts(kind: Kind, **options: bool) -> Facts:
    chosen = {"with_logprobs": False, "with_ids": False, **options}
    return Facts(kind, "m", 7, lambda _: TokenTexts(TOKENIZER), **chosen)


def events(data: bytes) -> list[tuple[int | None, Any]]:
    """Return id and content of each event."""
    found: list[tuple[int | None, Any]] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        text = lines["data"]
        found.append(
            (int(lines["id"]) if "id" in lines else None, text if text == "[DONE]" else json.loads(text))
        )
    return found


def streamed(
    tokens: Sequence[BareTokens], finished: pb.Finished, stream: EventStream
) -> list[tuple[int | None, Any]]:
    stream.started(STARTED)
    data = b"".join(stream.tokens(each) for each in tokens) + stream.finished(finished)
    return events(data)


def text_of(found: list[tuple[int | None, Any]]) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for _, event in found
        if event != "[DONE]"
        for choice in event["choices"]
    )


IDS = st.lists(st.integers(4, TOKENIZER.vocab_size - 1), min_size=1, max_size=30)
CUTS = st.sets(st.integers(0, 30))
STOPS = st.sampled_from([(), ("e",), ("th", "xyz")])


@given(IDS, CUTS, STOPS, st.booleans())
def test_a_stream_and_a_whole_answer_say_the_same(
    ids: list[int], cuts: set[int], stop: tuple[str, ...], is_chat: bool
) -> None:
    kind = ChatKind if is_chat else CompletionKind
    tokens, finished = messages(ids, sorted(cuts), stop)
    found = streamed(
        tokens, finished, EventStream(facts(kind(), with_ids=True), includes_usage=True, has_ids=True)
    )
    whole = WholeAnswer(facts(kind(), with_ids=True))
    whole.started(STARTED)
    assert all(whole.tokens(each) == b"" for each in tokens)
    body = json.loads(whole.finished(finished))
    (choice,) = body["choices"]
    assert text_of(found) == (choice["message"]["content"] if is_chat else choice["text"])
    assert found[-1] == (None, "[DONE]")
    assert found[-2][1]["usage"] == body["usage"]
    assert found[-2][1]["choices"] == []
    assert body["usage"]["total_tokens"] == 3 + finished.usage.output_token_count
    streamed_ids = [each for _, event in found[:-2] for each in event["choices"][0].get("token_ids", ())]
    assert streamed_ids == choice["token_ids"] == ids[: finished.usage.output_token_count]
    assert found[-3][1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@given(IDS, CUTS, STOPS, st.booleans())
def test_events_of_a_request_without_a_key_are_lines_of_data_alone(
    ids: list[int], cuts: set[int], stop: tuple[str, ...], is_chat: bool
) -> None:
    """The benchmarks of vLLM and SGLang cut `data: ` off each line, and decode the rest."""
    tokens, finished = messages(ids, sorted(cuts), stop)
    kind = ChatKind if is_chat else CompletionKind
    made = []
    for has_ids in (False, True):
        stream = EventStream(facts(kind()), includes_usage=True, has_ids=has_ids)
        stream.started(STARTED)
        made.append(b"".join(stream.tokens(each) for each in tokens) + stream.finished(finished))
    bare, with_ids = (data.decode().splitlines() for data in made)
    assert [line for line in with_ids if not line.startswith("id: ")] == bare
    assert all(line.startswith("data: ") for line in bare if line)


@given(IDS, CUTS, CUTS, STOPS, st.integers(0, 31))
def test_a_continuation_has_exactly_the_rest(
    ids: list[int], cuts: set[int], other_cuts: set[int], stop: tuple[str, ...], position: int
) -> None:
    """A client that has the events up to a position gets the rest, however the second execution cuts its output."""
    tokens, finished = messages(ids, sorted(cuts), stop)
    first = streamed(tokens, finished, EventStream(facts(ChatKind()), includes_usage=False, has_ids=True))
    positions = [each for each, _ in first if each is not None]
    position = max(each for each in positions if each <= position)
    had = [event for event in first if event[0] is not None and event[0] <= position]
    again, finished = messages(ids, sorted(other_cuts), stop)
    stream = EventStream(facts(ChatKind()), includes_usage=False, has_ids=True, begins=False)
    continuing = Continuation(position, output(stop))
    stream.started(STARTED)
    data = b""
    for each in again:
        rest = continuing.rest_of(each) if each.ids else each
        data += stream.tokens(rest) if rest is not None else b""
    stream.skips_close = continuing.has_end(finished)
    second = events(data + stream.finished(finished))
    assert text_of(had) + text_of(second) == text_of(first)
    closings = [
        event for _, event in had + second if event != "[DONE]" and event["choices"][0]["finish_reason"]
    ]
    assert len(closings) == 1
    later = [each for each, _ in second if each is not None]
    assert later == sorted(set(later)) and all(each > position for each in later)


def test_a_position_behind_the_end_is_refused() -> None:
    tokens, finished = messages([5, 6, 7], [], ())
    continuing = Continuation(5, output())
    assert continuing.rest_of(tokens[0]) is None
    with pytest.raises(MeshError) as caught:
        continuing.has_end(finished)
    assert caught.value.violations[0].field == "Last-Event-ID"
    assert Continuation(4, output()).has_end(finished)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 11, "\u0661"])
def test_an_event_id_is_a_number(text: str) -> None:
    with pytest.raises(MeshError):
        position_of(text)


def test_logprobs_have_the_bytes_of_their_tokens() -> None:
    tokens, finished = messages(TOKENIZER.encode_plain("naïve café"), [], ())
    tokens[0].top_logprobs.extend(pb.TopLogprobs(ids=[each], logprobs=[-0.1]) for each in tokens[0].ids)
    chat, text = (
        WholeAnswer(facts(ChatKind(), with_logprobs=True)),
        WholeAnswer(facts(CompletionKind(), with_logprobs=True)),
    )
    for whole in (chat, text):
        whole.started(STARTED)
        for each in tokens:
            whole.tokens(each)
    content = json.loads(chat.finished(finished))["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "naïve café"
    assert all(
        entry["logprob"] == -0.5 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in content
    )
    found = json.loads(text.finished(finished))["choices"][0]["logprobs"]
    assert found["text_offset"] == [sum(map(len, found["tokens"][:at])) for at in range(len(found["tokens"]))]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"])


@pytest.mark.parametrize(
    ("reason", "finish", "stop"),
    [
        (pb.FINISH_REASON_END_TOKEN, "stop", None),
        (pb.FINISH_REASON_STOP_STRING, "stop", "x"),
        (pb.FINISH_REASON_STOP_TOKEN, "stop", "stop_token"),
        (pb.FINISH_REASON_LENGTH, "length", None),
        (pb.FINISH_REASON_DEADLINE, "length", "deadline"),
    ],
)
def test_each_end_has_a_finish_reason(reason: Any, finish: str, stop: str | None) -> None:
    whole = WholeAnswer(facts(ChatKind()))
    whole.started(STARTED)
    body = json.loads(whole.finished(pb.Finished(finish_reason=reason, stop_string="x")))
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == (finish, stop)


def test_every_finish_reason_of_the_protocol_is_known() -> None:
    from services.frontend.surface.openai import answer_format

    assert set(answer_format._REASONS) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
