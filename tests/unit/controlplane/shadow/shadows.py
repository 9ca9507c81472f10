"""Simulated shadows: pairs of answers of engines with tokens that flip by chance, counted as frontends count them."""

from __future__ import annotations

import random
from typing import Any

from controlplane.shadow.document import ShadowDocument
from controlplane.shadow.order import ShadowOrder
from kvmesh.control.v1 import shadow_pb2 as pb
from services.frontend.shadow.comparison import Answer, compare
from services.frontend.shadow.counts import Latency, ShadowTally


def order(shadow: str = "shadow-20270115-080000", **changes: Any) -> ShadowOrder:
    """Return an order of a candidate."""
    values: dict[str, Any] = {
        "id": shadow,
        "to_pool": "next",
        "to_version": "v2",
        "stable_version": "v1",
        "sample_permille": 1000,
        "token_max": 2_000_000,
        "expires_s": 1_800_003_600.0,
        "started_s": 1_800_000_000.0,
    }
    return ShadowOrder(**(values | changes))


def aa_order(**changes: Any) -> ShadowOrder:
    """Return an order of an A/A shadow, which was earlier."""
    return order(
        "shadow-20270115-070000", to_version="v1", to_pool="young", started_s=1_799_996_400.0, **changes
    )


def flipped(ids: list[int], share: float, draw: random.Random) -> list[int]:
    """Return `ids` with each token another one by chance. All tokens behind a flip differ, as in an engine."""
    for at in range(len(ids)):
        if draw.random() < share:
            return [*ids[:at], *(each + 1_000_000 for each in ids[at:])]
    return ids


def tally_of(
    draw: random.Random,
    compared_tokens: int,
    *,
    user_flips: float = 0.001,
    copy_flips: float = 0.001,
    slower: float = 1.0,
    errors: float = 0.0,
    has_baseline: bool = False,
    shadow: str = "shadow-20270115-080000",
    session_flips: float = 0.0,
) -> ShadowTally:
    """Return the counts after `compared_tokens`. `session_flips`: a share of sessions in which every answer flips early."""
    tally = ShadowTally(shadow, f"boot-{draw.random()}")
    session, left = 0, 0
    is_bad = False
    while tally.counts.target.tokens < compared_tokens:
        if not left:
            session, left = draw.getrandbits(63), draw.randint(1, 8)
            is_bad = draw.random() < session_flips
        left -= 1
        truth = list(range(draw.randint(50, 300)))
        user = Answer(flipped(truth, user_flips, draw), "ok", "length")
        has_failed = draw.random() < errors
        copy = Answer(
            flipped(truth, 0.5 if is_bad else copy_flips, draw),
            "ENGINE_ERROR" if has_failed else "ok",
            "" if has_failed else "length",
        )
        tally.add(session, compare(user, copy, has_whole_length=True), user, copy)
        if has_baseline:
            base = Answer(flipped(truth, user_flips, draw), "ok", "length")
            tally.add(session, compare(user, base, has_whole_length=True), user, base, is_baseline=True)
            noise = [draw.gauss(1.0, 0.15) for _ in range(4)]
            target = Latency(0.2 * slower * max(0.1, noise[0]), 0.02 * slower * max(0.1, noise[1]))
            tally.add_latency(session, target, Latency(0.2 * max(0.1, noise[2]), 0.02 * max(0.1, noise[3])))
    return tally


def document_of(wanted: ShadowOrder, *tallies: ShadowTally) -> ShadowDocument:
    """Return the document with the reports of frontends."""
    document = ShadowDocument(order=wanted)
    for number, tally in enumerate(tallies):
        for report in tally.report():
            assert isinstance(report, pb.ShadowReport)
            document = document.with_report(f"frontend-{number}", report)
    return document
