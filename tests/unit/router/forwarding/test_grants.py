"""Guests at a router: charged at admission, corrected, refunded, and refused without a grant. Own callers never are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.regions.bucket import BURST_S, RETRY_MAX_S
from kvmesh.regions.quantity import NOTHING, Quantity
from services.router.forwarding.attempt import Attempt
from services.router.placement.policy import Hit
from services.router.regions.callers import Callers
from services.router.regions.guests import Charge, Guest
from tests.unit.router.desk import A, B, Desk
from tests.unit.router.world import World

GRANT = Quantity(1000, 100)
PROMPT_MAX = 60
"""Longest prompt of the world: 40 tokens, and what was received of up to 12."""


def desk_of(grant: Quantity | None = GRANT, **options: Any) -> tuple[Desk, Guest]:
    """Return a desk of region "us", and its guests from "eu" with a full burst of `grant`."""
    callers = Callers("us", ("eu", "us"))
    desk = Desk(callers=callers, **options)
    guest = callers.guests["eu"]
    if grant is not None:
        guest.renew(grant, desk.now_s - 10)
    return desk, guest


def refusal(desk: Desk) -> pb.Refusal:
    (row,) = desk.told().refusals
    return row


def test_a_guest_without_any_grant_is_refused() -> None:
    """Before the first message of the control plane a guest is refused with GRANT, and leaves nothing behind."""
    desk, guest = desk_of(None)
    desk.submit(region="eu")
    row = refusal(desk)
    assert row.reason == pb.Refusal.REASON_GRANT
    assert row.retry_after_ms == RETRY_MAX_S * 1000
    assert (
        'region "eu" does not cover 20 uncached tokens and 8 KV blocks: 0 tokens/s and 0 blocks'
        in row.message
    )
    assert desk.core.admission.refusals[pb.Refusal.REASON_GRANT] == guest.refused_total == 1
    desk.assert_empty()


@pytest.mark.parametrize("region", ["", "us", "local"])
def test_an_own_caller_needs_no_grant(region: str) -> None:
    """A caller of the own region is neither charged nor refused, whatever its frontend calls the region."""
    desk, guest = desk_of(None)
    desk.submit(region=region)
    assert not desk.told().refusals
    assert len(desk.core.attempts.open) == 1
    assert guest.net_tokens == 0


def test_the_region_of_the_frontend_counts_without_one_in_the_budget() -> None:
    """A frontend of another region sends guests, unless a budget names their home."""
    desk, guest = desk_of(region="eu")
    desk.submit(A)
    assert guest.net_tokens == 20
    desk.submit(B, region="us")
    assert guest.net_tokens == 20


def test_retry_after_tells_when_the_grant_covers_the_prompt() -> None:
    """The bucket says when a retry makes sense, and the retry at that time is admitted."""
    desk, _ = desk_of(Quantity(20 / BURST_S, 100))
    desk.submit(A, region="eu")
    desk.told()
    desk.submit(B, region="eu")
    row = refusal(desk)
    assert (row.reason, row.retry_after_ms) == (pb.Refusal.REASON_GRANT, BURST_S * 1000)
    desk.wait(row.retry_after_ms / 1000)
    desk.submit(B, region="eu")
    assert not desk.told().refusals


def test_a_computed_prompt_corrects_its_charge_and_its_end_releases_the_blocks() -> None:
    """A guest pays the whole prompt at first, then the 12 of 20 tokens that prefill computed."""
    desk, guest = desk_of()
    decode, slot, _ = desk.handed_over(region="eu")
    assert guest.net_tokens == 12 and guest.bucket.blocks_used == 8
    desk.down(decode, transfers=[pb.Transfer(slot=slot)])
    desk.down(decode, finishes=[pb.Finish(slot=slot, end_position=1, reason=pb.Finish.REASON_LENGTH)])
    assert guest.net_tokens == 12 and guest.bucket.blocks_used == 0
    desk.assert_empty()


@pytest.mark.parametrize(("is_started", "net_tokens"), [(False, 0), (True, 20)])
def test_a_cancelled_guest_is_refunded_unless_an_engine_had_its_prompt(
    is_started: bool, net_tokens: int
) -> None:
    """A cancel before the start returns all tokens, and one during the computation none."""
    desk, guest = desk_of()
    _, _, prefill_slot = desk.reserved(region="eu")
    if is_started:
        desk.down("prefill-0", starts=[pb.Start(slot=prefill_slot)])
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    assert guest.net_tokens == net_tokens and guest.bucket.blocks_used == 0


def test_a_resumed_guest_is_refused_only_without_a_grant() -> None:
    """A continuation passes an empty bucket, and is refused where the region granted nothing."""
    desk, guest = desk_of(Quantity(1, 1))
    desk.submit(A, region="eu", resumed=True)
    assert not desk.told().refusals and guest.net_tokens == 20
    guest.renew(NOTHING, desk.now_s)
    desk.submit(B, region="eu", resumed=True)
    assert refusal(desk).reason == pb.Refusal.REASON_GRANT


def test_a_guest_without_a_grant_evicts_no_request() -> None:
    """The grant is checked before evictions: a refused guest of a high class costs no waiting request its place."""
    desk, guest = desk_of(None, queue=1, prefills=0)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    desk.submit(A, priority_class=1)
    desk.told()
    desk.submit(B, region="eu", priority_class=6)
    assert refusal(desk).reason == pb.Refusal.REASON_GRANT
    assert len(desk.core.queue) == 1 and desk.core.queue.evicted_total == 0
    assert guest.bucket.blocks_used == 0


def test_a_guest_of_a_lower_class_is_evicted_first_and_refunded() -> None:
    """A full queue evicts the guest, which its frontend put one class lower, in favour of an own caller of its class."""
    desk, guest = desk_of(queue=2, prefills=0)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    desk.submit("c" * 32, priority_class=4)
    desk.submit(A, region="eu", priority_class=3)
    assert guest.net_tokens == 20 and guest.bucket.blocks_used == 8
    desk.told()
    desk.submit(B, priority_class=4)
    row = refusal(desk)
    assert row.evicted and row.slot == 2
    assert guest.net_tokens == 0 and guest.bucket.blocks_used == 0
    desk.submit("d" * 32, region="eu", priority_class=3)
    assert refusal(desk).reason == pb.Refusal.REASON_QUEUE_FULL
    assert guest.net_tokens == 0 and guest.refused_total == 0, "refused for capacity: not charged"


def test_a_takeover_keeps_the_blocks_of_the_grant() -> None:
    """A stream that another frontend's stream takes over holds its blocks until it ends."""
    desk, guest = desk_of()
    decode, slot = desk.generating(region="eu")
    desk.ask(
        adopts=[
            pb.Adopt(slot=9, request_id=A, attempt=1, position=1, credit_position=100, decode_replica=decode)
        ]
    )
    (adopt,) = desk.up(decode).adopts
    desk.down(decode, acceptances=[pb.Acceptance(slot=adopt.slot)])
    desk.down(decode, finishes=[pb.Finish(slot=slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)])
    assert guest.net_tokens == 12 and guest.bucket.blocks_used == 8
    finish = pb.Finish(slot=adopt.slot, end_position=1, reason=pb.Finish.REASON_LENGTH)
    desk.down(decode, finishes=[finish])
    assert guest.net_tokens == 12 and guest.bucket.blocks_used == 0


