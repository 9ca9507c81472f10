"""A small decoder with random weights, and the committed one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engines.reference.transformer import Shape, Transformer

MODEL_DIR = Path(__file__).parents[3] / "engines" / "reference" / "model"


@pytest.fixture(scope="session")
def trained() -> Transformer:
    """Return the committed model."""
    return Transformer.load(MODEL_DIR)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return the committed tokenizer."""
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


SMALL = Shape(
    vocab_size=97,
    width=32,
    layer_count=2,
    head_count=4,
    kv_head_count=2,
    feed_forward_width=48,
    rope_base=100.0,
    norm_epsilon=1e-5,
)


@pytest.fixture(scope="session")
def small_weights() -> dict[str, NDArray[np.float64]]:
    """Return random weights, large enough that attention is far from uniform."""
    generator = np.random.default_rng(5)
    return {name: generator.normal(0, 0.4, size) for name, size in SMALL.weight_shapes().items()}


@pytest.fixture(scope="session")
def small(small_weights: dict[str, NDArray[np.float64]]) -> Transformer:
    """Return a decoder of two layers over `small_weights`."""
    return Transformer(SMALL, small_weights, max_sequence_tokens=256)
