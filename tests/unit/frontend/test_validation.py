"""Invalid input: each wrong field is named, with its value and its range."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MAX_VIOLATIONS, MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.template_budget import MESSAGES_MAX
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import SECRET_BYTES, ResumeToken, Seal
from services.frontend.requests.takeover import AttemptLocation
from services.frontend.surface import validation, wire
from services.frontend.surface.validation import Bounds

BOUNDS = Bounds(
    model="reference",
    model_version="v1",
    vocab_size=4096,
    token_bytes_max=15,
    max_sequence_tokens=4096,
    max_output_tokens_default=256,
    max_output_tokens_max=1024,
)
NAN, INFINITE = float("nan"), float("inf")
SEAL = Seal(bytes(range(SECRET_BYTES)))
TOKEN = ResumeToken("0" * 31 + "1", 7, 0, 99, "v1")


def good(change: Callable[[pb.GenerateRequest], object] = lambda _: None) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text="Hello")
    change(message)
    return message


def resumed(token: bytes, ids: list[int]) -> Callable[[pb.GenerateRequest], object]:
    resume = pb.Resume(resume_token=token, received_token_ids=ids)
    return lambda message: message.options.resume.CopyFrom(resume)


def sampling(**fields: object) -> Callable[[pb.GenerateRequest], object]:
    return lambda message: message.sampling.CopyFrom(pb.Sampling(**fields))  # type: ignore[arg-type]


def limits(**fields: object) -> Callable[[pb.GenerateRequest], object]:
    return lambda message: message.limits.CopyFrom(pb.Limits(**fields))  # type: ignore[arg-type]


def chat(*messages: tuple[int, str]) -> Callable[[pb.GenerateRequest], object]:
    rows = [pb.ChatMessage(role=role, content=content) for role, content in messages]  # type: ignore[arg-type]
    return lambda message: message.chat.CopyFrom(pb.ChatPrompt(messages=rows))


def tokens(*ids: int) -> Callable[[pb.GenerateRequest], object]:
    return lambda message: message.tokens.CopyFrom(pb.TokenPrompt(ids=ids))


BAD = [
    (lambda message: message.Clear(), "prompt", "not there", "one of text, chat and tokens"),
    (lambda message: setattr(message, "text", ""), "text", "empty", "1 character"),
    (tokens(), "tokens.ids", "empty", "1 token"),
    (tokens(1, 4096), "tokens.ids[1]", "4096", "0 to 4095"),
    (tokens(-1), "tokens.ids[0]", "-1", "0 to 4095"),
    (chat(), "chat.messages", "empty", "1 message"),
    (chat((2, "")), "chat.messages", "without any content", "1 character"),
    (chat((2, "Hi"), (0, "x")), "chat.messages[1].role", "0", "1 to 4"),
    (chat((9, "Hi")), "chat.messages[0].role", "9", "1 to 4"),
    (sampling(temperature=NAN), "sampling.temperature", "nan", "0 to 10"),
    (sampling(temperature=INFINITE), "sampling.temperature", "inf", "0 to 10"),
    (sampling(temperature=-0.5), "sampling.temperature", "-0.5", "0 to 10"),
    (sampling(temperature=10.5), "sampling.temperature", "10.5", "0 to 10"),
    (sampling(top_p=0.0), "sampling.top_p", "0", "above 0 to 1"),
    (sampling(top_p=1.5), "sampling.top_p", "1.5", "above 0 to 1"),
    (sampling(top_p=NAN), "sampling.top_p", "nan", "above 0 to 1"),
    (sampling(top_k=-1), "sampling.top_k", "-1", "0 to 1000000"),
    (sampling(top_k=1_000_001), "sampling.top_k", "1000001", "0 to 1000000"),
    (sampling(stop=["x"] * 17), "sampling.stop", "17 strings", "at most 16"),
    (sampling(stop=["x", ""]), "sampling.stop[1]", "0 characters", "1 to 256"),
    (sampling(stop=["x" * 257]), "sampling.stop[0]", "257 characters", "1 to 256"),
    (sampling(frequency_penalty=2.5), "sampling.frequency_penalty", "2.5", "-2 to 2"),
    (sampling(presence_penalty=NAN), "sampling.presence_penalty", "nan", "-2 to 2"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "0", "0.01 to 10"),
    (sampling(repetition_penalty=INFINITE), "sampling.repetition_penalty", "inf", "0.01 to 10"),
    (sampling(logit_bias={-1: 1.0}), "sampling.logit_bias[-1]", "unknown token", "0 to"),
    (sampling(logit_bias={4: 101.0}), "sampling.logit_bias[4]", "101", "-100 to 100"),
    (sampling(logit_bias={4: NAN}), "sampling.logit_bias[4]", "nan", "-100 to 100"),
    (sampling(min_tokens=-1), "sampling.min_tokens", "-1", "0 to"),
    (sampling(min_tokens=100_000), "sampling.min_tokens", "100000", "output tokens of the request"),
    (sampling(stop_token_ids=[1, -2]), "sampling.stop_token_ids[1]", "-2", "0 to"),
    (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "65 ids", "at most 64"),
    (sampling(n=2), "sampling.n", "2", "several outputs"),
    (sampling(guide=pb.Guide()), "sampling.guide", "empty", "json_schema, regex and json"),
    (sampling(guide=pb.Guide(json=False)), "sampling.guide", "empty", "json_schema, regex and json"),
    (sampling(guide=pb.Guide(regex="")), "sampling.guide.regex", "0 bytes", "1 to 65536"),
    (sampling(guide=pb.Guide(json_schema="{")), "sampling.guide.json_schema", "not JSON", "a JSON schema"),
    (
        sampling(guide=pb.Guide(json_schema="[" * 9000)),
        "sampling.guide.json_schema",
        "not JSON",
        "a JSON schema",
    ),
    (
        sampling(guide=pb.Guide(json_schema="x" * 70_000)),
        "sampling.guide.json_schema",
        "70000 bytes",
        "65536",
    ),
    (
        lambda message: setattr(message.options, "top_logprobs", 21),
        "options.top_logprobs",
        "21",
        "0 to 20",
    ),
    (limits(max_output_tokens=0), "limits.max_output_tokens", "0", "1 to 1024"),
    (limits(max_output_tokens=-5), "limits.max_output_tokens", "-5", "1 to 1024"),
    (limits(max_output_tokens=1025), "limits.max_output_tokens", "1025", "1 to 1024"),
    (limits(priority=101), "limits.priority", "101", "-100 to 100"),
    (limits(ttft_timeout={"seconds": -1}), "limits.ttft_timeout", "-1 s", "0.001 s to 3600 s"),
    (limits(ttft_timeout={}), "limits.ttft_timeout", "0 s", "0.001 s to 3600 s"),
    (limits(ttft_timeout={"seconds": 3601}), "limits.ttft_timeout", "3601 s", "0.001 s to 3600 s"),
    (
        lambda message: setattr(message, "session_id", "s" * 129),
        "session_id",
        "129 characters",
        "at most 128",
    ),
    (
        lambda message: setattr(message, "idempotency_key", "k" * 129),
        "idempotency_key",
        "129 characters",
        "at most 128",
    ),
    (lambda message: setattr(message, "model", "other"), "model", "'other'", "'reference'"),
    (resumed(TOKEN.pack(SEAL), [5000]), "options.resume.received_token_ids[0]", "5000", "0 to 4095"),
    (resumed(b"", []), "options.resume.resume_token", "0 bytes", "a resume token"),
    (resumed(b"k\x02" + b"x" * 60, []), "options.resume.resume_token", "signature", "a resume token"),
    (
        resumed(TOKEN.pack(Seal(bytes(SECRET_BYTES))), []),
        "options.resume.resume_token",
        "signature",
        "a resume token",
    ),
    (
        resumed(ResumeToken("0" * 32, 1, 0, 0, "v2").pack(SEAL), []),
        "options.resume.resume_token",
        "'v2'",
        "'v1'",
    ),
    (
        resumed(ResumeToken("0" * 32, 1, 65_280, 0, "v1").pack(SEAL), []),
        "options.resume.resume_token",
        "254 times",
        "fewer",
    ),
    (
        lambda message: setattr(message, "text", "x" * (4096 * 15 + 1)),
        "text",
        "61441 bytes",
        "at most 4095 tokens",
    ),
]


@pytest.mark.parametrize(
    ("change", "field", "value", "allowed"), BAD, ids=[f"{row[1]}={row[2]}" for row in BAD]
)
def test_a_bad_field_is_named_with_value_and_range(
    change: Callable[[pb.GenerateRequest], object], field: str, value: str, allowed: str
) -> None:
    """An error names each bad field, its value and its range, so that the client can repair the request."""
    with pytest.raises(MeshError) as caught:
        validation.check(good(change), BOUNDS, SEAL)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    (violation, *_) = caught.value.violations
    assert violation.field == field
    assert value in violation.value
    assert allowed in violation.allowed
    assert field in caught.value.message and value in caught.value.message


def test_all_violations_are_reported_at_once() -> None:
    """One answer lists all violations of a request."""
    message = pb.GenerateRequest(sampling=pb.Sampling(top_p=0, top_k=-1), model="x")
    with pytest.raises(MeshError) as caught:
        validation.check(message, BOUNDS, SEAL)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["prompt", "sampling.top_p", "sampling.top_k", "model"]


def test_defaults_are_filled_in() -> None:
    """Fields that are not set get their defaults."""
    asked = validation.check(good(), BOUNDS, SEAL)
    found = asked.sampling.resolved
    assert (found.temperature, found.top_p, found.top_k, asked.seed) == (1.0, 1.0, 0, None)
    assert (asked.max_output_tokens, asked.priority, asked.ttft_timeout_s) == (256, 0, None)


def test_presence_counts_where_zero_means_something() -> None:
    """A field set to 0 counts as set: temperature 0 is greedy and seed 0 is a seed."""
    asked = validation.check(good(sampling(temperature=0.0, seed=0)), BOUNDS, SEAL)
    assert (asked.sampling.resolved.temperature, asked.seed) == (0.0, 0)


@pytest.mark.parametrize(("prompt", "output"), [(1, 256), (4095, 1), (4000, 96)])
def test_output_is_cut_where_the_context_ends(prompt: int, output: int) -> None:
    """Near the end of the context, the output limit is the rest of the context, at least one token."""
    assert validation.fit(validation.check(good(), BOUNDS, SEAL), prompt, BOUNDS) == output


@pytest.mark.parametrize("prompt", [0, 4096, 9999])
def test_a_prompt_without_room_is_refused(prompt: int) -> None:
    """A prompt that fills the context is refused, with its number of tokens and the allowed range."""
    with pytest.raises(MeshError, match=rf"text is {prompt} tokens; 1 to 4095"):
        validation.fit(validation.check(good(), BOUNDS, SEAL), prompt, BOUNDS)


def test_more_output_than_allowed_cannot_be_resumed() -> None:
    """A resume with more received tokens than the output limit is refused."""
    asked = validation.check(good(resumed(TOKEN.pack(SEAL), [5] * 300)), BOUNDS, SEAL)
    with pytest.raises(MeshError, match="at most 256 tokens"):
        validation.fit(asked, 10, BOUNDS)


@pytest.mark.parametrize(
    "change",
    [
        sampling(temperature=0.5),
        sampling(top_p=0.5),
        sampling(top_k=5),
        sampling(stop=["x"]),
        limits(max_output_tokens=7),
    ],
)
def test_a_resumed_request_must_be_as_it_was(change: Callable[[pb.GenerateRequest], object]) -> None:
    """A resumed request must have the same digest, which covers every field that shapes the output."""
    asked = validation.check(good(), BOUNDS, SEAL)
    digest = validation.digest(asked, b"\5\0\0\0", validation.fit(asked, 1, BOUNDS))
    message = good(change)
    token = ResumeToken("0" * 32, 7, 0, digest, "v1").pack(SEAL)
    resumed(token, [])(message)
    changed = validation.check(message, BOUNDS, SEAL)
    with pytest.raises(MeshError, match="differs from this one"):
        validation.check_resumed(
            changed, validation.digest(changed, b"\5\0\0\0", validation.fit(changed, 1, BOUNDS))
        )
    same = validation.check(good(resumed(token, [])), BOUNDS, SEAL)
    validation.check_resumed(same, digest)


@pytest.mark.parametrize("limit", [None, 1024, 900])
def test_a_lower_bound_does_not_end_a_granted_request(limit: int | None) -> None:
    """A resume is held to the limit of its token, not to a lower limit set since.

    A resume token of another request is still refused.
    """
    asked = validation.check(good(limits(max_output_tokens=1024)), BOUNDS, SEAL)
    digest = validation.digest(asked, b"\5\0\0\0", validation.fit(asked, 1, BOUNDS))
    token = ResumeToken("0" * 32, 7, 0, digest, "v1", AttemptLocation(1, "decode-0"), 1024, 1024).pack(SEAL)
    lower, message = BOUNDS.up_to(20), good(resumed(token, [5] * 30))
    if limit is not None:
        message.limits.max_output_tokens = limit
    again = validation.check(message, lower, SEAL)
    found = validation.digest(again, b"\5\0\0\0", validation.fit(again, 1, lower))
    if limit == 900:
        with pytest.raises(MeshError, match="differs from this one"):
            validation.check_resumed(again, found)
    else:
        validation.check_resumed(again, found)


def test_a_resumed_request_keeps_its_seed() -> None:
    """A resumed request keeps its seed, since another seed would give another answer."""
    message = good(sampling(seed=8))
    resumed(TOKEN.pack(SEAL), [])(message)
    with pytest.raises(MeshError, match=r"sampling\.seed is 8"):
        validation.check_resumed(validation.check(message, BOUNDS, SEAL), TOKEN.digest)


@given(
    st.builds(
        ResumeToken,
        st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}"),
        st.integers(0, 2**64 - 1),
        st.integers(0, 65_535),
        st.integers(0, 2**64 - 1),
        st.text(max_size=20),
    ),
    st.none() | st.builds(AttemptLocation, st.integers(0, 65_535), st.text(max_size=20)),
    st.sampled_from(("", "next", "a" * 64, "\N{SNOWMAN}")),
    st.data(),
)
def test_a_resume_token_reads_back_and_never_reads_wrong(
    token: ResumeToken, location: AttemptLocation | None, pool: str, data: st.DataObject
) -> None:
    """A resume token reads back as it was packed, or raises an error. Without a pool it is of an earlier version."""
    token = replace(token, pool=pool)
    if location is not None:
        token = replace(
            token,
            location=location,
            asked_output_tokens=300,
            max_output_tokens=data.draw(st.integers(0, 300)),
            issued_s=data.draw(st.sampled_from((0, 1, 1_800_000_000, 2**32 - 1))),
        )
    packed = token.pack(SEAL)
    assert resume_token.unpack(packed, SEAL) == token
    assert (packed[1] == 5) is bool(pool) and len(packed) <= resume_token.TOKEN_BYTES_MAX
    at = data.draw(st.integers(0, len(packed) - 1))
    broken = bytearray(packed)
    broken[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(resume_token.ResumeTokenError):
        resume_token.unpack(bytes(broken), SEAL)


LAST_RELEASE = (
    (
        "6b0200000000000000000000000000000001070000000000000000006300000000000000027631"
        "b006126efac164a0af6ac2df6747b4ba"
    ),
    (
        "6b03000000000000000000000000000000010700000000000000000063000000000000000276310300086465636f64652d30"
        "0900000008000000d0a142ed109b6ad734c5e90f06b525e2"
    ),
    (
        "6b04000000000000000000000000000000010700000000000000000063000000000000000276310300086465636f64652d30"
        "090000000800000000d2496b2f9c6935b935a79e747019811676a042"
    ),
)
"""Tokens that release 0.1.0 made with SEAL: without a location, with a location, and with a time of issue."""


def test_tokens_of_the_default_pool_are_those_of_the_last_release() -> None:
    """A mesh without pools writes the bytes of release 0.1.0, so that its frontends read them, and reads its tokens."""
    located = replace(
        TOKEN, location=AttemptLocation(3, "decode-0"), asked_output_tokens=9, max_output_tokens=8
    )
    dated = replace(located, issued_s=1_800_000_000)
    for token, text in zip((TOKEN, located, dated), LAST_RELEASE, strict=True):
        assert replace(token, pool="default").pack(SEAL).hex() == token.pack(SEAL).hex() == text
        assert resume_token.unpack(bytes.fromhex(text), SEAL) == token


def test_a_token_holds_over_one_change_of_the_secret() -> None:
    """A resume token is valid over one change of the mesh's secret, and invalid after two."""
    seal = Seal(b"1" * SECRET_BYTES)
    packed = TOKEN.pack(seal)
    assert not seal.take(b"1" * SECRET_BYTES)
    assert seal.take(b"2" * SECRET_BYTES)
    assert resume_token.unpack(packed, seal) == TOKEN
    assert TOKEN.pack(seal) != packed
    assert seal.take(b"3" * SECRET_BYTES)
    with pytest.raises(resume_token.ResumeTokenError):
        resume_token.unpack(packed, seal)