def test_two_takeovers_at_once_keep_the_blocks_of_the_grant() -> None:
    """Decode accepts two takeovers before it ends the streams before them: the last one gives the blocks back."""
    desk, guest = desk_of()
    decode, slot = desk.generating(region="eu")
    slots = [slot]
    for number in (9, 10):
        adopt = pb.Adopt(
            slot=number, request_id=A, attempt=1, position=1, credit_position=100, decode_replica=decode
        )
        desk.ask(adopts=[adopt])
        slots += [each.slot for each in desk.up(decode).adopts]
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=each) for each in slots[1:]],
        finishes=[
            pb.Finish(slot=each, end_position=1, reason=pb.Finish.REASON_ADOPTED) for each in slots[:2]
        ],
    )
    assert guest.bucket.blocks_used == 8
    desk.down(decode, finishes=[pb.Finish(slot=slots[2], end_position=1, reason=pb.Finish.REASON_LENGTH)])
    assert guest.bucket.blocks_used == 0 and guest.net_tokens == 12
    desk.assert_empty()


@pytest.mark.parametrize("purpose", [budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE])
def test_a_probe_is_not_charged(purpose: budget_pb2.Purpose.ValueType) -> None:
    """Probes and warm-up need no grant: no user of any region waits for them."""
    desk, guest = desk_of(None)
    desk.submit(region="eu", purpose=purpose)
    assert not desk.told().refusals and guest.refused_total == 0


