"""The clients of a run over the OpenAI surface: one that goes on behind its last event, and the openai package as it is.

The prompt of a stream is a list of token ids, and each event has the ids of its tokens, so that all tokens are compared.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import openai

from kvmesh.errors import TABLE
from tests.chaos import census
from tests.chaos.clients import Reader
from tests.chaos.plan import Stream
from tests.chaos.records import FAILED, Record, Seen
from tests.chaos.rig import KEY, Rig

SILENT_S: Final = 6.0
"""Longest time without an event after which a client tries another frontend: above the mesh's own watchdogs."""
CONNECT_S: Final = 1.0
RESUME_S_MAX: Final = 15.0
"""Longest time without an event in which a client tries again."""
PAUSE_S: Final = 0.1
"""Between two tries."""
RETRY_S_MAX: Final = 1.0

PACKAGE_S: Final = 4.0
"""Longest time in which the openai package tries twice again and tells its caller."""


@dataclass(frozen=True)
class Event:
    """One server-sent event. `id` is empty for an event without a position."""

    id: str
    name: str
    data: str


class Broken(Exception):
    """The stream ended early. `reason`: of the mesh; empty: the connection broke. `after_s`: None: it is final."""

    def __init__(self, reason: str, text: str, after_s: float | None) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
        self.after_s = after_s

    @property
    def code(self) -> str:
        """gRPC status of the reason. A connection that broke is UNAVAILABLE."""
        return TABLE[self.reason].name if self.reason in TABLE else "UNAVAILABLE"


