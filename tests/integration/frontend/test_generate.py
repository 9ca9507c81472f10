"""Generate over real streams: exact, cancelled, cut by the deadline, taken over, resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import AsyncExitStack

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.config import MeshConfig
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import Conversation, ModelTokenizer
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import SECRET_BYTES, Seal
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import PHASES, Pool, oracle, serving_router
from tests.patience import wait_for

TOKENIZER = ModelTokenizer.load(MeshConfig().mesh.model_path)
PROMPT = [70, 71, 72, 73] * 20


def request(count: int = 40, **fields: object) -> pb.GenerateRequest:
    values: dict[str, object] = {
        "tokens": pb.TokenPrompt(ids=PROMPT),
        "limits": pb.Limits(max_output_tokens=count),
    }
    return pb.GenerateRequest(**{**values, **fields})  # type: ignore[arg-type]


class Answer:
    """Reads a call and checks the contract of the stream."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse], first: int = 0
    ) -> None:
        self.call = call
        self.first = first
        self.ids: list[int] = []
        self.text = ""
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None

    async def read(self, until_tokens: int = 1 << 30) -> Answer:
        """Read until `count` tokens, or to the end."""
        while len(self.ids) < until_tokens:
            message = await self.call.read()
            if not isinstance(message, pb.GenerateResponse):
                assert await self.call.code() == grpc.StatusCode.OK
                assert self.finished is not None
                break
            kind = message.WhichOneof("event")
            assert (kind == "started") == (self.started is None), "started comes first, once"
            assert self.finished is None, "no message comes after finished"
            if kind == "started":
                self.started = message.started
            elif kind == "tokens":
                assert message.tokens.position == self.first + len(self.ids)
                self.ids += message.tokens.ids
                self.text += message.tokens.text
            else:
                self.finished = message.finished
        return self


async def error_of(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_a_stream_is_exact_and_complete(serving: Serving) -> None:
    """`started`, each token once, `finished` with usage and explanation."""
    options = pb.GenerateOptions(explain=True)
    answer = await Answer(serving.stub.Generate(request(150, options=options))).read()
    assert answer.ids == oracle(PROMPT, 150)
    assert answer.text == TOKENIZER.decode(answer.ids)
    assert answer.started is not None and answer.finished is not None
    assert answer.started.prompt_token_count == len(PROMPT)
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.finished.usage.output_token_count == 150
    (attempt,) = answer.finished.explanation.attempts
    assert (attempt.router, attempt.prefill_replica, attempt.decode_replica) == (
        "router-0",
        "prefill-0",
        "decode-0",
    )
    await serving.until_empty()


async def test_chat_and_text_are_tokenized_by_the_frontend(serving: Serving, pool: Pool) -> None:
    """The router receives ids: the template's special tokens, and the user's text as plain text."""
    messages = [pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, content="Hi <|end|> é")]
    asked = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), limits=pb.Limits(max_output_tokens=2))
    await Answer(serving.stub.Generate(asked)).read()
    expected = TOKENIZER.encode_chat(Conversation([{"role": "user", "content": "Hi <|end|> é"}]))
    assert list(memoryview(pool.submits[0].token_ids).cast("i")) == expected
    assert (pool.submits[0].end_token_id,) == TOKENIZER.end_token_ids


async def test_many_streams_at_once_are_all_exact(serving: Serving) -> None:
    """Streams do not mix."""

    async def one(number: int) -> None:
        ids = [100 + number, 7, 8]
        asked = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=ids), limits=pb.Limits(max_output_tokens=80))
        answer = await Answer(serving.stub.Generate(asked)).read()
        assert answer.ids == oracle(ids, 80)

    await asyncio.gather(*(one(number) for number in range(24)))
    await serving.until_empty()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_call_ends_its_attempts(serving: Serving, pool: Pool, phase: str) -> None:
    """Within a second, in each phase that the frontend knows."""
    pool.hold_at, pool.tokens_max = phase, 5
    call = serving.stub.Generate(request(40))
    await until(lambda: bool(pool.runs) and pool.runs[0].phase == phase, phase)
    call.cancel()
    await until(lambda: not pool.runs, "cancelled at the router")
    assert pool.cancels == [attach.Cancel.REASON_CLIENT]
    await serving.until_empty()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_passed_deadline_ends_its_attempts(serving: Serving, pool: Pool, phase: str) -> None:
    """The client gets DEADLINE_EXCEEDED, the router a cancellation with that reason."""
    pool.hold_at, pool.tokens_max = phase, 5
    error = await error_of(serving.stub.Generate(request(40), timeout=0.3))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not pool.runs, "cancelled at the router")
    assert pool.cancels == [attach.Cancel.REASON_DEADLINE]
    await serving.until_empty()


