"""Leader election of the control processes, by a lease in Redis, and the terms of the leaders (fencing tokens). Pure.

    FOLLOWER    -> TAKING_OVER   this process got the lease
    TAKING_OVER -> LEADER        TAKEOVER_S later: receivers had time to tell which snapshots are in force
    any         -> FOLLOWER      another process holds the lease

A leader renews its lease each RENEW_S. While Redis does not answer, it stays the leader, but its lease is in doubt: it may
only go back. A leader whose lease was in doubt takes a new term when Redis answers again.

INVARIANT: the number of a term is above every number that this process has believed before it (JUMP_MAX).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmesh.snapshot.published import JUMP_MAX, NO_TERM, TERM_MAX, Term

LEASE_S: Final = 5.0
"""Time to live of the leader's lease in Redis."""

RENEW_S: Final = 1.0
"""Time between two renewals, and between two attempts of a follower."""

DOUBT_S: Final = LEASE_S - 1.0
"""A lease renewed longer ago than this is in doubt. Redis may grant it to another process a second later."""

TAKEOVER_S: Final = 5.0
"""Time in which receivers tell a new leader what is in force. Until then it publishes only steps back."""


class LeaderState(Enum):
    """State of one control process."""

    FOLLOWER = "follower"
    TAKING_OVER = "taking over"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lease."""

    process_id: str
    boot_id: str
    address: str


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Answer of Redis to a claim."""

    holder: Holder
    """The holder after the claim."""
    number: int
    """Highest number of a term in Redis."""


class Leadership:
    """See the module. After each claim follows `take`, with None if Redis did not answer."""

    def __init__(self, process_id: str, boot_id: str) -> None:
        self.state = LeaderState.FOLLOWER
        self.term: Term = NO_TERM
        """Term of this process while it leads."""
        self.holder: Holder | None = None
        """The holder of the lease, as last heard."""
        self.taken_s = float("-inf")
        """Time of the last takeover by this process."""
        self._process_id = process_id
        self._boot_id = boot_id
        self._highest = 0
        self._lease_end_s = float("-inf")
        self._next_claim_s = float("-inf")

    def __repr__(self) -> str:
        return f"Leadership({self._process_id}, {self.state.value}, {self.term})"

    @property
    def leads(self) -> bool:
        """True from the takeover on."""
        return self.state is not LeaderState.FOLLOWER

    @property
    def highest(self) -> int:
        """Highest number of a term that this process knows."""
        return self._highest

    def next_claim_s(self) -> float:
        """Return the time of the next claim."""
        return self._next_claim_s

    def claim(self, now_s: float) -> int:
        """Begin a claim; return the number to store with it, 0 for none."""
        self._next_claim_s = now_s + RENEW_S
        return self.term.number if self.leads else 0

    def may_go_forward(self, now_s: float) -> bool:
        """True if this process leads, the takeover is over, and its lease is not in doubt."""
        return self.state is LeaderState.LEADER and not self.is_in_doubt(now_s)

    def is_in_doubt(self, now_s: float) -> bool:
        """True if another process may hold the lease."""
        return now_s >= self._lease_end_s - (LEASE_S - DOUBT_S)

    def take(self, answer: LeaseAnswer | None, sent_s: float, now_s: float) -> bool:
        """Take the answer to the claim that was sent at `sent_s`. Return True if this process begins a term."""
        if answer is None:
            return False
        self._believe(answer.number)  # the next claim overwrites junk
        self.holder = answer.holder
        if (answer.holder.process_id, answer.holder.boot_id) != (self._process_id, self._boot_id):
            self.step_down()
            return False
        was_in_doubt = self.is_in_doubt(now_s)
        self._lease_end_s = sent_s + LEASE_S
        if self.leads and not was_in_doubt:
            return False
        self.begin_term(now_s)
        return True

    def begin_term(self, now_s: float) -> None:
        """-> TAKING_OVER, with a number above all that are known. The next claim stores the number, at once."""
        self._highest = min(self._highest + 1, TERM_MAX)
        self.term = Term(self._highest, self._process_id)
        self.state, self.taken_s, self._next_claim_s = LeaderState.TAKING_OVER, now_s, now_s

    def finish_takeover(self) -> None:
        """TAKING_OVER -> LEADER."""
        assert self.state is LeaderState.TAKING_OVER
        self.state = LeaderState.LEADER

    def step_down(self) -> None:
        """-> FOLLOWER."""
        self.state, self.term = LeaderState.FOLLOWER, NO_TERM
        self._lease_end_s = float("-inf")

    def hear(self, term: Term, *, is_foreign: bool = False) -> bool:
        """Note a term at a receiver or in Redis. Return True if this leader needs a higher one.

        `is_foreign`: this process did not publish under the term since its start. An earlier boot may have had the same
        term, if Redis lost the number.
        """
        if not self._believe(term.number):
            return False
        return self.leads and (term > self.term or (is_foreign and term == self.term))

    def _believe(self, number: int) -> bool:
        """Note a number. Return False for one that is too far above all that are known."""
        if number > self._highest + JUMP_MAX:
            return False
        self._highest = max(self._highest, number)
        return True
