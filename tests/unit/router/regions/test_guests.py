"""Guests within the grant of their region: under random charges and refunds, and by example."""

from __future__ import annotations

import random

import pytest

from kvmesh.regions.bucket import BURST_S, NEW_SHARE, RETRY_MAX_S
from kvmesh.regions.quantity import NOTHING, Quantity
from services.router.regions.callers import Callers
from services.router.regions.guests import Charge, Guest

PROMPT_MAX = 4000


def charged(guest: Guest, tokens: int, now_s: float, *, blocks: int = 1, is_resumed: bool = False) -> Charge:
    charge = guest.charge(tokens, blocks, now_s, is_resumed=is_resumed)
    assert isinstance(charge, Charge), charge
    return charge


def refused_s(guest: Guest, tokens: int, now_s: float, *, blocks: int = 1, is_resumed: bool = False) -> float:
    wait_s = guest.charge(tokens, blocks, now_s, is_resumed=is_resumed)
    assert isinstance(wait_s, float), wait_s
    return wait_s


@pytest.mark.parametrize("seed", range(60))
def test_charges_less_refunds_stay_within_grant_burst_and_one_prompt(seed: int) -> None:
    """In any window the net charges of new attempts are bounded, with renewals, resumed attempts, cancels and late ends."""
    rng = random.Random(seed)
    guest, now_s = Guest("eu"), 100.0
    largest = Quantity(rng.uniform(300, 4000), rng.uniform(20, 200))
    moves: list[tuple[float, int]] = []
    open_: list[Charge] = []
    ended = 0
    resumed_share = rng.choice((0.0, 0.04))
    for _ in range(250):
        now_s += rng.expovariate(6)
        if rng.random() < 0.2:
            guest.renew(largest * rng.choice((1.0, 1.0, 0.3, 0.0)), now_s)
        tokens, is_resumed = rng.randint(1, PROMPT_MAX), rng.random() < resumed_share
        charge = guest.charge(tokens, rng.randint(1, 9), now_s, is_resumed=is_resumed)
        if isinstance(charge, Charge):
            open_.append(charge)
            if not is_resumed:
                moves.append((now_s, tokens))
        if open_ and rng.random() < 0.6:
            charge = open_.pop(rng.randrange(len(open_)))
            before = charge.tokens
            if rng.random() < 0.7:
                charge.settle(rng.randint(0, before))
                charge.settle(0)
            charge.end(was_taken=rng.random() < 0.5)
            moves.append((now_s, charge.tokens - before))
            ended += charge.tokens
    assert sum(tokens > 0 for _, tokens in moves) > 1
    for first in range(len(moves)):
        net = 0
        for at_s, tokens in moves[first:]:
            net += tokens
            allowed = largest.tokens_per_s * (at_s - moves[first][0] + BURST_S) + PROMPT_MAX
            assert net <= allowed + 1e-6, f"seed={seed}"
    assert guest.net_tokens == ended + sum(charge.tokens for charge in open_)
    for charge in open_:
        charge.end(was_taken=False)
    assert guest.bucket.blocks_used == pytest.approx(0, abs=1e-6)
    assert guest.net_tokens == ended + sum(charge.tokens for charge in open_)


def test_nothing_is_granted_before_the_first_message() -> None:
    """Without any message, new and resumed guests are refused."""
    guest = Guest("eu")
    assert refused_s(guest, 1, 1e6) == RETRY_MAX_S
    assert refused_s(guest, 1, 1e6, is_resumed=True) == RETRY_MAX_S
    assert guest.refused_total == 2 and guest.net_tokens == 0


def test_a_grant_that_is_not_renewed_falls_to_a_quarter_and_ends() -> None:
    """A grant counts in full for 30 s, as a quarter until 10 min, and then refuses all guests."""
    guest, full = Guest("eu"), Quantity(1000, 8)
    guest.renew(full, 0.0)
    assert guest.grant(29.9) == full
    assert guest.grant(30.0) == full * 0.25
    assert charged(guest, 1000, 31.0).tokens == 1000
    assert guest.bucket.burst == pytest.approx(250 * BURST_S)
    assert guest.grant(600.0) == NOTHING
    assert refused_s(guest, 1, 600.0) == RETRY_MAX_S
    assert refused_s(guest, 1, 600.0, is_resumed=True) == RETRY_MAX_S
    guest.renew(full, 700.0)
    charged(guest, 1, 701.0)


def test_a_message_without_a_grant_does_not_end_it() -> None:
    """A grant ends by its age or by a grant of nothing, never because a message names other regions."""
    callers = Callers("us", ("eu", "asia", "us"))
    callers.renew({"eu": Quantity(1000, 8)}, 0.0)
    callers.renew({"asia": Quantity(500, 8)}, 20.0)
    assert callers.guests["eu"].grant(20.0) == Quantity(1000, 8)
    assert callers.guests["eu"].grant(40.0) == Quantity(250, 2)
    callers.renew({"eu": NOTHING}, 41.0)
    assert callers.guests["eu"].grant(41.0) == NOTHING
    assert callers.guests["asia"].grant(41.0) == Quantity(500, 8)