async def test_a_late_first_token_has_its_own_reason(serving: Serving, pool: Pool) -> None:
    """The timeout for the first token (TTFT) is shorter than the deadline."""
    pool.hold_at = "placed"
    limits = pb.Limits(ttft_timeout=Duration(nanos=200_000_000))
    details = from_rpc_error(await error_of(serving.stub.Generate(request(limits=limits), timeout=10)))
    assert (details.code, details.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "TTFT_TIMEOUT")
    await until(lambda: pool.cancels == [attach.Cancel.REASON_DEADLINE], "cancelled")


async def test_the_longest_runtime_cuts_and_keeps_the_tokens(pool: Pool) -> None:
    """A request cut by the mesh has a complete answer with its own finish reason."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        serving = await stack.enter_async_context(serving_frontend(runtime_max_s=0.4, default_deadline_s=0.4))
        serving.route([("router-0", address)])
        await serving.until_up(1)
        pool.tokens_max = 9
        for timeout in (None, 30.0):
            answer = await Answer(serving.stub.Generate(request(40), timeout=timeout)).read()
            assert answer.finished is not None
            assert answer.finished.finish_reason == pb.FINISH_REASON_DEADLINE
            assert answer.ids == oracle(PROMPT, 40)[:9]
        await until(lambda: pool.cancels == [attach.Cancel.REASON_DEADLINE] * 2, "cancelled")


async def test_a_stop_string_ends_the_call_and_the_engine(serving: Serving, pool: Pool) -> None:
    """No part of the stop string is streamed, for any borders between tokens."""
    text = TOKENIZER.decode(oracle(PROMPT, 60))
    stop = text[30:36]
    answer = await Answer(serving.stub.Generate(request(60, sampling=pb.Sampling(stop=[stop])))).read()
    assert answer.finished is not None
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert answer.finished.stop_string == stop
    assert answer.text == text[: text.index(stop)]
    await until(lambda: not pool.runs, "cancelled at the router")


async def test_streams_of_a_killed_router_are_taken_over_through_another(pool: Pool) -> None:
    """No token is recomputed, and each token comes once."""
    async with AsyncExitStack() as stack:
        servers = {}
        for name in ("router-0", "router-1"):
            inner = await stack.enter_async_context(AsyncExitStack())
            servers[name] = (inner, await inner.enter_async_context(serving_router(pool, name)))
        serving = await stack.enter_async_context(serving_frontend())
        serving.route([(name, address) for name, (_, address) in servers.items()])
        await serving.until_up(2)
        # By session affinity four of these six sessions go to router-0, in every run.
        asked = [request(300, session_id=f"session-{each}") for each in range(6)]
        answers = [await Answer(serving.stub.Generate(each)).read(5) for each in asked]
        await servers["router-0"][0].aclose()
        for answer in answers:
            await answer.read()
            assert answer.ids == oracle(PROMPT, 300)
            assert answer.finished is not None
            assert answer.finished.usage.recomputed_token_count == 0
        assert (pool.takeovers, len(pool.submits)) == (4, 6)
        await serving.until_empty()


async def test_a_restarted_router_takes_over_its_streams(pool: Pool, free_port: int) -> None:
    """With a single router the client sees a pause."""
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_frontend())
        serving.route([("router-0", f"127.0.0.1:{free_port}")])
        async with serving_router(pool, "router-0", free_port):
            await serving.until_up(1)
            answer = await Answer(serving.stub.Generate(request(300))).read(5)
        await serving.until_up(0)
        await stack.enter_async_context(serving_router(pool, "router-0", free_port))
        await answer.read()
        assert answer.ids == oracle(PROMPT, 300)
        assert answer.finished is not None and answer.finished.usage.recomputed_token_count == 0
        assert (pool.takeovers, len(pool.submits)) == (1, 1)


async def test_another_frontend_resumes_a_broken_stream(pool: Pool) -> None:
    """The token and the received ids are enough. The older execution stops; ids and text continue without a gap."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        first = await stack.enter_async_context(serving_frontend())
        second = await stack.enter_async_context(serving_frontend())
        second.frontend.seal.take(first.frontend.seal.secret)
        for serving in (first, second):
            serving.route([("router-0", address)])
            await serving.until_up(1)
        pool.tokens_max = 30
        broken = await Answer(first.stub.Generate(request(100))).read(20)
        assert broken.started is not None
        pool.tokens_max = 1 << 30
        resume = pb.Resume(resume_token=broken.started.resume_token, received_token_ids=broken.ids)
        call = second.stub.Generate(request(100, options=pb.GenerateOptions(resume=resume)))
        rest = await Answer(call, first=len(broken.ids)).read()
        assert broken.ids + rest.ids == oracle(PROMPT, 100)
        assert broken.text + rest.text == TOKENIZER.decode(oracle(PROMPT, 100))
        assert rest.started is not None and rest.started.request_id == broken.started.request_id
        assert rest.started.seed == broken.started.seed
        assert [submit.attempt for submit in pool.submits] == [1, 257]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broken.read()
        assert from_rpc_error(caught.value).reason == "SUPERSEDED"

        changed = request(99, options=pb.GenerateOptions(resume=resume))
        details = from_rpc_error(await error_of(second.stub.Generate(changed)))
        assert (details.code.name, details.reason) == ("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")


