"""The candidates of a placement, for its explanation. Built only where a caller asks for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from services.router.placement.decode_choice import Fitting, LocalPrefill
from services.router.placement.policy import Candidate, DecodeCandidate, Placement
from services.router.placement.prefill_choice import SCORE, ScoredReplica

CANDIDATES_MAX: Final = 16


def with_remote_prefill(
    placement: Placement,
    scored: Sequence[ScoredReplica],
    fitting: Sequence[Fitting],
    terms: Callable[[ScoredReplica], tuple[float, float]],
    multipliers: Mapping[str, float],
) -> Placement:
    """Return `placement`, which is one of `scored`, with up to CANDIDATES_MAX compared candidates of each role.

    `terms` returns the displaced demand and the collision risk in a score. `multipliers`: factors of replicas in slow
    start, which scores and costs have already (slow_start.py).
    """
    return placement._replace(
        candidates=tuple(_ranked(placement.prefill, scored, terms, multipliers, 0.0)[:CANDIDATES_MAX]),
        decode_candidates=tuple(_decodes(placement.decode, fitting, multipliers)[:CANDIDATES_MAX]),
    )


def with_local_prefill(
    placement: Placement,
    local: LocalPrefill,
    scored: Sequence[ScoredReplica],
    handoff_s: float,
    terms: Callable[[ScoredReplica], tuple[float, float]],
    multipliers: Mapping[str, float],
) -> Placement:
    """Return `placement`, where decode runs the prompt itself, with the candidates of a pair, CANDIDATES_MAX in all.

    `handoff_s`: cost of the decode side of a pair. `terms` and `multipliers`: as in `with_remote_prefill`.
    """
    decode, matched_blocks, queue_s, prefill_s, cost_s = local
    slow_start_s = _added_s(cost_s, decode.name, multipliers)
    local_prefill = Candidate(
        *(decode.name, matched_blocks, queue_s, prefill_s, cost_s),
        decode_s=cost_s - slow_start_s - queue_s - prefill_s,
        slow_start_s=slow_start_s,
    )
    pairs = _ranked(None, scored, terms, multipliers, handoff_s)[: CANDIDATES_MAX - 1]
    return placement._replace(candidates=(local_prefill, *pairs))


def _ranked(
    chosen: str | None,
    scored: Sequence[ScoredReplica],
    terms: Callable[[ScoredReplica], tuple[float, float]],
    multipliers: Mapping[str, float],
    decode_s: float,
) -> list[Candidate]:
    found = []
    for one in sorted(scored, key=lambda one: (one[0] != chosen, one[SCORE])):
        displaced_s, risk_s = terms(one)
        slow_start_s = _added_s(one[SCORE], one[0], multipliers)
        score = one[SCORE] + decode_s
        found.append(Candidate(*one[:SCORE], score, displaced_s, risk_s, decode_s, slow_start_s))
    return found


def _decodes(
    chosen: str, fitting: Sequence[Fitting], multipliers: Mapping[str, float]
) -> list[DecodeCandidate]:
    ranked = sorted(fitting, key=lambda one: (one[0].name != chosen, one[3]))
    found = []
    for one, depth, full_s, cost_s in ranked:
        factor = multipliers.get(one.name, 1.0)
        costs = full_s / factor, (cost_s - full_s) / factor, _added_s(cost_s, one.name, multipliers)
        found.append(DecodeCandidate(one.name, depth, *costs))
    return found


def _added_s(cost_s: float, replica: str, multipliers: Mapping[str, float]) -> float:
    """Return the part of `cost_s` that the slow start of `replica` adds."""
    return cost_s - cost_s / multipliers.get(replica, 1.0)