@pytest.mark.parametrize("tokens_per_s", [float("nan"), float("inf"), -1.0])
def test_an_impossible_grant_is_ignored(tokens_per_s: float) -> None:
    """Amounts of another process are checked before use, and unknown or own regions get no grant."""
    callers = Callers("us", ("eu", "us"))
    callers.renew({"eu": Quantity(1000, 8)}, 0.0)
    callers.renew({"eu": Quantity(tokens_per_s, 8), "us": Quantity(1, 1), "mars": Quantity(1, 1)}, 1.0)
    assert callers.guests["eu"].grant(1.0) == Quantity(1000, 8)
    assert set(callers.guests) == {"eu"}


def test_a_resumed_guest_passes_an_empty_bucket_and_takes_of_a_full_one() -> None:
    """A continuation is admitted beyond tokens and blocks of the grant. It never takes the last half of the burst."""
    guest = Guest("eu")
    guest.renew(Quantity(100, 50), 0.0)
    refused_s(guest, 10, 0.0)
    charge = charged(guest, 5000, 0.0, blocks=60, is_resumed=True)
    assert guest.bucket.level == 0 and guest.bucket.blocks_used == 60 and guest.net_tokens == 5000
    charge.settle(150)
    assert guest.bucket.level == 0, "no more comes back than was taken"
    charge.end(was_taken=True)
    later = charged(guest, 5000, BURST_S, is_resumed=True)
    assert guest.bucket.level == pytest.approx(NEW_SHARE * guest.bucket.burst)
    later.settle(200)
    assert guest.bucket.level == pytest.approx(guest.bucket.burst - 200)
    later.end(was_taken=True)
    assert guest.net_tokens == 350


def test_where_the_grant_is_short_lower_classes_are_refused_first() -> None:
    """They leave a tenth of the burst to others. A full bucket takes both, and a large prompt of either once."""
    guest = Guest("eu")
    guest.renew(Quantity(100, 1000), 0.0)
    burst = 100 * BURST_S
    charged(guest, round(0.95 * burst), BURST_S)
    wait_s = guest.charge(10, 1, BURST_S, is_resumed=False, is_lower=True)
    assert wait_s == pytest.approx((0.05 * burst + 10) / 100)
    charged(guest, 10, BURST_S)
    admitted = [0, 0]
    for number in range(100):
        is_lower = number % 2 == 0
        charge = guest.charge(20, 0, BURST_S + number * 0.1, is_resumed=False, is_lower=is_lower)
        admitted[is_lower] += isinstance(charge, Charge)
    assert admitted == [50, 0]
    fresh = Guest("eu")
    fresh.renew(Quantity(100, 1000), 0.0)
    large = fresh.charge(round(10 * burst), 1, BURST_S, is_resumed=False, is_lower=True)
    assert isinstance(large, Charge), "a prompt above the burst passes a full bucket"


def test_new_guests_of_a_dead_region_do_not_wait_for_its_streams() -> None:
    """All streams of ten seconds continue here at once. New callers within the grant are admitted beside them."""
    guest, per_s, tokens = Guest("eu"), 20, 1000
    guest.renew(Quantity(per_s * tokens, 1e6), 0.0)
    for _ in range(10 * per_s):
        charged(guest, tokens + 100, 10.0, is_resumed=True)
    admitted = 0
    for number in range(5 * per_s):
        admitted += isinstance(guest.charge(tokens, 1, 10.0 + number / per_s, is_resumed=False), Charge)
    assert admitted == 5 * per_s


def test_a_taken_prompt_without_a_measurement_stays_charged() -> None:
    """A cancel while an engine computes the prompt gives the blocks back and no tokens."""
    guest = Guest("eu")
    guest.renew(Quantity(1000, 8), 0.0)
    taken, waiting = charged(guest, 900, 5.0), charged(guest, 100, 5.0)
    taken.end(was_taken=True)
    waiting.end(was_taken=False)
    assert guest.net_tokens == 900
    assert guest.bucket.blocks_used == 0


def test_a_charge_is_corrected_once() -> None:
    """A second measurement of a prompt changes nothing."""
    guest = Guest("eu")
    guest.renew(Quantity(1000, 8), 0.0)
    charge = charged(guest, 900, 5.0)
    charge.settle(500)
    charge.settle(0)
    charge.end(was_taken=False)
    assert guest.net_tokens == charge.tokens == 500


def test_the_home_of_a_caller_is_known_by_name() -> None:
    """The own region has several names while its configuration changes; a made-up region shares one guest."""
    callers = Callers("us", ("eu", "us"))
    assert [callers.guest(name) for name in ("", "us", "local")] == [None] * 3
    assert callers.guest("eu") is callers.guests["eu"]
    assert callers.guest("mars") is callers.guest("venus") is callers.unknown
    assert callers.home("") is callers.home("us") is callers.own
    assert callers.home("eu") is callers.guests["eu"].home
    named = Callers("us", ("us", "local"))
    assert named.guest("local") is named.guests["local"]
