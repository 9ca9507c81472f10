"""What each client of the OpenAI API must see. A case returns one line for the table, and raises AssertionError."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.clients.cases import LONG_TOKENS, freed
from tests.clients.openai_clients import Kind
from tests.clients.openai_driver import Error, OpenAiClient, Seen, Server
from tests.clients.site import LIMITED_KEY, PLAIN, TLS, Site
from tests.integration.scraped import sample

Case: TypeAlias = Callable[[Site, OpenAiClient, Kind, Server], Awaitable[str]]

ANSWER_TOKENS: Final = 48
LEAVE_AFTER: Final = 5
NEXT: Final = "And the sea?"
PROMPT: Final = "Which colour has the sky over Zürich? 🌌"
SAMPLED: Final = {"temperature": 1.0, "seed": 7}
RETRIED: Final = 3
"""Requests in a row of a tenant that may send one a second."""
UNKNOWN_MODEL: Final = "größe-7b"


@dataclass(frozen=True)
class Wanted:
    """The answer of kvmesh's own API."""

    text: str
    usage: tuple[int, int]
    finish_reason: str


_references: dict[tuple[str, ...], Wanted] = {}
_FINISH: Final = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_END_TOKEN: "stop"}


async def answer(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """A whole answer has the text, the usage and the finish reason that kvmesh's own API gives."""
    for way in kind.whole:
        seen = await client.ask(way, site.http(), PROMPT, parameters=_parameters())
        await _check(site, way, seen)
    return f"{', '.join(kind.whole)}: text, usage and finish reason of gRPC"


async def streamed(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """A stream has them, too."""
    counts = []
    for way in kind.streamed:
        seen = await client.ask(way, site.http(), PROMPT, streams=True, parameters=_parameters())
        await _check(site, way, seen)
        assert seen.chunk_count > 1, f"{way}: {seen.chunk_count} chunks"
        counts.append(f"{way} {seen.chunk_count}")
    return f"{', '.join(counts)} chunks, text, usage and finish reason of gRPC"


async def cancelled(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """A client that leaves in the middle frees what its request holds."""
    longest_s = 0.0
    for way in kind.streamed:
        seen = await client.ask(
            way,
            site.http(),
            PROMPT,
            streams=True,
            leave_after=LEAVE_AFTER,
            parameters={**SAMPLED, "max_tokens": LONG_TOKENS},
        )
        assert seen.error is None, f"{way}: {seen.error}"
        assert LEAVE_AFTER <= seen.chunk_count < LONG_TOKENS // 2, f"{way}: {seen.chunk_count} chunks"
        longest_s = max(longest_s, await freed(site))
    return f"freed after {longest_s:.1f} s"


async def failed(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """An unknown model and a wrong field are the client's own exceptions, with the reason of the mesh."""
    unknown = Server(site.http().base_url, UNKNOWN_MODEL, site.http().api_key)
    said = []
    for way in dict.fromkeys((*kind.whole, *kind.streamed)):
        streams = way not in kind.whole
        for server, parameters, status, name, code, param in (
            (unknown, _parameters(), 404, "NotFoundError", "MODEL_UNKNOWN", "model"),
            (
                site.http(),
                {**_parameters(), "top_p": 7.0},
                400,
                "BadRequestError",
                "FIELD_OUT_OF_RANGE",
                "top_p",
            ),
        ):
            error = await _refused(client, way, server, parameters, streams=streams)
            assert error.status == status and error.is_a(name), f"{way}: {error}"
            assert param in error.message, f"{way}: {error}"
            if kind.keeps_reasons:
                assert (error.code, error.param) == (code, param), f"{way}: {error}"
            said.append(f"{status} {error.classes[0]} {error.code or 'without the reason'}")
    return ", ".join(dict.fromkeys(said))


async def retried(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """A client that the limit of its tenant refuses (429) waits as long as the mesh says, and has its answers."""
    limited = site.http(key=LIMITED_KEY)
    told = []
    for way in dict.fromkeys((*kind.whole, *kind.streamed)):
        if way == "batch":
            continue  # four at once are more than two retries of each can get
        before, began_s = await _outcomes(site, "REQUEST_RATE_EXCEEDED"), time.monotonic()
        for _again in range(RETRIED):
            seen = await client.ask(
                way, limited, PROMPT, streams=way not in kind.whole, parameters=_parameters()
            )
            await _check(site, way, seen)
        refused = await _outcomes(site, "REQUEST_RATE_EXCEEDED") - before
        seconds = time.monotonic() - began_s
        assert refused >= 1, f"{way}: no request was refused in {seconds:.1f} s"
        assert refused <= 4 * RETRIED, f"{way}: {refused:g} refusals of {RETRIED} requests"
        told.append(f"{way} {refused:g}")
    return f"refusals that the client sat out: {', '.join(told)}"


async def final(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """A refusal with x-should-retry: false is not tried again, although its status (504) is one that clients retry."""
    told = []
    for way in dict.fromkeys((*kind.whole, *kind.streamed)):
        before = await _late(site)
        error = await _refused(
            client, way, site.http(), _parameters(), streams=way not in kind.whole, extra={"deadline_ms": 2}
        )
        count = await _late(site) - before
        assert error.status == 504, f"{way}: {error}"
        assert count == kind.sent.get(way, 1), f"{way}: {count:g} requests; {error}"
        told.append(f"{way} {count:g} ({error.classes[0]})")
    return f"requests: {', '.join(told)}"


async def tls(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """TLS with the authority of the mesh works."""
    for way in dict.fromkeys((*kind.whole, *kind.streamed)):
        if way == "batch":
            continue
        seen = await client.ask(way, site.http(TLS), PROMPT, streams=True, parameters=_parameters())
        await _check(site, way, seen)
    return "text of gRPC over https"


async def turns(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """The message object of an answer is taken back in the next turn, with all fields that the client gave it."""
    seen = await client.ask("turns", site.http(), PROMPT, next_prompt=NEXT, parameters=_parameters())
    first = (await reference(site)).text
    await _check(site, "turns", seen, PROMPT, first, NEXT)
    return "second answer as over gRPC"


async def tools(site: Site, client: OpenAiClient, kind: Kind, _: Server) -> str:
    """Tools are passed to the template: the prompt is longer, and the answer is text."""
    if not kind.tools:
        return "no way of its own"
    seen = await client.ask(kind.tools, site.http(), PROMPT, parameters=_parameters())
    assert seen.error is None, str(seen.error)
    plain = await reference(site)
    assert seen.usage is not None and seen.text, seen
    return f"prompt of {seen.usage[0]} tokens, {plain.usage[0]} without tools"


async def schema(site: Site, client: OpenAiClient, kind: Kind, guided: Server) -> str:
    """A JSON schema forms the answer where the engine offers it, and is refused by name where not."""
    if not kind.schema:
        return "no way of its own"
    error = await _refused(client, kind.schema, site.http(), _parameters(), streams=False)
    assert error.status == 400 and error.code == "FEATURE_UNSUPPORTED", str(error)
    seen = await client.ask(kind.schema, guided, PROMPT, parameters={"max_tokens": 300, **SAMPLED})
    assert seen.error is None, str(seen.error)
    assert isinstance(seen.parsed, dict) and set(seen.parsed) == {"name", "dark"}, seen
    assert isinstance(seen.parsed["dark"], bool), seen
    return f"an object of two fields; without guides {error.status} {error.code} of {error.param}"


CASES: Final[Mapping[str, Case]] = {
    "answer": answer,
    "stream": streamed,
    "cancel": cancelled,
    "error": failed,
    "retry": retried,
    "no retry": final,
    "TLS": tls,
    "turns": turns,
    "tools": tools,
    "schema": schema,
}


async def reference(site: Site, *texts: str) -> Wanted:
    """Return the answer that grpc.aio gets in this process, to a conversation of `texts` by user and assistant in turn."""
    texts = texts or (PROMPT,)
    if texts not in _references:
        roles = itertools.cycle((pb.ChatMessage.ROLE_USER, pb.ChatMessage.ROLE_ASSISTANT))
        messages = [pb.ChatMessage(role=role, content=text) for role, text in zip(roles, texts, strict=False)]
        wanted = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))
        wanted.sampling.temperature, wanted.sampling.seed = SAMPLED["temperature"], int(SAMPLED["seed"])
        wanted.limits.max_output_tokens = ANSWER_TOKENS
        parts: list[str] = []
        async with grpc.aio.insecure_channel(site.address()) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            async for message in stub.Generate(wanted, timeout=60):
                parts.append(message.tokens.text)
        done = message.finished
        usage = (done.usage.prompt_token_count, done.usage.output_token_count)
        _references[texts] = Wanted("".join(parts), usage, _FINISH[done.finish_reason])
    return _references[texts]


def _parameters() -> dict[str, Any]:
    return {**SAMPLED, "max_tokens": ANSWER_TOKENS}


async def _check(site: Site, way: str, seen: Seen, *texts: str) -> None:
    """Raise AssertionError if an answer differs from that of gRPC."""
    wanted = await reference(site, *texts)
    assert seen.error is None, f"{way}: {seen.error}"
    assert seen.text == wanted.text, f"{way}: {seen.text!r} where gRPC has {wanted.text!r}"
    assert seen.usage == wanted.usage, f"{way}: usage {seen.usage} where gRPC has {wanted.usage}"
    assert seen.finish_reason == wanted.finish_reason, f"{way}: {seen.finish_reason}"


async def _refused(
    client: OpenAiClient,
    way: str,
    server: Server,
    parameters: Mapping[str, Any],
    *,
    streams: bool,
    extra: Mapping[str, Any] | None = None,
) -> Error:
    seen = await client.ask(way, server, PROMPT, streams=streams, parameters=parameters, extra=extra)
    assert seen.error is not None, f"{way}: {seen} where an error was due"
    return seen.error


async def _outcomes(site: Site, *reasons: str) -> float:
    """Return how many requests ended with one of `reasons` at the frontend so far."""
    return sum(
        [
            await sample(site.mesh, PLAIN, f'kvmesh_frontend_requests_total{{outcome="{each}"}}')
            for each in reasons
        ]
    )


async def _late(site: Site) -> float:
    return await _outcomes(site, "DEADLINE", "INFEASIBLE_DEADLINE", "TTFT_TIMEOUT")