class EventReader:
    """Reads server-sent events, as a browser's EventSource would with a key: it goes on behind the last one.

    `urls`: of the frontends. The next one is tried when a connection breaks.
    """

    def __init__(self, http: httpx2.AsyncClient, urls: Sequence[str]) -> None:
        self._http = http
        self._urls = urls

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """See Reader."""
        key, at, last, tries = uuid.uuid4().hex, stream.frontend, "", 0
        since_s = now()
        while True:
            headers = {"Idempotency-Key": key, **({"Last-Event-ID": last} if last else {})}
            try:
                left_s = None if stream.deadline_s is None else stream.deadline_s - (now() - seen.sent_s)
                if left_s is not None and left_s <= 0:
                    raise Broken("DEADLINE", "the client's own deadline", None)
                body = {**body_of(stream, left_s), "stream": True, "stream_options": {"include_usage": True}}
                async with aclosing(self._events(self._urls[at % len(self._urls)], body, headers)) as events:
                    async for event in events:
                        since_s = now()
                        seen.came_s.append(since_s)
                        last = event.id or last
                        note(event, seen)
                return
            except Broken as error:
                if error.after_s is None or now() - since_s > RESUME_S_MAX:
                    seen.end, seen.code = FAILED, error.code
                    seen.reason, seen.text = error.reason, error.text[:200]
                    return
                tries += 1
                at += 1
                seen.client_resumes += bool(last)
                # Both frontends may be unavailable for a moment.
                await asyncio.sleep(max(error.after_s, PAUSE_S * (tries > 1)))

    async def _events(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events up to the end. Raises Broken."""
        try:
            async with self._http.stream("POST", f"{url}/completions", json=body, headers=headers) as answer:
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise _refusal(answer)
                async for event in events_of(answer.aiter_lines()):
                    if event.name == "error":
                        raise _broken(json.loads(event.data)["error"])
                    if event.data == "[DONE]":
                        return
                    yield event
        except httpx2.HTTPError as error:
            raise Broken("", f"{type(error).__name__}: {error}", 0.0) from None
        raise Broken("", "the events ended without [DONE]", 0.0)


class PackageReader:
    """Reads through the openai package, unmodified and with its own retries, at one frontend for each stream.

    `saw` counts what its callers see.
    """

    def __init__(self, clients: Sequence[openai.AsyncOpenAI], model: str, saw: Counter[str]) -> None:
        self._clients = clients
        self._model = model
        self._saw = saw

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """See Reader."""
        body = body_of(stream, stream.deadline_s)
        named = {name: body.pop(name) for name in ("prompt", "max_tokens", "seed", "temperature")}
        try:
            answer = await self._clients[stream.frontend].completions.create(
                model=self._model,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=body,
                **named,
            )
            async with answer:
                async for chunk in answer:
                    seen.came_s.append(now())
                    take(chunk.model_dump(), seen)
            self._saw["the whole answer"] += 1
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            when = "behind some tokens" if seen.ids else "before the first token"
            reason = str(getattr(error, "code", None) or "")
            what = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
            self._saw[f"{what} {reason} {when}".replace("  ", " ")] += 1
            ended = Broken(reason, str(error), None)
            seen.end, seen.code, seen.reason, seen.text = FAILED, ended.code, ended.reason, ended.text[:200]


class OpenAiClients:
    """Makes both readers of a run, and keeps what a record cannot have of their answers until the next run."""

    def __init__(self) -> None:
        self._saw: Counter[str] = Counter()
        self._rig: Rig | None = None
        self._before: Mapping[str, Counter[str]] = {}

    def saw(self) -> dict[str, int]:
        """Return what callers of the openai package saw, with counts."""
        return dict(sorted(self._saw.items()))

    async def note(self, record: Record) -> None:
        """Complete the record of the run: answers over HTTP do not tell takeovers and resumes, so frontends are asked."""
        record.package = self.saw()
        if self._rig is None or record.violations:
            return  # the mesh has ended
        for name, after in (await _counts(self._rig)).items():
            before = self._before[name]
            moved = after - before if all(after[each] >= before[each] for each in before) else after
            record.takeovers += moved["takeovers"]
            record.resumed += moved["resumes"]

    @asynccontextmanager
    async def readers(self, rig: Rig) -> AsyncIterator[tuple[Reader, Reader]]:
        """Yield a resuming client's reader and that of the package."""
        self._saw.clear()
        self._rig, self._before = rig, await _counts(rig)
        parts = [part for name, part in rig.mesh.parts.items() if name.startswith("frontend")]
        urls = [f"http://{part.http_address}/v1" for part in parts]
        timeout = httpx2.Timeout(SILENT_S, connect=CONNECT_S)
        limits = httpx2.Limits(max_connections=None)
        hooks = {"request": [self._count]}
        async with (
            httpx2.AsyncClient(
                timeout=timeout, limits=limits, headers={"Authorization": f"Bearer {KEY}"}
            ) as http,
            openai.DefaultAsyncHttpxClient(event_hooks=hooks) as of_package,
        ):
            clients = [openai.AsyncOpenAI(base_url=url, api_key=KEY, http_client=of_package) for url in urls]
            yield EventReader(http, urls), PackageReader(clients, rig.mesh.config.mesh.model, self._saw)

    async def _count(self, request: httpx2.Request) -> None:
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            self._saw["a request sent again by the package"] += 1


async def _counts(rig: Rig) -> Mapping[str, Counter[str]]:
    """Return takeovers and resumes of each frontend since its start."""
    counts = {}
    for name in rig.mesh.running("frontend"):
        samples = await census.scrape(rig, name)
        names = ("takeovers", "resumes")
        counts[name] = Counter({each: int(samples[f"kvmesh_frontend_{each}_total"]) for each in names})
    return counts


def body_of(stream: Stream, left_s: float | None) -> dict[str, Any]:
    """Return the body of a completion. `left_s`: seconds to the client's deadline; None: it has none."""
    body: dict[str, Any] = {
        "prompt": list(stream.prompt),
        "max_tokens": stream.max_output_tokens,
        "seed": stream.seed,
        "temperature": stream.temperature,
        "top_k": stream.top_k,
        "return_token_ids": True,
    }
    if left_s is not None:
        body["deadline_ms"] = max(1.0, 1000 * left_s)
    if stream.session:
        body["user"] = stream.session
    return body


def note(event: Event, seen: Seen) -> None:
    """Record an event of an answer. Raises AssertionError if its position is not that of its tokens."""
    have = len(seen.ids)
    has_ended = take(json.loads(event.data), seen)
    if event.id:
        position = len(seen.ids) + has_ended
        assert int(event.id) == position, f"id {event.id} with {position} tokens, {have} before"


def take(chunk: Mapping[str, Any], seen: Seen) -> bool:
    """Record a chunk; return True if it has the finish reason. Raises AssertionError if it contradicts the tokens."""
    if usage := chunk.get("usage"):
        count = usage["completion_tokens"]
        assert count == len(seen.ids), f"usage says {count} tokens, {len(seen.ids)} came"
    for choice in chunk["choices"]:
        seen.ids += choice.get("token_ids") or ()
        if choice["finish_reason"] is not None:
            seen.finish_reason = choice["finish_reason"]
            return True
    return False


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Yield the events that the lines of a stream make. An event without its empty line is incomplete, and dropped."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif fields:
            yield Event(fields.get("id", ""), fields.get("event", ""), fields.get("data", ""))
            fields = {}


def _refusal(answer: httpx2.Response) -> Broken:
    fields = answer.json()["error"]
    if answer.headers.get("x-should-retry") == "true":
        fields["should_retry"] = True
        fields["retry_after_ms"] = float(answer.headers["retry-after-ms"])
    return _broken(fields)


def _broken(fields: Mapping[str, Any]) -> Broken:
    """Return the end that the fields of an error tell. Another frontend takes a request that this one drains, at once."""
    after_s = None
    if fields.get("should_retry"):
        after_s = min(RETRY_S_MAX, fields.get("retry_after_ms", 0.0) / 1000)
    return Broken(fields["code"], fields["message"], 0.0 if fields["code"] == "DRAINING" else after_s)
