"""Why a placement is what it is, in words. Pure."""

from __future__ import annotations

from services.router.policy import Candidate, Placement


def why(placement: Placement, *, waited_s: float, waited_for: str) -> str:
    """Return the reason of `placement`, which has candidates. It came after `waited_s`, if `waited_for` says for what."""
    chosen, *others = placement.candidates
    parts = []
    if waited_for:
        parts.append(f"After {_ms(waited_s)} at the router ({waited_for}):")
    if placement.prefill is None:
        parts.append(_local(chosen, others))
    elif not others:
        parts.append(f"{chosen.replica} is the only prefill replica that takes requests.")
    else:
        parts.append(_compared(chosen, others))
    return " ".join(parts)


def _local(chosen: Candidate, others: list[Candidate]) -> str:
    if not others:
        return f"{chosen.replica} decodes and runs the prompt, too: no prefill replica takes requests."
    soonest = min(others, key=_ready_s)
    return (
        f"{chosen.replica} decodes and runs the prompt, too, in {_ms(chosen.queue_s + chosen.prefill_s)}: "
        f"{soonest.replica} would take {_ms(_ready_s(soonest))} and a handoff."
    )


def _compared(chosen: Candidate, others: list[Candidate]) -> str:
    rival = others[0]
    if rival.score <= chosen.score * (1 + 1e-9):
        return f"{chosen.replica} was drawn among equals: {_times(chosen)}."
    later_s = _ready_s(chosen) - _ready_s(rival)
    if later_s <= 0:
        return f"{chosen.replica} is ready first: {_times(chosen)}; next is {rival.replica}: {_times(rival)}."
    if chosen.prefill_s < rival.prefill_s:
        return (
            f"{chosen.replica} has more in cache: {_times(chosen)}. {rival.replica} would be ready {_ms(later_s)} sooner "
            f"({_times(rival)}), but its work would be in front of others."
        )
    return (
        f"{chosen.replica} has the lowest score: {_times(chosen)}. {rival.replica} would be ready {_ms(later_s)} sooner "
        f"({_times(rival)}), but there it would delay others more."
    )


def _times(one: Candidate) -> str:
    return f"{_ms(one.queue_s)} of queue, {_ms(one.prefill_s)} of prefill with {one.matched_blocks} blocks cached"


def _ready_s(one: Candidate) -> float:
    return one.queue_s + one.prefill_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
