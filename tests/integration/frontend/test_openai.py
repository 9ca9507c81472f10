"""The OpenAI surface with the openai package, unmodified, at a frontend with scripted routers."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httptools
import openai
import pytest
from openai.types import Completion

from kvmesh.errors import MeshError, from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.pools import DEFAULT_POOL
from tests.integration.frontend.conftest import CONFIG, Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import PHASES, Pool, oracle, serving_router
from tests.integration.frontend.test_generate import PROMPT, TOKENIZER, Answer, error_of, request
from tests.integration.frontend.test_tenants_wire import KEYS, TABLES, call, until_settled
from tests.patience import patience, wait_for

COUNT = 40
FREED_S = 1.0
"""Longest time from the end of a client to the end of all that its request holds, on a quiet machine."""


def client(serving: Serving, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{serving.http_address}/v1", api_key=key, **options)


def asked(count: int = COUNT, **more: Any) -> dict[str, Any]:
    return {
        "model": "reference",
        "prompt": PROMPT,
        "max_tokens": count,
        "extra_body": {"return_token_ids": True},
        **more,
    }


def ids_of(answer: Completion) -> list[int]:
    return list(getattr(answer.choices[0], "token_ids", []))


@pytest.fixture
async def with_redis(redis_url: str, pool: Pool) -> AsyncIterator[Serving]:
    """A frontend with Redis and one router."""
    async with serving_with_redis(redis_url, pool) as made:
        yield made


@asynccontextmanager
async def serving_with_redis(redis_url: str, pool: Pool, **tables: Any) -> AsyncIterator[Serving]:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend(redis_url, tables))
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made


async def test_every_form_of_the_package_has_the_answer_of_grpc(serving: Serving) -> None:
    wanted = await Answer(serving.stub.Generate(request(COUNT))).read()
    assert wanted.started is not None and wanted.ids == oracle(PROMPT, COUNT)
    async with client(serving) as aio:
        whole = await aio.completions.create(**asked(seed=wanted.started.seed))
        chunks = [
            each
            async for each in await aio.completions.create(
                **asked(stream=True, stream_options={"include_usage": True})
            )
        ]
    with openai.OpenAI(base_url=f"http://{serving.http_address}/v1", api_key="none") as sync:
        again = await asyncio.to_thread(lambda: sync.completions.create(**asked()))
        parts = await asyncio.to_thread(lambda: list(sync.completions.create(**asked(stream=True))))
    for each in (whole, again):
        assert (ids_of(each), each.choices[0].text) == (wanted.ids, wanted.text)
        assert each.choices[0].finish_reason == "length"
        assert each.usage is not None
        assert (each.usage.prompt_tokens, each.usage.completion_tokens) == (len(PROMPT), COUNT)
        assert each.usage.prompt_tokens_details is not None
    for stream in (chunks, parts):
        with_choice = [each for each in stream if each.choices]
        assert "".join(each.choices[0].text for each in with_choice) == wanted.text
        assert [token for each in with_choice for token in ids_of(each)] == wanted.ids
        assert with_choice[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    await serving.until_empty()


async def test_a_conversation_is_rendered_as_over_grpc(serving: Serving) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, content="Hello, you.")])
    wanted = await Answer(serving.stub.Generate(request(8, chat=chat))).read()
    async with client(serving) as aio:
        answer = await aio.chat.completions.create(
            model="reference", messages=[{"role": "user", "content": "Hello, you."}], max_completion_tokens=8
        )
        stream = await aio.chat.completions.create(
            model="reference",
            messages=[{"role": "user", "content": "Hello, you."}],
            max_tokens=8,
            stream=True,
        )
        deltas = [each.choices[0].delta async for each in stream]
    assert answer.choices[0].message.content == wanted.text
    assert deltas[0].role == "assistant"
    assert "".join(each.content or "" for each in deltas) == wanted.text


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_frees_its_request(
    serving: Serving, pool: Pool, phase: str, streams: bool
) -> None:
    pool.hold_at, pool.tokens_max = phase, 5
    async with client(serving, max_retries=0) as aio:
        running = asyncio.ensure_future(aio.completions.create(**asked(stream=streams)))
        await until(lambda: bool(pool.runs) and pool.runs[0].phase == phase, f"the attempt is {phase}")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await serving.until_empty(FREED_S)
    await until(lambda: not pool.runs, "the attempt is cancelled", FREED_S)


async def test_a_stream_that_is_closed_in_the_middle_frees_its_request(serving: Serving, pool: Pool) -> None:
    pool.tokens_max = 5
    async with client(serving) as aio:
        stream = await aio.completions.create(**asked(stream=True))
        await anext(aiter(stream))
        await stream.close()
    await serving.until_empty(FREED_S)


async def test_a_refusal_that_says_when_is_retried_by_the_package(redis_url: str, pool: Pool) -> None:
    """A tenant's limit is 429 with a time, after which the package sends the request again, and gets its answer."""
    tables = {
        **TABLES,
        "tenants": {**TABLES["tenants"], "search": {"requests_per_min": 60, "burst_s": 1}},
    }
    async with serving_with_redis(redis_url, pool, **tables) as serving:
        async with client(serving, KEYS["search"], max_retries=0) as once:
            first = await once.completions.with_raw_response.create(**asked(4))
            assert first.headers["x-ratelimit-limit-requests"] == "1"
            assert first.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as caught:
                await once.completions.create(**asked(4))
        assert caught.value.code == "REQUEST_RATE_EXCEEDED"
        headers = caught.value.response.headers
        assert headers["x-should-retry"] == "true" and float(headers["retry-after-ms"]) <= 1200
        async with client(serving, KEYS["search"], max_retries=5) as patient:
            assert len(ids_of(await patient.completions.create(**asked(4)))) == 4
        await serving.until_empty()


