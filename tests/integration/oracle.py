"""The oracle of tokens: one request alone on an engine without prefix reuse, directly through Triton."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton

from kvmesh.inference.v1 import inference_pb2 as pb

MODEL = "tensorrt_llm"


class Oracle:
    """Generates with one engine, one request at a time. The caller closes it with `close`."""

    def __init__(self, address: str, end_token_id: int) -> None:
        self._client = triton.InferenceServerClient(address)
        self._end_token_id = end_token_id

    async def generate(self, prompt: Sequence[int], request: pb.GenerateRequest) -> list[int]:
        """Return the output of `request` for `prompt`, the end token included."""
        sampling = request.sampling
        tensors = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([[len(prompt)]], np.int32),
            "request_output_len": np.array([[request.limits.max_output_tokens]], np.int32),
            "streaming": np.array([[False]]),
            "end_id": np.array([[self._end_token_id]], np.int32),
            "temperature": np.array([[sampling.temperature]], np.float32),
            "runtime_top_p": np.array([[sampling.top_p if sampling.HasField("top_p") else 1.0]], np.float32),
            "runtime_top_k": np.array([[sampling.top_k]], np.int32),
            "seed": np.array([[sampling.seed]], np.uint64),
        }
        ids: list[int] = []

        async def requests() -> AsyncIterator[dict[str, object]]:
            yield {"model_name": MODEL, "inputs": [_input(name, value) for name, value in tensors.items()]}

        responses = self._client.stream_infer(requests(), stream_timeout=300)
        async for result, error in responses:
            if error is not None:
                raise error
            ids += [int(token) for token in result.as_numpy("output_ids").reshape(-1)]
        return ids

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _input(name: str, value: np.ndarray[Any, Any]) -> triton.InferInput:
    types = {"i4": "INT32", "f4": "FP32", "u8": "UINT64", "b1": "BOOL"}
    tensor = triton.InferInput(name, list(value.shape), types[value.dtype.str[1:]])
    tensor.set_data_from_numpy(value)
    return tensor
