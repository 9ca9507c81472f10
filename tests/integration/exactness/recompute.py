"""The oracle without a cache: every token is computed from the whole history, with a new, empty store for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.contract.request import SamplingParams
from engines.reference.arithmetic import ChunkInput
from engines.reference.sampling import sample_token
from engines.reference.transformer import Transformer
from kvmesh.inference.v1 import inference_pb2 as pb

BLOCK_TOKENS = 32


def recompute(
    model_dir: Path, prompt: Sequence[int], request: pb.GenerateRequest, end_token_id: int
) -> list[int]:
    """Return the output of `request` for `prompt`."""
    model = Transformer.load(model_dir)
    wanted = request.sampling
    sampling = SamplingParams(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p if wanted.HasField("top_p") else 1.0,
        seed=wanted.seed,
    )
    history = list(prompt)
    while len(history) < len(prompt) + request.limits.max_output_tokens:
        blocks = -(-len(history) // BLOCK_TOKENS)
        whole = ChunkInput(
            np.array(history, np.int32), 0, np.arange(blocks, dtype=np.int32), wants_logits=True
        )
        logits = model.forward([whole], model.new_store(blocks, BLOCK_TOKENS))[0]
        assert logits is not None
        history.append(sample_token(logits, len(history), sampling)[0])
        if history[-1] == end_token_id:
            break
    return history[len(prompt) :]