@pytest.mark.parametrize(
    ("more", "error", "status", "code"),
    [
        ({"temperature": 11}, openai.BadRequestError, 400, "FIELD_OUT_OF_RANGE"),
        ({"n": 2}, openai.BadRequestError, 400, "FEATURE_UNSUPPORTED"),
        ({"model": "other"}, openai.NotFoundError, 404, "MODEL_UNKNOWN"),
        ({"prompt": [5] * 5000}, openai.BadRequestError, 400, "PROMPT_TOO_LONG"),
        ({"extra_body": {"deadline_ms": 1}}, openai.InternalServerError, 504, "DEADLINE"),
    ],
)
async def test_a_final_refusal_is_not_retried(
    serving: Serving, more: dict[str, Any], error: type[openai.APIStatusError], status: int, code: str
) -> None:
    async with client(serving, max_retries=3) as aio:
        with pytest.raises(error) as caught:
            await aio.completions.create(**asked(4, **more))
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_credentials_are_those_of_grpc(redis_url: str, pool: Pool) -> None:
    async with serving_with_redis(redis_url, pool, **TABLES) as serving:
        for key, error, code in (
            ("kvm_nobody", openai.AuthenticationError, "CREDENTIALS_UNKNOWN"),
            (KEYS["off"], openai.PermissionDeniedError, "TENANT_DISABLED"),
        ):
            async with client(serving, key) as aio:
                for each in (aio.completions.create(**asked(4)), aio.models.list()):
                    with pytest.raises(error) as caught:
                        await each
                    assert caught.value.code == code
        async with client(serving, KEYS["agents"], max_retries=0) as aio:
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await aio.completions.create(**asked(4), extra_headers={"kvmesh-tenant": "search"})
            assert caught.value.code == "TENANT_UNKNOWN"
            assert len(ids_of(await aio.completions.create(**asked(4)))) == 4
        await serving.until_empty()


async def test_a_deadline_in_the_body_ends_the_request(serving: Serving, pool: Pool) -> None:
    """Before the first token it is 504, behind it the last event of the stream."""
    pool.hold_at = "placed"
    async with client(serving, max_retries=0) as aio:
        with pytest.raises(openai.InternalServerError) as caught:
            await aio.completions.create(**asked(4, extra_body={"deadline_ms": 300}))
        assert (caught.value.status_code, caught.value.code) == (504, "DEADLINE")
        pool.hold_at, pool.tokens_max = "", 5
        stream = await aio.completions.create(**asked(stream=True, extra_body={"deadline_ms": 500}))
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "DEADLINE"
    await serving.until_empty()


