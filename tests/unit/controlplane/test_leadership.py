"""Leader election: terms ascend, a lease in doubt goes nowhere forward, and a term is never shared."""

from __future__ import annotations

import random

import pytest

from controlplane.leadership import DOUBT_S, LEASE_S, Holder, Leadership, LeaderState, LeaseAnswer
from kvmesh.snapshot.published import JUMP_MAX, TERM_MAX, Term

OWN = Holder("control-0", "boot", "a:1")
OTHER = Holder("control-1", "boot", "b:1")


def leader(now_s: float = 0.0, number: int = 0) -> Leadership:
    """Return a process that got the lease at `now_s` and finished its takeover."""
    leadership = Leadership("control-0", "boot")
    leadership.claim(now_s)
    assert leadership.take(LeaseAnswer(OWN, number), now_s, now_s)
    leadership.finish_takeover()
    return leadership


def test_a_term_is_above_the_number_in_redis() -> None:
    """The first claim after a takeover stores the number, at once."""
    leadership = leader(number=7)
    assert leadership.term == Term(8, "control-0")
    assert leadership.next_claim_s() == 0.0 and leadership.claim(0.0) == 8


@pytest.mark.parametrize("junk", [TERM_MAX - 1, TERM_MAX, JUMP_MAX + 9])
def test_junk_in_redis_does_not_use_up_the_terms(junk: int) -> None:
    """Beside the last number two leaders would share one for ever."""
    assert leader(number=junk).term.number == 1
    leadership = leader(number=7)
    leadership.take(LeaseAnswer(OTHER, junk), 1.0, 1.0)
    assert leadership.highest == 8


def test_a_new_process_believes_the_number_of_an_old_mesh() -> None:
    """A term each second for 100 years."""
    number = 100 * 366 * 86_400
    assert leader(number=number).term.number == number + 1


def test_a_lease_that_was_not_renewed_is_in_doubt_before_it_ends() -> None:
    """A leader stops going forward a second before Redis may grant its lease to another process."""
    leadership = leader()
    assert leadership.may_go_forward(DOUBT_S - 0.01)
    assert not leadership.may_go_forward(DOUBT_S)
    assert leadership.leads and DOUBT_S < LEASE_S


def test_a_lease_counts_from_the_claim_and_not_from_the_answer() -> None:
    """An answer that took long renews less."""
    leadership = leader()
    leadership.take(LeaseAnswer(OWN, 1), 1.0, 3.0)
    assert not leadership.may_go_forward(1.0 + DOUBT_S)


def test_a_leader_with_a_lease_in_doubt_begins_a_new_term() -> None:
    """Another process may have led meanwhile."""
    leadership = leader()
    first = leadership.term
    assert leadership.take(LeaseAnswer(OWN, 1), 100.0, 100.0)
    assert leadership.term > first and leadership.state is LeaderState.TAKING_OVER


def test_another_holder_ends_the_term() -> None:
    """A process that hears of another holder follows at once."""
    leadership = leader()
    leadership.take(LeaseAnswer(OTHER, 2), 1.0, 1.0)
    assert not leadership.leads and leadership.holder == OTHER


def test_a_term_of_an_earlier_boot_is_not_shared() -> None:
    """A snapshot that this boot did not publish needs a higher term, even if it has the same one."""
    leadership = leader()
    assert not leadership.hear(leadership.term)
    assert leadership.hear(leadership.term, is_foreign=True)
    assert leadership.hear(Term(1, "control-9"))
    assert not leadership.hear(Term(1, "a"))


def test_terms_ascend_under_any_answers() -> None:
    """Random answers, doubts and foreign terms: each new term is above all that were known."""
    for seed in range(200):
        rng = random.Random(seed)
        leadership, now_s, known = Leadership("control-0", "boot"), 0.0, 0
        last = leadership.term
        for _ in range(60):
            now_s += rng.choice((0.2, 1.0, 4.0, 9.0))
            if rng.random() < 0.3:
                number = rng.randrange(30)
                known = max(known, number)
                if leadership.hear(Term(number, rng.choice(("control-1", "zz")))):
                    leadership.begin_term(now_s)
            else:
                leadership.claim(now_s)
                number = rng.randrange(20)
                holder = rng.choice((OWN, OWN, OTHER))
                known = max(known, number)
                leadership.take(LeaseAnswer(holder, number) if rng.random() < 0.8 else None, now_s, now_s)
            if leadership.leads and leadership.term != last:
                assert leadership.term.number > last.number, f"seed={seed}"
                last = leadership.term
