"""Proof of WARMING from the passes, and the bookkeeping of a life."""

from __future__ import annotations

import pytest

from controlplane.warmup.jobs import PassResult
from controlplane.warmup.life import is_warm


@pytest.mark.parametrize(
    ("passes", "wanted"),
    [
        ([], False),
        ([PassResult(1.0, 3)], False),
        ([PassResult(1.0, 3), PassResult(1.0, 1)], False),
        ([PassResult(1.0, 0)], True),
        ([PassResult(1.0, 0), PassResult(1.0, 2)], False),
        ([PassResult(1.0, 0), PassResult(error="refused")], False),
        ([PassResult(1.0)], False),
        ([PassResult(9.0), PassResult(1.0)], False),
        ([PassResult(9.0), PassResult(1.0), PassResult(1.05)], True),
        ([PassResult(1.0), PassResult(1.2)], False),
        ([PassResult(1.0), PassResult(error="refused"), PassResult(1.0)], True),
        ([PassResult(1.0), PassResult(1.0), PassResult(error="refused")], False),
    ],
)
def test_passes_prove_warmth(passes: list[PassResult], wanted: bool) -> None:
    """An engine with a count needs a pass without cold steps, any other two equal passes; errors prove nothing."""
    assert is_warm(passes) is wanted
