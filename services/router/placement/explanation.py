"""Explains a placement in words. Pure.

The text claims only what the numbers show. A difference is attributed to the largest term in it.
"""

from __future__ import annotations

from typing import Final

from services.router.placement.policy import Candidate, DecodeCandidate, Placement

EQUAL: Final = 1 + 1e-9
"""Scores within this ratio are equal, and the choice among them is random."""

SAME_S: Final = 1e-4
"""Times that differ by less count as equal in the text."""

WAITING: Final = "waiting requests would lose"


def why(placement: Placement, *, waited_s: float, waited_for: str) -> str:
    """Return the reason of `placement`, which has candidates. `waited_for`: why it waited `waited_s`, or empty."""
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
    if placement.decode_candidates:
        parts.append(_decode(*placement.decode_candidates))
    return " ".join(parts)


def _local(chosen: Candidate, others: list[Candidate]) -> str:
    if not others:
        return f"{chosen.replica} decodes and runs the prompt itself: no prefill replica takes requests."
    slow = next((f" {one.replica} is in slow start." for one in (others[0], chosen) if one.slow_start_s), "")
    return (
        f"{chosen.replica} decodes and runs the prompt itself, with {_blocks(chosen.matched_blocks)} cached: "
        f"{_ms(chosen.score)} with the cost of decode, "
        f"against {_ms(others[0].score)} with a prefill on {others[0].replica} and a handoff.{slow}"
    )


def _compared(chosen: Candidate, others: list[Candidate]) -> str:
    rival = others[0]
    if rival.score <= chosen.score * EQUAL:
        return f"{chosen.replica} was chosen at random among equals: {_times(chosen)}."
    soonest = min(others, key=_ready_s)
    sooner_s = _ready_s(chosen) - _ready_s(soonest)
    if sooner_s <= -SAME_S:
        return _first(chosen, rival)
    losses = _losses(chosen, soonest)
    if sooner_s < SAME_S and sum(lost_s for _, lost_s in losses) < SAME_S:
        return f"{chosen.replica} is ahead of {soonest.replica} by less than {_ms(2 * SAME_S)}: {_times(chosen)}."
    when = "as soon" if sooner_s < SAME_S else f"{_ms(sooner_s)} sooner"
    count, sum_s = 1, losses[0][1]
    while sum_s <= sooner_s and count < len(losses):
        sum_s += losses[count][1]
        count += 1
    lost = " and ".join(f"{kind} {_ms(lost_s)} more" for kind, lost_s in losses[:count])
    has_more = chosen.matched_blocks > soonest.matched_blocks and losses[0][0] == WAITING
    merit = "has more in cache" if has_more else "has the lowest score"
    return (
        f"{chosen.replica} {merit}: {_times(chosen)}. {soonest.replica} would be ready {when} "
        f"({_times(soonest)}), but {lost}."
    )


def _first(chosen: Candidate, rival: Candidate) -> str:
    """Return that `chosen` is ready first, and what else speaks against `rival` if that is more than the time."""
    first = (
        f"{chosen.replica} should be ready first: {_times(chosen)}; next is {rival.replica}: {_times(rival)}"
    )
    kind, lost_s = _losses(chosen, rival)[0]
    is_more = lost_s > _ready_s(rival) - _ready_s(chosen)
    return f"{first}, and {kind} {_ms(lost_s)} more." if is_more else f"{first}."


def _losses(chosen: Candidate, rival: Candidate) -> list[tuple[str, float]]:
    """Return the losses if `rival` had been chosen, as reason and seconds, the largest first."""
    losses = [
        (WAITING, _waiting_s(rival) - _waiting_s(chosen)),
        ("requests that come to it for its cache would lose", rival.displaced_s - chosen.displaced_s),
        ("the chance that another router has just sent it a prompt costs", rival.risk_s - chosen.risk_s),
        ("its slow start adds", rival.slow_start_s - chosen.slow_start_s),
    ]
    return sorted(losses, key=lambda loss: -loss[1])


def _decode(chosen: DecodeCandidate, *others: DecodeCandidate) -> str:
    name = chosen.replica
    if not others:
        return f"{name} decodes: no other compared decode replica has room."
    rival = others[0]
    fuller_s, moved_s = rival.full_s - chosen.full_s, rival.move_s - chosen.move_s
    slower_s = rival.slow_start_s - chosen.slow_start_s
    if fuller_s + moved_s + slower_s <= 0:
        return f"{name} decodes, chosen at random among equals."
    if slower_s > max(fuller_s, moved_s):
        return f"{name} decodes: {rival.replica} is in slow start."
    if moved_s > fuller_s:
        return (
            f"{name} decodes: it holds {_blocks(chosen.matched_blocks)} of the prompt, "
            f"{rival.replica} {rival.matched_blocks}."
        )
    return f"{name} decodes: it has more room than {rival.replica}."


def _times(one: Candidate) -> str:
    return f"{_ms(one.queue_s)} of queue, {_ms(one.prefill_s)} of prefill with {_blocks(one.matched_blocks)} cached"


def _ready_s(one: Candidate) -> float:
    return one.queue_s + one.prefill_s


def _waiting_s(one: Candidate) -> float:
    """Return the loss of waiting requests."""
    return one.score - _ready_s(one) - one.displaced_s - one.risk_s - one.slow_start_s


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
