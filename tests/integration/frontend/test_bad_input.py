"""Bad input through a real server: INVALID_ARGUMENT with field, value and range, and no router gets a request."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface import wire
from tests.integration.frontend.conftest import Serving
from tests.integration.frontend.scripted_router import Pool


def encoded(**fields: object) -> Callable[[], bytes]:
    return lambda: pb.GenerateRequest(**fields).SerializeToString()  # type: ignore[arg-type]


BAD: list[tuple[str, Callable[[], bytes], str, str, str]] = [
    ("an empty prompt", encoded(text=""), "text", "empty", "1 character"),
    ("no prompt", encoded(), "prompt", "not there", "one of text, chat and tokens"),
    ("a prompt too long by its bytes", encoded(text="word " * 50_000), "text", "250000 bytes", "4095 tokens"),
    ("a prompt too long by its tokens", encoded(text="q7 " * 5_000), "text", "tokens", "1 to 4095"),
    (
        "negative limits",
        encoded(text="x", limits={"max_output_tokens": -1}),
        "limits.max_output_tokens",
        "-1",
        "1 to 4096",
    ),
    (
        "NaN temperature",
        encoded(text="x", sampling={"temperature": float("nan")}),
        "sampling.temperature",
        "nan",
        "0 to 10",
    ),
    ("invalid UTF-8", lambda: b"\x0a\x03a\xff\xfe", "text", "ff fe", "valid UTF-8"),
    ("an unknown field", lambda: b"\x0a\x01x\xa0\x06\x01", "100", "unknown field 100", "only fields of"),
    ("no message at all", lambda: b"\xff" * 20, "(message)", "more than 10 bytes", "a whole message"),
    ("too long a message", encoded(text="x" * (4 << 20)), "(message)", "4194309 bytes", "at most 4194304"),
]


@pytest.mark.parametrize(
    ("data", "field", "value", "allowed"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
async def test_bad_input_is_named_in_the_error(
    serving: Serving, pool: Pool, data: Callable[[], bytes], field: str, value: str, allowed: str
) -> None:
    """The status says what to correct, and no component behind the frontend is called."""
    generate = serving.channel.unary_stream("/kvmesh.inference.v1.InferenceService/Generate", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(data()):
            pass
    details = from_rpc_error(caught.value)
    assert details.code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.reason
    assert field in details.violations
    for text in (details.violations[field], details.message):
        assert value in text and allowed in text
    assert not pool.submits
    await serving.until_empty()


@pytest.mark.parametrize(("size", "is_beside"), [(100, False), (10_000, True)])
async def test_a_big_message_is_checked_outside_the_event_loop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, size: int, is_beside: bool
) -> None:
    """Other streams continue while a big message is parsed in a thread; a small message is not worth a thread."""
    threads, parse = set(), wire.parse

    def watched(data: bytes, bytes_max: int, tokens_max: int) -> pb.GenerateRequest:
        threads.add(threading.get_ident())
        return parse(data, bytes_max, tokens_max)

    monkeypatch.setattr(wire, "parse", watched)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in serving.stub.Generate(pb.GenerateRequest(text="x" * size, model="no")):
            pass
    assert len(threads) == 1 and (threading.get_ident() not in threads) == is_beside


async def test_a_good_request_succeeds(serving: Serving, pool: Pool) -> None:
    """The cases above fail because of their input, not because of their server."""
    replies = [reply async for reply in serving.stub.Generate(pb.GenerateRequest(text="x"))]
    assert replies[-1].HasField("finished")
    assert len(pool.submits) == 1