def field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field."""
    size, out = len(value), bytearray([number << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes([size]) + value


WIRE = [
    (field(1, b"ok\xff\xfe"), "INVALID_UTF8", "text", "ff fe at offset 2"),
    (
        field(2, field(1, b"\x08\x02" + field(2, b"fine")) + field(1, field(2, b"\xc3("))),
        "INVALID_UTF8",
        "chat.messages[1].content",
        "c3 28 at offset 0",
    ),
    (field(4, field(5, b"a") + field(5, b"\x80")), "INVALID_UTF8", "sampling.stop[1]", "80 at offset 0"),
    (field(6, b"\xed\xa0\x80") + field(1, b"x"), "INVALID_UTF8", "session_id", "ed a0 80"),
    (field(1, b"Hello")[:-2], "MESSAGE_MALFORMED", "(message)", "5 bytes, 3 of them"),
    (b"\x0a", "MESSAGE_MALFORMED", "(message)", "end inside a number"),
    (b"\x0b", "MESSAGE_MALFORMED", "(message)", "wire type 3"),
    (field(1, b"x") + b"\x98\x06\x07", "FIELD_UNKNOWN", "99", "unknown field 99"),
    (field(1, b"x") + field(4, b"\xf8\x01\x01"), "FIELD_UNKNOWN", "sampling.31", "unknown field 31"),
    (
        field(2, field(1, b"\x08\x02" + field(2, b"x") + b"\x78\x01")),
        "FIELD_UNKNOWN",
        "chat.messages[0].15",
        "unknown field 15",
    ),
    (field(1, b"x" * 2000), "MESSAGE_TOO_LARGE", "(message)", "2003 bytes"),
]


@pytest.mark.parametrize(
    ("data", "reason", "path", "value"), WIRE, ids=[f"{row[1]}-{row[2]}" for row in WIRE]
)
def test_bytes_of_an_invalid_request_are_named(data: bytes, reason: str, path: str, value: str) -> None:
    """An encoded request that is invalid gets an error with the position of the fault.

    protobuf reports only that parsing failed.
    """
    with pytest.raises(MeshError) as caught:
        wire.parse(data, 1024, BOUNDS.max_sequence_tokens)
    assert caught.value.reason == reason
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert caught.value.violations[0].field == path
    assert value in caught.value.violations[0].value


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def large(number: int, value: bytes) -> bytes:
    """Return a length-delimited field of any length."""
    return varint(number << 3 | 2) + varint(len(value)) + value


MIB4 = (4 << 20) - 64
FLOODS = {
    "empty chat messages": (large(2, b"\x0a\x00" * (MIB4 // 2)), "chat.messages"),
    "unknown fields": (b"\x0a\x01x" + b"\xf8\x07\x01" * (MIB4 // 3), "(message)"),
    "unknown fields of a message": (
        large(2, large(1, b"\x08\x02" + b"\xf8\x07\x01" * (MIB4 // 3))),
        "chat.messages",
    ),
    "unknown groups": (b"\x0a\x01x" + b"\xfb\x07\xfc\x07" * (MIB4 // 4), "(message)"),
    "token ids": (large(3, large(1, b"\x01" * MIB4)), "tokens.ids"),
    "token ids one by one": (large(3, b"\x08\x01" * (MIB4 // 2)), "tokens"),
    "packed token ids in many pieces": (large(3, b"\x0a\x01\x05" * (MIB4 // 3)), "tokens.ids"),
    "many prompts": (large(3, b"\x0a\x01\x05") * (MIB4 // 5), "tokens.ids"),
    "received tokens": (
        b"\x0a\x01x" + large(8, large(2, large(2, b"\x01" * MIB4))),
        "options.resume.received_token_ids",
    ),
    "stop strings": (b"\x0a\x01x" + large(4, b"\x2a\x00" * (MIB4 // 2)), "sampling.stop"),
    "malformed": (b"\x18\x01" * (MIB4 // 2) + b"\x0a\x7f", "(message)"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_fields_is_refused_before_it_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with too many fields is refused before protobuf parses it, after bounded work.

    4 MiB may hold millions of fields.
    """
    data, path = FLOODS[name]
    monkeypatch.setattr(pb.GenerateRequest, "ParseFromString", None)
    looked = 0
    varint_of = wire._varint

    def counted(data: bytes, at: int, path: str) -> tuple[int, int]:
        nonlocal looked
        looked += 1
        return varint_of(data, at, path)

    monkeypatch.setattr(wire, "_varint", counted)
    with pytest.raises(MeshError) as caught:
        wire.parse(data, 4 << 20, BOUNDS.max_sequence_tokens)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert caught.value.violations[0].field == path
    assert len(caught.value.violations) == 1
    assert looked <= 3 * wire.fields_bound(BOUNDS.max_sequence_tokens)


