"""The HTTP endpoints: Starlette's routes, and what each does with a request.

Effects only. Every request for an answer of the model goes through `InferenceService.serve`, as a gRPC call does.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmesh.clock import Clock, wall_s
from kvmesh.errors import MeshError, Violation, internal, invalid
from kvmesh.http1.connection import PARTS, TRY_WRITE
from kvmesh.tenants.caller import Caller
from services.frontend.requests import faults
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.output import Output
from services.frontend.surface.call_reader import CallReader
from services.frontend.surface.model_listing import ModelListing
from services.frontend.surface.openai import (
    chat_request,
    completion_request,
    continuation,
    http_errors,
    models,
    rate_limits,
    tokenization,
)
from services.frontend.surface.openai.answer_format import (
    ChatKind,
    CompletionKind,
    EventStream,
    Facts,
    Kind,
    WholeAnswer,
)
from services.frontend.surface.openai.asked import Asked, renamed
from services.frontend.surface.openai.continuation import Continuation
from services.frontend.surface.openai.http_call import (
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    GenerateCall,
    Headers,
    HttpRequest,
    Receive,
    Responder,
    Scope,
    Send,
    refuse,
)
from services.frontend.surface.openai.token_texts import TokenTexts
from services.frontend.surface.request_parser import RequestParser, alone
from services.frontend.surface.served_versions import ServedVersions
from services.frontend.surface.service import InferenceService
from services.frontend.surface.slow_reader import TAIL_S

log = logging.getLogger(__name__)

THREAD_BYTES_MIN: Final = 65_536
"""Size from which a thread decodes a body. It takes milliseconds, in which the event loop would serve no other stream."""

REFUSAL_S: Final = 3.0
"""Longest wait until a client takes a refusal."""


class OpenAiSurface:
    """See the module. `unready_reason()` returns why the process does not serve; empty: it does."""

    def __init__(
        self,
        core: FrontendCore,
        service: InferenceService,
        calls: CallReader,
        parser: RequestParser,
        listing: ModelListing,
        versions: ServedVersions,
        clock: Clock,
        *,
        body_bytes_max: int,
        unready_reason: Callable[[], str],
    ) -> None:
        self.service = service
        self.calls = calls
        self.clock = clock
        self.body_bytes_max = body_bytes_max
        self._core = core
        self._parser = parser
        self._listing = listing
        self._versions = versions
        self._unready_reason = unready_reason
        self._created_s = wall_s()
        self._big = asyncio.Lock()
        """Held while a thread decodes a big body."""
        generations = {
            "/v1/chat/completions": Generation(self, chat_request.read, ChatKind),
            "/v1/completions": Generation(self, completion_request.read, CompletionKind),
        }
        routes = [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generations.items()),
            Route("/tokenize", Plain(self, self._tokenize), methods=["POST"]),
            Route("/detokenize", Plain(self, self._detokenize), methods=["POST"]),
            Route("/v1/models", Plain(self, self._models), methods=["GET"]),
            Route("/v1/models/{model:path}", Plain(self, self._model), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
        ]
        others = Starlette(routes=routes, exception_handlers={HTTPException: _of_http})
        # A redirect would lead to the host that the request names.
        others.router.redirect_slashes = False
        self.application = Application(generations, others)

    async def decoded(self, read: Callable[[bytes], Any], body: bytes) -> Any:
        """Return `read(body)`, made by a thread if the body is big. Raises MeshError."""
        if len(body) < THREAD_BYTES_MIN:
            return read(body)
        return await alone(self._big, read, body)

    def model(self, name: str | None) -> str:
        """Return the name of the model for an answer. Raises MeshError (MODEL_UNKNOWN) with the names that exist."""
        try:
            return self._listing.known(name or "")
        except MeshError as error:
            raise replace(error, reason="MODEL_UNKNOWN") from None

    def texts(self, version: str) -> TokenTexts:
        """Return the texts of the tokens of a model version."""
        return TokenTexts(self._versions.get(version).tokenizer)

    def continuation(self, position: int, asked: Asked) -> Callable[[str], Continuation]:
        """Return the maker of the continuation behind `position`, for the version that serves the request."""

        def made(version: str) -> Continuation:
            detokenizer = self._versions.get(version).tokenizer.detokenizer()
            return Continuation(
                position, Output(detokenizer, tuple(asked.request.sampling.stop), with_logprobs=False)
            )

        return made

    async def _models(self, request: HttpRequest, _: Caller, __: Mapping[str, str]) -> bytes:
        return models.listing(self._listing.all().models, self._created_s)

    async def _model(self, request: HttpRequest, _: Caller, path: Mapping[str, str]) -> bytes:
        return models.one(self._listing.one(self.model(path["model"])).model, self._created_s)

    async def _tokenize(self, request: HttpRequest, caller: Caller, _: Mapping[str, str]) -> bytes:
        data = await self.calls.read(request.body, request, caller)
        with self._core.capacity_to_read(self.clock.now_s()):
            asked: tokenization.Asked = await self.decoded(tokenization.read, data)
            version = self._listing.version(self.model(asked.model))
            parsed = await self._parser.check(
                await self._parser.read(asked.data), version, caller.service_class
            )
            return await asyncio.to_thread(
                tokenization.tokens_answer,
                array("i", parsed.prompt_ids).tolist(),
                version.max_sequence_tokens,
                version.tokenizer,
                with_texts=asked.with_texts,
            )

    async def _detokenize(self, request: HttpRequest, caller: Caller, _: Mapping[str, str]) -> bytes:
        data = await self.calls.read(request.body, request, caller)
        with self._core.capacity_to_read(self.clock.now_s()):
            body: tokenization.DetokenizeRequest = await self.decoded(tokenization.DETOKENIZE.read, data)
            version = self._listing.version(self.model(body.model))
            return await asyncio.to_thread(
                tokenization.text_answer, body.tokens, version.max_sequence_tokens, version.tokenizer
            )

    async def _health(self, _: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def _ready(self, _: Request) -> Response:
        reason = self._unready_reason()
        if not reason:
            return Response(b'{"status":"ready"}', media_type="application/json")
        return Response(
            http_errors.plain(503, reason, "NOT_READY"), status_code=503, media_type="application/json"
        )


class Application:
    """The ASGI application: generations by their paths at once, all other requests by `others` (Starlette).

    Endpoints handle all errors themselves. Routes and middleware of Starlette would only cost time (docs/measurements).
    """

    def __init__(self, generations: Mapping[str, Generation], others: Starlette) -> None:
        self._generations = generations
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        found = self._generations.get(scope["path"]) if scope["type"] == "http" else None
        if found is not None and scope["method"] == "POST":
            await found(scope, receive, send)
        else:
            # A client that does not read such an answer loses its connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(TAIL_S):
                    await self._others(scope, receive, send)  # type: ignore[arg-type]  # wants mutable mappings


class Endpoint(ABC):
    """An ASGI application for one path: it serves a request, and turns errors into responses."""

    def __init__(self, surface: OpenAiSurface) -> None:
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responder = Responder(send, scope.get("extensions", {}).get(PARTS, {}).get(TRY_WRITE))
        request = self._request(scope, receive, responder)
        try:
            await self._serve(request, responder, scope)
        except MeshError as error:
            await self._refuse(error, request, responder)
        except asyncio.CancelledError:
            # The process ends; its drain has handed over or finished the requests that it could.
            if not request.is_gone:
                sent = request.tokens_sent if isinstance(request, GenerateCall) else 0
                await self._refuse(faults.draining(sent), request, responder)
        except Exception:
            log.exception("bug in an HTTP endpoint", extra={"path": scope["path"]})
            await self._refuse(internal(), request, responder)
        finally:
            request.close()

    async def _refuse(self, error: MeshError, request: HttpRequest, responder: Responder) -> None:
        try:
            async with asyncio.timeout(REFUSAL_S):
                await refuse(
                    self._named(error, request),
                    responder,
                    self._error_headers(error, request),
                )
        except (TimeoutError, asyncio.CancelledError):
            log.debug("the client did not take the refusal", extra={"reason": error.reason})

    def _request(self, scope: Scope, receive: Receive, responder: Responder) -> HttpRequest:
        return HttpRequest(scope, receive, responder, self._surface.body_bytes_max)

    @abstractmethod
    async def _serve(self, request: HttpRequest, responder: Responder, scope: Scope) -> None:
        """Answer the request. Raises MeshError."""

    def _named(self, error: MeshError, request: HttpRequest) -> MeshError:
        return renamed(error, {})

    def _error_headers(self, error: MeshError, request: HttpRequest) -> Headers:
        return []


class Plain(Endpoint):
    """An endpoint with one JSON answer. `answer(request, caller, path parameters)` returns its body."""

    def __init__(
        self,
        surface: OpenAiSurface,
        answer: Callable[[HttpRequest, Caller, Mapping[str, str]], Awaitable[bytes]],
    ) -> None:
        super().__init__(surface)
        self._answer = answer

    async def _serve(self, request: HttpRequest, responder: Responder, scope: Scope) -> None:
        caller = self._surface.calls.caller(request)
        body = await self._answer(request, caller, scope["path_params"])
        try:
            async with asyncio.timeout(TAIL_S):
                await responder.whole(200, body, [])
        except TimeoutError:
            log.debug("the client did not take the answer", extra={"path": scope["path"]})


class Generation(Endpoint):
    """An endpoint with an answer of the model. `read` translates its body, `kind` is the form of its answer."""

    def __init__(
        self, surface: OpenAiSurface, read: Callable[[bytes], Asked], kind: Callable[[], Kind]
    ) -> None:
        super().__init__(surface)
        self._read = read
        self._kind = kind

    def _request(self, scope: Scope, receive: Receive, responder: Responder) -> GenerateCall:
        surface = self._surface
        return GenerateCall(
            scope,
            receive,
            responder,
            surface.body_bytes_max,
            self._headers,
            surface.clock.now_s,
        )

    async def _serve(self, request: HttpRequest, responder: Responder, scope: Scope) -> None:
        assert isinstance(request, GenerateCall)
        await self._surface.service.serve(
            request, is_bare=True, translate=partial(self._translated, request, scope["http_version"])
        )

    async def _translated(self, call: GenerateCall, version: str, body: bytes) -> bytes:
        """Return the message of the request in `body`, and tell `call` the form of its answer. Raises MeshError."""
        surface = self._surface
        asked: Asked = await surface.decoded(self._read, body)
        if asked.streams and version == "1.0":
            what = Violation("stream", "true over HTTP/1.0", "HTTP/1.1 for a stream")
            raise invalid("FEATURE_UNSUPPORTED", [what])
        call.names, call.deadline_s = asked.names, asked.deadline_s
        key, last = call.metadata.get(IDEMPOTENCY_KEY, ""), call.metadata.get(LAST_EVENT_ID)
        if key:
            asked.request.idempotency_key = key
        if last is not None:
            _check_continues(last, key, asked)
            call.continuation = surface.continuation(continuation.position_of(last), asked)
        options = asked.request.options
        facts = Facts(
            self._kind(),
            surface.model(asked.request.model),
            wall_s(),
            surface.texts,
            with_logprobs=options.logprobs,
            with_ids=asked.returns_token_ids,
        )
        call.format = (
            EventStream(facts, includes_usage=asked.includes_usage, has_ids=bool(key), begins=last is None)
            if asked.streams
            else WholeAnswer(facts)
        )
        return asked.request.SerializeToString()

    def _headers(self, call: GenerateCall) -> Headers:
        made = [(b"x-request-id", call.request_id.encode())]
        return made + self._limits(call.trailers, call)

    def _limits(self, trailers: Mapping[str, str], call: HttpRequest) -> Headers:
        if not trailers:
            return []
        with suppress(MeshError):  # a key that was revoked meanwhile
            return rate_limits.headers(trailers, self._surface.calls.caller(call).account)
        return []

    def _named(self, error: MeshError, request: HttpRequest) -> MeshError:
        assert isinstance(request, GenerateCall)
        return renamed(error, request.names)

    def _error_headers(self, error: MeshError, request: HttpRequest) -> Headers:
        assert isinstance(request, GenerateCall)
        made = [(b"x-request-id", request.request_id.encode())] if request.request_id else []
        return made + self._limits(error.trailers, request)


def _check_continues(last: str, key: str, asked: Asked) -> None:
    """Raise MeshError if a request with Last-Event-ID cannot go on: it needs its key, and a stream."""
    if not key:
        what = Violation("Idempotency-Key", "missing", "the key of the request that Last-Event-ID continues")
        raise invalid("FIELD_OUT_OF_RANGE", [what])
    if not asked.streams:
        raise invalid(
            "FIELD_OUT_OF_RANGE",
            [Violation(continuation.FIELD, repr(last[:40]), "it needs stream = true", is_clause=True)],
        )


async def _of_http(_: Request, error: Exception) -> Response:
    """Return the response for an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    code = {404: "PATH_UNKNOWN", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "HTTP_ERROR")
    text = {404: "this path is not served", 405: "this path has another method"}.get(
        error.status_code, error.detail
    )
    return Response(
        http_errors.plain(error.status_code, text, code),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )
