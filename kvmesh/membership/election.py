"""Leader election among processes with one name: which of them holds the lease of the name. Pure.

The state machine of one process (docs/decisions/0020). `Registration` sends each bid to Redis, where one script writes by
compare-and-set.

    NEWCOMER -> HOLDER    its bid replaced the lease of its first read, or there was no lease
    NEWCOMER -> STANDBY   a third process was faster
    HOLDER   -> STANDBY   its lease was replaced, and not by an older holder
    STANDBY  -> HOLDER    the lease that it saw has expired, or its holder drains, or the lease is invalid

INVARIANT: the holder changes only when a process starts, when the holder has not renewed for LEASE_S, or when it drains.
INVARIANT: a process replaces the lease of a live holder only at its start, or within LEASE_S of its own last renewal.
A process claims a held name once, at its start. A newcomer that drains already claims no name and stays NEWCOMER. A lease
that disappears before its time was flushed. Its holder writes it again within RENEW_S, so a standby waits until that lease
would have expired.

Terms order the holders (fencing). Each takeover writes a term above all terms that the process has seen. A holder that
finds a lease with a lower term took the name later than the process of that lease, and replaces the lease. Terms end with
the leases: a process that starts without a lease in Redis begins at 1. So a term orders nothing once its holder has not
renewed for LEASE_S, for example after a freeze.

Leases of the previous release have no term (0). A process of that release waits for ever once it has seen the lease of
another process. So a holder replaces a lease without a term only if it took the name from the process of that lease.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kvmesh.membership.member import LEASE_S, RENEW_S, TERM_MAX, Member, read

RETRY_S: Final = 0.05
"""Pause before the next bid if the last one found another lease than expected."""

PAST_END_S: Final = 0.02
"""Time from the end of the lease that a standby saw to its next bid. Redis counts in milliseconds."""

LEASE_LIFE_MAX_S: Final = 30.0
"""A lease with a longer life, or without an end, is invalid. Leases of later releases may be longer than LEASE_S."""


class ElectionState(Enum):
    """State of a process in the election of its name."""

    NEWCOMER = "newcomer"
    HOLDER = "holder"
    STANDBY = "standby"


class Bid(NamedTuple):
    """A compare-and-set of the lease to this term.

    It writes if there is no lease, if the present lease is the bidder's own, or if that lease equals `replaces`.
    """

    term: int
    replaces: bytes


class Election:
    """The election as one process sees it. After each `bid` follows `take` with the answer of Redis, or `fail`."""

    def __init__(self, name: str, boot_id: str) -> None:
        self.state = ElectionState.NEWCOMER
        self.holder: Member | None = None
        """The other process that holds the name, as last seen. None unless STANDBY."""
        self._name = name
        self._boot_id = boot_id
        self._term = 0
        """Term of this process's lease. Before it has a lease: the highest term seen."""
        self._predecessor: str | None = None
        """Boot id of the holder at the first read. Empty: no process held the name. None: not read yet."""
        self._replaces = b""
        """The lease that the next bid may replace."""
        self._bid_s = float("-inf")
        """Time of the last bid. Redis wrote it then or later."""
        self._lease_end_s = float("-inf")
        """Time at which the lease of this process expires unless it is renewed."""
        self._is_outranking = False
        """True if `_replaces` is the lease of an older holder. It is void once this process's own lease has expired."""
        self._free_s = float("-inf")
        """Time at which the lease that a standby saw expires. A missing lease may be taken from then on."""
        self._next_s = float("-inf")

    def bid(self, now_s: float, *, is_draining: bool = False) -> Bid | None:
        """Return the bid to write now. None: only read. A draining process keeps its lease and takes no name."""
        self._bid_s = now_s
        if self._is_outranking and now_s >= self._lease_end_s:
            self._replaces = b""
        if self.state is ElectionState.HOLDER:
            return Bid(self._term, self._replaces)
        if is_draining or self._predecessor is None:
            return None
        if self.state is ElectionState.NEWCOMER or self._replaces or now_s >= self._free_s:
            return Bid(min(self._term + 1, TERM_MAX), self._replaces)
        return None

    def take(
        self, bid: Bid | None, *, wrote: bool, found: bytes, left_s: float, now_s: float, is_draining: bool
    ) -> None:
        """Take the answer of Redis to `bid`. `bid` None: the lease was only read.

        `wrote`: Redis wrote the bid. `found`: the lease before the bid; empty: there was none. `left_s`: remaining life of
        `found`; below 0: it does not expire.
        """
        lease, is_junk = self._read(found, left_s)
        self._replaces, self._next_s, self._is_outranking = b"", now_s + RENEW_S, False
        if bid is not None and wrote:
            self._hold(bid.term, LEASE_S)
        elif lease is not None and lease.boot_id == self._boot_id:  # written by a bid with a lost answer
            self._hold(lease.term, left_s)
        elif self._predecessor is None:
            self._predecessor = lease.boot_id if lease is not None else ""
            self._term = lease.term if lease is not None else 0
            self._expect(found, now_s)
        elif is_junk:
            self._expect(found, now_s + RETRY_S)
        elif lease is None:
            self._next_s = min(self._next_s, max(now_s, self._free_s) + PAST_END_S)
        elif self.state is ElectionState.NEWCOMER and lease.boot_id == self._predecessor:
            self._term = max(self._term, lease.term)
            self._expect(found, now_s)
        elif self.state is ElectionState.HOLDER and self._outranks(lease, now_s) and not is_draining:
            self._is_outranking = True
            self._expect(found, now_s + RETRY_S)
        else:
            self._stand_by(lease, found, left_s, now_s)
        if is_draining and self.state is not ElectionState.HOLDER:
            self._replaces, self._next_s = b"", now_s + RENEW_S

    def on_leave(self, left_boot_id: str) -> None:
        """Note that the process of `left_boot_id` gave its lease back. If it held this name, the next bid may take it."""
        if left_boot_id and self.holder is not None and self.holder.boot_id == left_boot_id:
            self._free_s = float("-inf")

    def fail(self, now_s: float) -> None:
        """Note that Redis did not answer. It may have lost all leases, so a missing lease counts only after LEASE_S."""
        self._free_s = max(self._free_s, now_s + LEASE_S)

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next bid."""
        return max(0.0, self._next_s - now_s)

    def _read(self, found: bytes, left_s: float) -> tuple[Member | None, bool]:
        """Return the lease if it is valid, and whether an invalid one is there."""
        lease = read(self._name, found) if found else None
        if lease is not None and lease.boot_id != self._boot_id and not 0 <= left_s <= LEASE_LIFE_MAX_S:
            lease = None
        return lease, bool(found) and lease is None

    def _expect(self, found: bytes, next_s: float) -> None:
        """Let the next bid, at `next_s`, replace the lease `found`."""
        self._replaces, self._next_s = found, next_s

    def _outranks(self, other: Member, now_s: float) -> bool:
        """True if this holder took the name later than `other`, and its own lease has not expired."""
        if now_s >= self._lease_end_s:
            return False
        return other.term < self._term if other.term else other.boot_id == self._predecessor

    def _hold(self, term: int, left_s: float) -> None:
        self.state, self.holder, self._term = ElectionState.HOLDER, None, term
        self._lease_end_s = self._bid_s + left_s

    def _stand_by(self, lease: Member, found: bytes, left_s: float, now_s: float) -> None:
        self.state, self.holder = ElectionState.STANDBY, lease
        self._term = max(self._term, lease.term)
        self._free_s = max(now_s + left_s, self._free_s)
        self._next_s = now_s + min(RENEW_S, left_s + PAST_END_S)
        if lease.is_leaving and lease.term:  # a process of the previous release would take the name back
            self._expect(found, now_s)