def test_the_longest_good_requests_pass() -> None:
    """The longest valid requests pass: every token of the context, in every encoding."""
    ids = [4095] * 4000
    for change in (
        tokens(*ids),
        chat(*[(2, "x")] * 4096),
        resumed(TOKEN.pack(SEAL), [*ids]),
    ):
        data = good(change).SerializeToString()
        assert len(data) > 8000
        validation.check(wire.parse(data, 4 << 20, BOUNDS.max_sequence_tokens), BOUNDS, SEAL)
    one_by_one = large(3, b"".join(b"\x08" + varint(each) for each in ids))
    message = wire.parse(one_by_one, 4 << 20, BOUNDS.max_sequence_tokens)
    assert validation.check(message, BOUNDS, SEAL).token_ids == tuple(ids)


@pytest.mark.parametrize(
    ("change", "path", "value", "reason"),
    [
        (tokens(*[5] * 4096), "tokens.ids", "4096 tokens", "PROMPT_TOO_LONG"),
        (tokens(*[-1] * 4096), "tokens.ids", "4096 tokens", "PROMPT_TOO_LONG"),
        (chat(*[(0, "")] * 4097), "chat.messages", "4097 messages", "PROMPT_TOO_LONG"),
        (
            resumed(TOKEN.pack(SEAL), [-1] * 4096),
            "options.resume.received_token_ids",
            "4096 tokens",
            "FIELD_OUT_OF_RANGE",
        ),
    ],
)
def test_a_list_that_is_too_long_is_counted_and_not_read(
    change: Callable[[pb.GenerateRequest], object], path: str, value: str, reason: str
) -> None:
    """A list too long for the context is refused as a whole; its items are not read."""
    with pytest.raises(MeshError) as caught:
        validation.check(good(change), BOUNDS, SEAL)
    assert caught.value.reason == reason
    assert [(each.field, each.value) for each in caught.value.violations] == [(path, value)]