async def test_an_error_behind_the_first_event_is_the_last_event(serving: Serving, pool: Pool) -> None:
    pool.tokens_max = 5
    core = serving.frontend.core
    async with client(serving, max_retries=0) as aio:
        stream = await aio.completions.create(**asked(stream=True))
        events = aiter(stream)
        await anext(events)
        core.hand_over(list(core.admitted.serving), serving.frontend.clock.now_s())
        with pytest.raises(openai.APIError) as caught:
            while True:
                await anext(events)
    assert caught.value.code == "DRAINING"


class Events:
    """The events of a stream, read without the package, because it shows no event ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.is_done = False
        self.status = 0
        self.body = b""
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def read(self) -> None:
        """Take the whole events in the body, up to now."""
        whole, _, _ = self.body.rpartition(b"\n\n")
        self.ids, self.text = [], ""
        for block in whole.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
            if "id" in lines:
                self.ids.append(int(lines["id"]))
            if lines.get("data") == "[DONE]":
                self.is_done = True
            elif "data" in lines:
                choices = json.loads(lines["data"]).get("choices", [])
                self.text += "".join(each["text"] for each in choices)


async def events(
    serving: Serving, key: str, *, last: int | None = None, enough: int = 1 << 30, **more: Any
) -> Events:
    """Return the events of a stream, up to the first with an id of at least `enough`. Then the client disconnects."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": COUNT, "stream": True, **more}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: mesh",
        f"content-length: {len(body)}",
        f"idempotency-key: {key}",
        *([f"last-event-id: {last}"] if last is not None else []),
    ]
    host, _, port = serving.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = Events()
    parser = httptools.HttpResponseParser(found)
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    try:
        async with patience(20):
            while not found.is_done and (not found.ids or found.ids[-1] < enough):
                data = await reader.read(65_536)
                if not data:
                    break
                parser.feed_data(data)
                found.status = parser.get_status_code()
                found.read()
                if found.status != 200 and found.body:
                    break
    finally:
        writer.transport.abort()
    return found


async def test_a_broken_stream_goes_on_behind_its_last_event(with_redis: Serving, pool: Pool) -> None:
    """The same request with its key and `Last-Event-ID` has exactly the rest, at whatever position the stream broke."""
    whole = await events(with_redis, str(uuid.uuid4()), seed=5)
    assert whole.is_done and whole.ids[-1] == COUNT + 1
    for enough in (1, 7, COUNT):
        pool.tokens_max = enough + 1
        key = str(uuid.uuid4())
        first = await events(with_redis, key, enough=enough)
        await with_redis.until_empty()
        pool.tokens_max = 1 << 30
        rest = await events(with_redis, key, last=first.ids[-1])
        assert rest.is_done and rest.status == 200
        assert first.text + rest.text == whole.text
        assert all(each > first.ids[-1] for each in rest.ids)
        assert (first.ids + rest.ids)[-1] == COUNT + 1
    await with_redis.until_empty()


async def test_events_of_a_request_without_a_key_have_no_ids(serving: Serving) -> None:
    """They could not be used. Clients that read lines of data alone, as OpenAI sends them, work so."""
    found = await events(serving, "")
    assert found.is_done and found.text and not found.ids
    assert all(line.startswith(b"data: ") for line in found.body.splitlines() if line)


async def test_a_stream_goes_on_at_another_frontend(redis_url: str, pool: Pool) -> None:
    async with serving_with_redis(redis_url, pool) as one, serving_with_redis(redis_url, pool) as other:
        await asyncio.gather(one.frontend.prepare(), other.frontend.prepare())
        whole = await events(one, str(uuid.uuid4()))
        key = str(uuid.uuid4())
        pool.tokens_max = 8
        first = await events(one, key, enough=5)
        pool.tokens_max = 1 << 30
        rest = await events(other, key, last=first.ids[-1])
        assert rest.is_done and first.text + rest.text == whole.text


