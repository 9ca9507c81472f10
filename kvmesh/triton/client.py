"""Calls to one Triton server. A shell on `tritonclient.grpc.aio`.

One request per stream: then the end of the stream is the end of the request, an error belongs to it, and a cancel
reaches nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import grpc
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from kvmesh.triton import capabilities, errors
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import CallError, EngineLost

MODEL: Final = "tensorrt_llm"
UNARY_TIMEOUT_S: Final = 5.0
PROBE_PERIOD_S: Final = 0.1
_MESSAGE_BYTES_MAX: Final = 64 << 20
_CHANNEL_OPTIONS: Final = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class Responses(Protocol):
    """What comes back on one stream. Ends when the server is done; `cancel` before it is dropped."""

    def __aiter__(self) -> Responses: ...

    async def __anext__(self) -> Any:
        """Return the next ModelInferResponse. Raises CallError."""
        ...

    def cancel(self) -> None: ...


class TritonClient:
    """The calls services make to one Triton server at `address`. Owned by who made it: `close`."""

    def __init__(self, address: str, model: str = MODEL) -> None:
        self.address = address
        self.model = model
        self._client = InferenceServerClient(address, channel_args=_CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Close the channel; live streams break."""
        await self._client.close()

    async def is_ready(self) -> bool:
        """Return whether the model answers. Never raises for a server that does not."""
        try:
            return bool(await self._client.is_model_ready(self.model, client_timeout=UNARY_TIMEOUT_S))
        except (InferenceServerException, grpc.RpcError):
            return False

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the model is ready. Raises EngineLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.is_ready():
                    await asyncio.sleep(PROBE_PERIOD_S)
        except TimeoutError:
            raise EngineLost(
                f"No engine answers at {self.address}: the model {self.model} was not ready within {timeout_s:g} s."
            ) from None

    async def facts(self, *, role: str, model_version: str, block_tokens: int) -> ModelFacts:
        """Return what the model can do. Raises ModelRefused, or CallError if the server does not answer."""
        try:
            metadata = await self._client.get_model_metadata(self.model, client_timeout=UNARY_TIMEOUT_S)
            config = await self._client.get_model_config(self.model, client_timeout=UNARY_TIMEOUT_S)
        except InferenceServerException as error:
            raise errors.of_text(f"{error.status()}: {error.message()}") from error
        return capabilities.derive(
            metadata, config.config, role=role, model_version=model_version, block_tokens=block_tokens
        )

    def stream(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Responses:
        """Send one request on a stream of its own and half-close; must run on the event loop.

        `timeout_s` bounds the whole stream. The caller cancels what it returns, however it leaves.
        """

        async def one() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": self.model,
                "inputs": inputs,
                "request_id": request_id,
                "parameters": parameters,
            }

        return _Responses(self._client.stream_infer(one(), stream_timeout=timeout_s))

    async def ask(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> None:
        """Send one request and read its answers away. Raises CallError."""
        async with opened(
            self.stream(inputs, request_id=request_id, parameters=parameters, timeout_s=timeout_s)
        ) as responses:
            async for _ in responses:
                pass


@asynccontextmanager
async def opened(responses: Responses) -> AsyncIterator[Responses]:
    """Cancel `responses` on the way out, however the caller leaves."""
    try:
        yield responses
    finally:
        responses.cancel()


class _Responses:
    """Typed errors instead of pairs and transport exceptions."""

    __slots__ = ("_iterator",)

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        try:
            result, error = await self._iterator.__anext__()
        except grpc.aio.AioRpcError as broken:
            raise errors.of_status(broken.code(), broken.details() or "") from broken
        if error is not None:
            raise errors.of_text(error.message())
        return result.get_response()

    def cancel(self) -> None:
        self._iterator.cancel()


__all__ = ["CallError", "Responses", "TritonClient", "opened"]