@pytest.mark.parametrize("value", [0.01, 10.0])
def test_the_bounds_of_the_repetition_penalty_are_allowed(value: float) -> None:
    """The message carries 32 bits: the nearest number to 0.01 is below it."""
    validation.check(good(sampling(repetition_penalty=value)), BOUNDS, SEAL)


def test_a_conversation_has_at_most_as_many_messages_as_the_check_of_a_template() -> None:
    """However long the context is: a rendering at run time takes no more than the longest one at start."""
    bounds = replace(BOUNDS, max_sequence_tokens=1_000_000)
    validation.check(good(chat(*[(2, "x")] * MESSAGES_MAX)), bounds, SEAL)
    with pytest.raises(MeshError) as caught:
        validation.check(good(chat(*[(2, "x")] * (MESSAGES_MAX + 1))), bounds, SEAL)
    (violation,) = caught.value.violations
    assert (violation.field, violation.allowed) == ("chat.messages", "1 to 8192")


def test_no_more_violations_are_collected_than_reported() -> None:
    """At most 16 violations are collected, and the remaining items are not parsed."""
    with pytest.raises(MeshError) as caught:
        validation.check(good(chat(*[(9, "x")] * 4000)), BOUNDS, SEAL)
    assert len(caught.value.violations) == MAX_VIOLATIONS
    with pytest.raises(MeshError) as caught:
        wire.parse(b"\x0a\x01x" + b"\xf8\x07\x01" * 1000, 1 << 20, BOUNDS.max_sequence_tokens)
    assert len(caught.value.violations) == MAX_VIOLATIONS


def test_a_good_message_passes() -> None:
    """A message with every known field passes."""
    message = good(sampling(temperature=0.5, stop=["é"]))
    assert wire.parse(message.SerializeToString(), 1024, BOUNDS.max_sequence_tokens) == message


def test_random_bytes_get_a_typed_error_or_a_request() -> None:
    """Random bytes give a typed error or a request, never a bug."""
    draw = random.Random(5)
    whole = good(chat((2, "Hello"), (3, "é"))).SerializeToString()
    refused = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            validation.check(
                wire.parse(bytes(data[: draw.randint(1, len(data))]), 1024, BOUNDS.max_sequence_tokens),
                BOUNDS,
                SEAL,
            )
        except MeshError as error:
            assert error.code.name == "INVALID_ARGUMENT" and error.violations
            refused += 1
    assert refused > 10_000
