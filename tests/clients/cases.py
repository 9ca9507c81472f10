"""What each client must see. A case returns one line for the table, and raises AssertionError with what it saw instead."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.clients import ticker
from tests.clients.driver import Client, Running
from tests.clients.site import GENERATE, LIST_MODELS, MUTUAL, PLAIN, TLS, Site, request, tokens
from tests.integration.harness import until
from tests.integration.scraped import sample

Case: TypeAlias = Callable[[Site, Client], Awaitable[str]]

ANSWER_TOKENS: Final = 64
LONG_TOKENS: Final = 20_000
"""More tokens than the engine makes while a case runs."""
DEADLINE_S: Final = 2.0
CALLS_AT_ONCE: Final = 300
MESSAGE_BYTES: Final = (4 << 20) + 1
LARGE_BYTES: Final = 3_000_000
MODEL: Final = "größe 100% – 模型"
"""A model that no mesh has. The message of the error names it, so the message must be percent-encoded."""
CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
FREED_S: Final = 10.0

_references: dict[int, list[int]] = {}


async def answer(site: Site, client: Client) -> str:
    """An answer has the tokens that grpc.aio gets."""
    outcome = await client.call(
        site.address(), GENERATE, request(output_tokens=ANSWER_TOKENS, seed=1), metadata=[("x-probe", "1")]
    )
    assert outcome.status == "OK", outcome
    found = tokens(outcome)
    assert found == await reference(site, 1), "its tokens differ from those of grpc.aio"
    return f"{len(found)} tokens"


async def compressed(site: Site, client: Client) -> str:
    """A request that is compressed with gzip has the same answer."""
    outcome = await client.call(
        site.address(),
        GENERATE,
        request(output_tokens=ANSWER_TOKENS, seed=2, prompt_tokens=2000),
        gzip=True,
        channel="gzip",
    )
    assert outcome.status == "OK", outcome
    assert tokens(outcome) == await reference(site, 2, prompt_tokens=2000), "its tokens differ"
    return "same tokens"


async def deadline(site: Site, client: Client) -> str:
    """A call ends with its deadline."""
    outcome = await client.call(
        site.address(), GENERATE, request(output_tokens=LONG_TOKENS, seed=3), deadline_s=DEADLINE_S
    )
    assert outcome.status == "DEADLINE_EXCEEDED", outcome
    assert outcome.message_count > 1, outcome
    await freed(site)
    return f"{outcome.status} after {outcome.message_count} messages"


async def cancelled(site: Site, client: Client) -> str:
    """A call that is cancelled in the middle frees what its request holds."""
    outcome = await client.call(
        site.address(), GENERATE, request(output_tokens=LONG_TOKENS, seed=4), cancel_after=5
    )
    assert outcome.status == "CANCELLED", outcome
    return f"freed after {await freed(site):.1f} s"


async def failed(site: Site, client: Client) -> str:
    """An error has its text, percent-encoded on the wire, and its details in a binary trailer."""
    outcome = await client.call(site.address(), GENERATE, request(output_tokens=8, seed=5, model=MODEL))
    assert outcome.status == "INVALID_ARGUMENT", outcome
    assert MODEL in outcome.details, f"the text is {outcome.details!r}"
    status = status_pb2.Status.FromString(base64.b64decode(outcome.trailers["grpc-status-details-bin"]))
    assert status.message == outcome.details, f"the details say {status.message!r}"
    info = error_details_pb2.ErrorInfo()
    assert any(each.Unpack(info) for each in status.details), "the details have no ErrorInfo"
    return str(info.reason)


async def too_large(site: Site, client: Client) -> str:
    """A message above the limit is refused: by the frontend if it is just above, and else by the transport."""
    for size, status in ((MESSAGE_BYTES, "INVALID_ARGUMENT"), (2 * MESSAGE_BYTES, "RESOURCE_EXHAUSTED")):
        wrong = request(output_tokens=8, seed=6, text="x" * size)
        outcome = await client.call(site.address(), GENERATE, wrong)
        assert outcome.status == status, f"{size} bytes: {outcome}"
    again = await client.call(site.address(), CHECK, b"", streams=False)
    assert again.status == "OK", f"the next call: {again}"
    return outcome.status


async def large(site: Site, client: Client) -> str:
    """Messages far above the flow-control windows go both ways unchanged."""
    sent = random.Random(9).randbytes(LARGE_BYTES)
    outcome = await client.call(site.tickers[0].address, ticker.ECHO, sent)
    assert outcome.status == "OK", outcome
    assert outcome.bodies == [sent] * ticker.ECHOES, "other bytes"
    return f"{LARGE_BYTES / 1e6:g} MB in, {ticker.ECHOES * LARGE_BYTES / 1e6:g} MB out"


async def at_once(site: Site, client: Client) -> str:
    """Calls at once all have their answer."""
    running = client.begin(
        site.address(), GENERATE, request(output_tokens=4, seed=7), count=CALLS_AT_ONCE, channel="at once"
    )
    outcomes = await running.end()
    bad = [outcome for outcome in outcomes if outcome.status != "OK"]
    assert not bad, f"{len(bad)} of {len(outcomes)} calls, the first: {bad[0]}"
    answers = {tuple(tokens(outcome)) for outcome in outcomes}
    assert len(answers) == 1, f"{len(answers)} different answers to equal requests"
    return f"{len(outcomes)} answers"


async def health(site: Site, client: Client) -> str:
    """Check and Watch say that the frontend serves."""
    wanted = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()
    checked = await client.call(site.address(), CHECK, b"", streams=False)
    assert (checked.status, checked.bodies) == ("OK", [wanted]), checked
    watched = await client.call(site.address(), WATCH, b"", cancel_after=1)
    assert (watched.status, watched.bodies) == ("CANCELLED", [wanted]), watched
    return "SERVING"


async def tls(site: Site, client: Client) -> str:
    """TLS and mutual TLS work; a client without a certificate is refused by mutual TLS."""
    for name, shows in ((TLS, False), (MUTUAL, True)):
        outcome = await client.call(
            site.address(name),
            GENERATE,
            request(output_tokens=ANSWER_TOKENS, seed=1),
            tls=site.tls(shows_certificate=shows),
        )
        assert outcome.status == "OK", f"{name}: {outcome}"
        assert tokens(outcome) == await reference(site, 1), f"{name}: other tokens"
    refused = await client.call(
        site.address(MUTUAL),
        LIST_MODELS,
        b"",
        streams=False,
        tls=site.tls(shows_certificate=False),
        channel="no certificate",
        deadline_s=10.0,
    )
    assert refused.status in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, refused
    return f"without a certificate {refused.status}"


CASES: Final[Mapping[str, Case]] = {
    "answer": answer,
    "gzip": compressed,
    "deadline": deadline,
    "cancel": cancelled,
    "error": failed,
    "4 MB": too_large,
    "large": large,
    "300 at once": at_once,
    "health": health,
    "TLS": tls,
}


async def drains(site: Site, clients: Sequence[Client]) -> dict[str, str | AssertionError]:
    """A server that closes its listener (GOAWAY): running streams end well, and new calls go to the other server.

    All clients have their streams at the same time.
    """
    first, second = site.ticker("drained"), site.tickers[1]
    target = f"ipv4:{first.address},{second.address}"
    wanted = json.dumps({"count": 40, "every_s": 0.1}).encode()
    running = [client.begin(target, ticker.TICK, wanted, channel="drain") for client in clients]
    for each in running:
        await each.has_begun.wait()
    await asyncio.to_thread(first.ask, "close")
    return {
        client.name: await _seen(_drained(client, target, each))
        for client, each in zip(clients, running, strict=True)
    }


async def _drained(client: Client, target: str, running: Running) -> str:
    async def is_elsewhere() -> bool:
        outcome = await client.call(target, ticker.NAME, b"", channel="drain", streams=False)
        assert outcome.status == "OK", f"a new call: {outcome}"
        return outcome.bodies == [b"second"]

    await until(is_elsewhere, 5, "new calls at the other server")
    (outcome,) = await running.end()
    assert outcome.status == "OK", f"the stream: {outcome}"
    assert outcome.bodies == [b"%d" % each for each in range(40)], "messages are missing"
    return "stream whole, new calls elsewhere"


async def restarted(site: Site, clients: Sequence[Client]) -> dict[str, str | AssertionError]:
    """A frontend that is asked to end (SIGTERM) finishes the streams of all clients."""
    part = site.mesh.parts[PLAIN]
    wanted = request(output_tokens=400, seed=8)
    running = [client.begin(site.address(), GENERATE, wanted) for client in clients]
    for each in running:
        await each.has_begun.wait()
    assert part.process is not None
    part.process.terminate()
    seen = {}
    for client, each in zip(clients, running, strict=True):
        seen[client.name] = await _seen(_finished(each, running[0]))
    await asyncio.to_thread(part.process.wait, 60)
    part.process = None
    await site.mesh.start(PLAIN)
    return seen


async def _finished(running: Running, first: Running) -> str:
    (outcome,) = await running.end()
    (other,) = await first.end()
    assert outcome.status == "OK", f"the stream: {outcome}"
    assert len(tokens(outcome)) == 400, f"{len(tokens(outcome))} of 400 tokens"
    assert tokens(outcome) == tokens(other), "other tokens than the first client's"
    return "stream whole"


async def _seen(case: Awaitable[str]) -> str | AssertionError:
    try:
        return await case
    except AssertionError as error:
        return error


async def reference(site: Site, seed: int, prompt_tokens: int = 40) -> list[int]:
    """Return the tokens that grpc.aio gets in this process, for the request of `seed`."""
    if seed not in _references:
        wanted = pb.GenerateRequest.FromString(
            request(output_tokens=ANSWER_TOKENS, seed=seed, prompt_tokens=prompt_tokens)
        )
        ids: list[int] = []
        async with grpc.aio.insecure_channel(site.address()) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            async for message in stub.Generate(wanted, timeout=60):
                ids += message.tokens.ids
        assert len(ids) == ANSWER_TOKENS
        _references[seed] = ids
    return _references[seed]


async def freed(site: Site) -> float:
    """Wait until the mesh holds nothing for requests; return the seconds."""
    seconds = await site.mesh.idle(FREED_S)
    assert await sample(site.mesh, PLAIN, "kvmesh_frontend_live_requests") == 0
    return seconds
