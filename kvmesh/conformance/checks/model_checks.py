"""Checks of the model's metadata and configuration."""

from __future__ import annotations

from typing import Final

from kvmesh.conformance.check import Check
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict, judged, not_offered, passed
from kvmesh.triton.capabilities import tensor_faults


async def _decoupled(trial: Trial) -> Verdict:
    fault = "" if trial.offer.is_decoupled else "model_transaction_policy { decoupled: true } is missing"
    return judged(fault, "decoupled")


async def _batch_dimension(trial: Trial) -> Verdict:
    size = trial.offer.max_batch_size
    fault = f"max_batch_size is {size}: tensors need a batch dimension, so at least 1" if size < 1 else ""
    return judged(fault, f"max_batch_size {size}")


async def _tensors(trial: Trial) -> Verdict:
    faults = tensor_faults(trial.offer.inputs, trial.offer.outputs)
    fault = f"missing: {'; '.join(faults)}" if faults else ""
    return judged(fault, f"{len(trial.offer.inputs)} inputs, {len(trial.offer.outputs)} outputs")


async def _sizes(trial: Trial) -> Verdict:
    untold = trial.offer.untold
    if untold:
        return not_offered(f"the model does not tell {', '.join(untold)}", FALLBACKS["sizes"])
    offer = trial.offer
    return passed(
        f"vocab_size {offer.vocab_size}, tokens_per_block {offer.tokens_per_block}, kv_blocks {offer.kv_blocks}, "
        f"max_sequence_tokens {offer.max_sequence_tokens}"
    )


CHECKS: Final = (
    Check("model", "decoupled", _decoupled),
    Check("model", "batch dimension", _batch_dimension),
    Check("model", "tensors and their types", _tensors),
    Check("model", "sizes as parameters", _sizes),
)