async def test_what_cannot_go_on_exactly_is_refused(with_redis: Serving, pool: Pool) -> None:
    unknown = await events(with_redis, str(uuid.uuid4()), last=3)
    assert unknown.status == 409 and b"RESUME_NOT_EXACT" in unknown.body
    key = str(uuid.uuid4())
    await events(with_redis, key)
    behind = await events(with_redis, key, last=COUNT + 2)
    assert behind.status == 400 and b"Last-Event-ID" in behind.body
    replica = Member(
        process_id="decode-0",
        role="decode",
        address="127.0.0.1:1",
        boot_id="1",
        model_version=CONFIG.engine.salt,
        block_tokens=CONFIG.engine.block_tokens,
    )
    with_redis.frontend.on_members([*with_redis.frontend._members, replica])
    unseeded = await events(with_redis, key, last=3)
    assert unseeded.status == 409 and b"seeded_resume" in unseeded.body
    await with_redis.until_empty()


async def test_a_refused_continuation_leaves_no_trace(with_redis: Serving, pool: Pool) -> None:
    """It stays refused when it is sent again, and it does not end the execution that it cannot continue."""
    key = str(uuid.uuid4())
    for _ in range(2):
        refused = await events(with_redis, key, last=3)
        assert refused.status == 409 and b"no earlier execution" in refused.body
    pool.tokens_max = 8
    key = str(uuid.uuid4())
    running = asyncio.create_task(events(with_redis, key))
    await until(lambda: bool(pool.runs) and pool.runs[0].log.end == 8, "it runs")
    with_redis.frontend._unseeded_pools = frozenset({DEFAULT_POOL})
    assert (await events(with_redis, key, last=3)).status == 409
    pool.tokens_max = 1 << 30
    assert (await running).is_done
    await with_redis.until_empty()


async def test_offsets_of_log_probabilities_go_on_behind_the_last_event(
    with_redis: Serving, pool: Pool
) -> None:
    def offsets(found: Events) -> list[int]:
        lines = [line for line in found.body.decode().split("\n") if line.startswith("data: {")]
        chosen = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines]
        return [offset for each in chosen if each is not None for offset in each["text_offset"]]

    pool.tokens_max = 8
    key = str(uuid.uuid4())
    first = await events(with_redis, key, enough=5, logprobs=0)
    pool.tokens_max = 1 << 30
    rest = await events(with_redis, key, last=first.ids[-1], logprobs=0)
    whole = await events(with_redis, str(uuid.uuid4()), logprobs=0)
    assert offsets(first) + offsets(rest) == offsets(whole)


async def test_a_key_that_is_revoked_meanwhile_does_not_spoil_the_answer(
    redis_url: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_with_redis(redis_url, pool, **TABLES) as serving:
        pool.hold_at = "placed"
        async with client(serving, KEYS["search"], max_retries=0) as aio:
            running = asyncio.create_task(aio.completions.create(**asked(4)))
            await until(lambda: bool(pool.runs) and pool.runs[0].phase == "placed", "it waits")

            def revoked(_: object) -> None:
                raise MeshError("CREDENTIALS_UNKNOWN", "the API key is unknown")

            monkeypatch.setattr(serving.frontend._calls, "caller", revoked)
            pool.hold_at = ""
            assert len(ids_of(await running)) == 4


async def test_a_stream_needs_http_1_1(serving: Serving) -> None:
    """HTTP/1.0 has no chunked bodies. A whole answer has a length."""
    for streams, wanted in ((True, b"HTTP/1.1 400"), (False, b"HTTP/1.1 200")):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "stream": streams}).encode()
        host, _, port = serving.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        async with patience(10):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(wanted) and b"chunked" not in answer


@pytest.mark.parametrize("name", ["authorization", "kvmesh-tenant", "idempotency-key"])
async def test_a_header_of_identity_may_come_once(serving: Serving, name: str) -> None:
    """A proxy could have read the other one."""
    host, _, port = serving.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": [5], "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{name}: a\r\n{name}: b\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with patience(10):
        answer = await reader.readuntil(b"\r\n\r\n")
        answer += await reader.read(4096)
    writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 400") and b"there twice" in answer
    await serving.until_empty()


