"""Judgements on disaggregated calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.conformance.judgements import difference, end_fault, must, prompt_fault, shown
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.verdict import Verdict, failed, passed


def prefill_fault(prompt: Sequence[int], answer: Recording) -> str:
    """Return why the answer of a context_only call is wrong: one response with the first token and a handoff."""
    if fault := end_fault(answer):
        return f"context_only: {fault}"
    if len(answer.responses) != 1:
        return f"context_only: {len(answer.responses)} responses came, allowed is one"
    if fault := prompt_fault(prompt, answer.tokens):
        return f"context_only: {fault}"
    if len(answer.tokens) != 1:
        return f"context_only: {len(answer.tokens)} tokens came, allowed is one"
    return "" if answer.handoff else "context_only: the response has no context_phase_params"


def first_token(prompt: Sequence[int], first: Recording, rest: Recording) -> Verdict:
    """Judge whether a generation_only call begins with the first token of the prefill."""
    must(prefill_fault(prompt, first))
    must(end_fault(rest))
    if rest.tokens[:1] != first.tokens:
        return failed(f"the prefill made {shown(first.tokens)}, decode began with [{shown(rest.tokens[:2])}]")
    return passed(f"decode began with the prefill's token {shown(first.tokens)}")


def same_tokens(prompt: Sequence[int], first: Recording, rest: Recording, whole: Sequence[int]) -> Verdict:
    """Judge a disaggregated answer against the aggregated one, `whole`."""
    must(prefill_fault(prompt, first))
    must(end_fault(rest))
    if rest.tokens == tuple(whole):
        return passed(f"{len(whole)} tokens are those of the aggregated answer")
    return failed(f"the disaggregated answer differs: {difference(whole, rest)}")