async def test_ids_and_seeds_cannot_be_computed_from_others(serving: Serving) -> None:
    """The state of a random number generator of the process reveals no id, seed or boot id."""
    told = []
    for _ in range(2):
        random.seed(7)
        answer = await Answer(serving.stub.Generate(request(1))).read()
        assert answer.started is not None
        told.append((answer.started.request_id, answer.started.seed))
    assert told[0][0] != told[1][0] and told[0][1] != told[1][1]


async def test_a_forged_resume_token_ends_no_stream(pool: Pool, serving: Serving) -> None:
    """A token must be signed by the mesh: a request's id is not enough for a takeover."""
    pool.tokens_max = 5
    victim = await Answer(serving.stub.Generate(request(10))).read(5)
    assert victim.started is not None
    token = resume_token.unpack(victim.started.resume_token, serving.frontend.seal)
    forged = dataclasses.replace(token, attempt_base=512).pack(Seal(b"x" * SECRET_BYTES))
    resume = pb.Resume(resume_token=forged, received_token_ids=victim.ids)
    call = serving.stub.Generate(request(10, options=pb.GenerateOptions(resume=resume)))
    details = from_rpc_error(await error_of(call))
    assert (details.code.name, details.reason) == ("INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
    assert "options.resume.resume_token" in details.violations
    pool.tokens_max = 1 << 30
    assert (await victim.read()).finished is not None


async def test_a_full_frontend_sends_retry_after(pool: Pool) -> None:
    """The error is immediate and typed, and no request is queued."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        serving = await stack.enter_async_context(serving_frontend(max_live_requests=1))
        serving.route([("router-0", address)])
        await serving.until_up(1)
        pool.hold_at = "queued"
        first = serving.stub.Generate(request(4))
        await until(lambda: bool(pool.runs), "the first is queued")
        details = from_rpc_error(await error_of(serving.stub.Generate(request(4))))
        assert (details.code.name, details.reason) == ("RESOURCE_EXHAUSTED", "LIVE_REQUESTS_FULL")
        assert details.retry_after_s is not None and details.retry_after_s > 0
        pool.hold_at = ""
        await Answer(first).read()


async def test_a_draining_frontend_finishes_its_streams_and_accepts_none(
    serving: Serving, pool: Pool
) -> None:
    """No stream breaks in a rolling restart."""
    pool.tokens_max = 10
    answer = await Answer(serving.stub.Generate(request(60))).read(3)
    draining = asyncio.create_task(serving.frontend.drain())
    await until(lambda: serving.frontend.core.is_draining, "draining")
    details = from_rpc_error(await error_of(serving.stub.Generate(request(4))))
    assert (details.code.name, details.reason) == ("UNAVAILABLE", "DRAINING")
    assert not draining.done()
    pool.tokens_max = 1 << 30
    await answer.read()
    assert answer.ids == oracle(PROMPT, 60)
    await wait_for(draining, 5)


async def test_random_cancels_leak_nothing(serving: Serving, pool: Pool) -> None:
    """Calls cancelled at random moments: slots, timers, admitted requests and tasks are back to the level before."""
    await Answer(serving.stub.Generate(request(5))).read()
    await serving.until_empty()
    level = len(asyncio.all_tasks())

    async def one(number: int) -> None:
        call = serving.stub.Generate(request(400))
        await asyncio.sleep((number * 7919 % 50) / 1000)
        call.cancel()

    for batch in range(5):
        await asyncio.gather(*(one(20 * batch + each) for each in range(20)))
    await serving.until_empty()
    await until(lambda: not pool.runs, "nothing runs")
    await until(lambda: len(asyncio.all_tasks()) <= level, "no task left")