async def test_tokenize_and_models_are_served(serving: Serving) -> None:
    async with client(serving) as aio:
        (model,) = (await aio.models.list()).data
        assert (await aio.models.retrieve(model.id)).id == model.id
        with pytest.raises(openai.NotFoundError):
            await aio.models.retrieve("other/model")
        post = aio.with_options(max_retries=0).post
        root = f"http://{serving.http_address}"
        text = "naïve café, 東京"
        made: Any = await post(
            f"{root}/tokenize", body={"prompt": text, "return_token_strs": True}, cast_to=object
        )
        assert made["tokens"] == TOKENIZER.encode(text) and made["count"] == len(made["tokens"])
        back: Any = await post(f"{root}/detokenize", body={"tokens": made["tokens"]}, cast_to=object)
        assert back["prompt"] == text
        with pytest.raises(openai.BadRequestError):
            await post(f"{root}/detokenize", body={"tokens": [1 << 20]}, cast_to=object)
        conversation = [{"role": "user", "content": "Hello, you."}]
        chat: Any = await post(f"{root}/tokenize", body={"messages": conversation}, cast_to=object)
        used = await aio.chat.completions.create(model="", messages=conversation, max_tokens=1)  # type: ignore[arg-type]
        assert used.usage is not None and used.usage.prompt_tokens == chat["count"]


async def test_a_draining_frontend_sends_its_clients_on(serving: Serving, pool: Pool) -> None:
    """Running streams end well, new requests are refused with a time, and connections are closed with their response."""
    pool.tokens_max = 5
    async with client(serving, max_retries=0) as aio:
        stream = await aio.completions.create(**asked(stream=True))
        read = aiter(stream)
        await anext(read)
        serving.frontend.core.is_draining = True
        with pytest.raises(openai.InternalServerError) as caught:
            await aio.completions.create(**asked(4))
        assert (caught.value.status_code, caught.value.code) == (503, "DRAINING")
        with pytest.raises(openai.InternalServerError):
            root = f"http://{serving.http_address}"
            await aio.post(f"{root}/tokenize", body={"prompt": "hello"}, cast_to=object)
        assert caught.value.response.headers["connection"] == "close"
        serving.frontend.http.send_clients_on()
        pool.tokens_max = 1 << 30
        rest = [each async for each in read]
        assert rest[-1].choices[0].finish_reason == "length"
    await until(lambda: not len(serving.frontend.http.connections), "all connections are closed")


async def test_requests_at_once_share_a_frontend(serving: Serving) -> None:
    """Streams and whole answers of many clients do not mix."""
    async with client(serving, max_retries=0) as aio:
        prompts = [[70 + number, 71] for number in range(40)]

        async def one(prompt: list[int], streams: bool) -> list[int]:
            if not streams:
                return ids_of(await aio.completions.create(**asked(12, prompt=prompt)))
            stream = await aio.completions.create(**asked(12, prompt=prompt, stream=True))
            return [token async for each in stream for token in ids_of(each)]

        kinds = itertools.cycle([True, False])
        found = await wait_for(asyncio.gather(*map(one, prompts, kinds)), 20)
    assert found == [oracle(prompt, 12) for prompt in prompts]
    await serving.until_empty()


async def test_the_same_limits_refuse_with_the_same_reason(redis_url: str, pool: Pool) -> None:
    async with serving_with_redis(redis_url, pool, **TABLES) as serving:
        pool.hold_at = "queued"
        running = [call(serving, request(4), "agents") for _ in range(4)]
        await until(lambda: len(pool.runs) == 4, "four run")
        for tenant, count in (("agents", 4), ("search", 51), ("batch", 2000)):
            wanted = from_rpc_error(await error_of(call(serving, request(count), tenant)))
            async with client(serving, KEYS[tenant], max_retries=0) as aio:
                with pytest.raises(openai.APIStatusError) as caught:
                    await aio.completions.create(**asked(count))
            assert caught.value.code == wanted.reason
        for each in running:
            each.cancel()
        await until_settled(serving)