class Ledger(Guest):
    """Guests with a record of all charges and refunds."""

    def __init__(self) -> None:
        super().__init__("eu")
        self.moves: list[tuple[float, int]] = []
        """Time and tokens of each charge; negative: a refund."""
        self.prompts: dict[Charge, int] = {}
        """Tokens of the prompt of each charge."""
        self.now_s = 0.0

    def charge(
        self, tokens: int, blocks: int, now_s: float, *, is_resumed: bool, is_lower: bool = False
    ) -> Charge | float:
        charge = super().charge(tokens, blocks, now_s, is_resumed=is_resumed, is_lower=is_lower)
        if isinstance(charge, Charge):
            self.prompts[charge] = tokens
            if not is_resumed:
                self.moves.append((now_s, tokens))
        return charge


@pytest.mark.parametrize("seed", range(24))
def test_no_charge_is_lost_under_random_schedules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under lost streams, refusals, takeovers and cancels the grant bounds the net charges, and all blocks come back.

    Net charges equal the computed tokens, with the whole prompt where an engine had it and reported nothing.
    """
    callers, ledger = Callers("us", ("eu", "us")), Ledger()
    callers.guests = {"eu": ledger}
    world = World(
        seed, callers=callers, prefills=seed % 3, decodes=1 + seed % 3, local_tokens=(0, 8, 100)[seed % 3]
    )
    grant = Quantity(world.rng.choice((40, 200, 1000)), world.rng.choice((60, 400)))
    owed: Counter[Charge] = Counter()
    settle, end, report = Charge.settle, Charge.end, world.core.work.settle

    def spy_settle(charge: Charge, computed_tokens: int) -> None:
        before = charge.tokens
        settle(charge, computed_tokens)
        ledger.moves.append((world.now_s, charge.tokens - before))

    def spy_end(charge: Charge, *, was_taken: bool) -> None:
        assert charge.blocks, "blocks are given back once"
        if was_taken and charge not in owed:
            owed[charge] = ledger.prompts[charge]
        end(charge, was_taken=was_taken)

    def spy_report(attempt: Attempt, now_s: float, hit: Hit | None = None) -> bool:
        if hit is not None and attempt.charge is not None and attempt.charge not in owed:
            owed[attempt.charge] = hit.computed_tokens
        return report(attempt, now_s, hit)

    monkeypatch.setattr(Charge, "settle", spy_settle)
    monkeypatch.setattr(Charge, "end", spy_end)
    monkeypatch.setattr(world.core.work, "settle", spy_report)
    for round_ in range(900):
        if round_ % 20 == 0:
            callers.renew({"eu": grant}, world.now_s)
        if round_ < 600 and world.rng.random() < 0.07:
            request = world.new_request()
            request.region = world.rng.choice(("eu", "eu", "us", ""))
            world.submit(request)
        if world.rng.random() < 0.01 and world.requests:
            world.cancel(world.rng.choice(world.requests))
        if world.rng.random() < 0.02:
            world.advance(0.2)
        world.step()
        world.check()
        open_charges = [one.charge for one in world.core.attempts.open if one.charge is not None]
        assert len(set(open_charges)) == len(open_charges), "two attempts share a charge"
        assert ledger.bucket.blocks_used == pytest.approx(sum(one.blocks for one in open_charges))
    for request in world.requests:
        if request.state not in ("done", "cancelled"):
            world.cancel(request)
    world.faults = False
    for _ in range(6):
        world.settle()
        world.advance(2.0)
        for peer in world.peers.values():
            peer.expire()
    world.settle()
    assert not world.core.attempts.open, f"seed={seed}"
    assert ledger.bucket.blocks_used == pytest.approx(0)
    assert len(ledger.prompts) > 3
    assert ledger.net_tokens == sum(owed.values()), f"seed={seed}"
    for first in range(len(ledger.moves)):
        net = 0
        for at_s, tokens in ledger.moves[first:]:
            net += tokens
            allowed = grant.tokens_per_s * (at_s - ledger.moves[first][0] + BURST_S) + PROMPT_MAX
            assert net <= allowed + 1e-6, f"seed={seed}"
