"""The rehearsal of a router runs a whole request, and leaves nothing behind."""

from __future__ import annotations

import pytest

from services.router.rehearsal import OUTPUT_TOKENS, Rehearsal


@pytest.mark.parametrize(("block_tokens", "local_tokens"), [(1, 0), (4, 1 << 20), (32, 64), (1024, 0)])
def test_every_run_brings_all_tokens_back(block_tokens: int, local_tokens: int) -> None:
    """Its prompt goes through prefill and decode with every configuration, however often it runs."""
    rehearsal = Rehearsal(block_tokens, dispatch_ahead_s=0.05, local_prefill_tokens_max=local_tokens)
    for run in range(5):
        assert rehearsal.run(100.0 + run) == OUTPUT_TOKENS
        core = rehearsal.core
        core.assert_consistent()
        assert not core.attempts.open and not core.sessions and not len(core.queue)
