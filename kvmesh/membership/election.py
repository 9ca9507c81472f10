"""Which of several processes with one name holds the name's lease. Pure.

The state machine of one process; `Registration` carries each bid to Redis, where one script compares and writes.

    NEWCOMER -> HOLDER    it replaced the lease of its first look, or there was none
    NEWCOMER -> STANDBY   a third process was quicker, or it drains already
    HOLDER   -> STANDBY   its lease was replaced, and by no older holder
    STANDBY  -> HOLDER    the lease that it saw has run out, or its holder drains, or it is no lease of a process

INVARIANT: the holder changes only when a process starts, when the holder has not renewed for LEASE_S, or when it drains.
INVARIANT: a process replaces the lease of a live holder only at its start, or within LEASE_S of its own last renewal.
A process claims a held name once, at its start. A lease that is gone before its time was flushed: its holder writes it
again within RENEW_S, so a standby waits until that lease would have run out.

Terms order the holders. Each takeover writes a term above all that the process has seen; a holder that finds a lower term
wrote later than that process and replaces it. Terms end with the leases: a process that starts when there is none begins
at 1. So a term orders nothing once its holder has not renewed for LEASE_S, as after a freeze. Leases of the previous
release have no term (0): such a process waits for ever once it has seen another's lease, so it is outranked only by the
process that took the name from it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kvmesh.membership.member import LEASE_S, RENEW_S, TERM_MAX, Member, read

RETRY_S: Final = 0.05
"""Until the next bid where the last one met another lease than expected."""

PAST_END_S: Final = 0.02
"""A standby looks this long after the end of the lease that it saw: Redis counts in milliseconds."""

LEASE_LIFE_MAX_S: Final = 30.0
"""A lease that lives for longer, or for ever, is none of a process: those of later releases may be longer than LEASE_S."""


class ElectionState(Enum):
    """Where a process stands."""

    NEWCOMER = "newcomer"
    HOLDER = "holder"
    STANDBY = "standby"


class Bid(NamedTuple):
    """Write a lease of this term if there is none, if the present one is the bidder's own, or if it equals `replaces`."""

    term: int
    replaces: bytes


class Election:
    """One process's part. In turns: `bid`, then `take` what Redis answered, or `fail`."""

    def __init__(self, name: str, boot_id: str) -> None:
        self.state = ElectionState.NEWCOMER
        self.holder: Member | None = None
        """The other process that holds the name, as it was last seen; None unless STANDBY."""
        self._name = name
        self._boot_id = boot_id
        self._term = 0
        """Of this process's lease; before it has one, the highest that was seen."""
        self._predecessor: str | None = None
        """Boot id of the process that had the name at the first look, empty if none had it; None before that look."""
        self._replaces = b""
        """The lease that the next bid may replace."""
        self._asked_s = float("-inf")
        """When the last bid was made. Redis wrote it then or later."""
        self._lease_end_s = float("-inf")
        """When the lease of this process runs out if it is not renewed."""
        self._is_outranking = False
        """True if `_replaces` is an older holder's: void once this process's own lease has run out."""
        self._free_s = float("-inf")
        """When the lease that a standby saw runs out; a missing one may be taken then."""
        self._next_s = float("-inf")

    def bid(self, now_s: float, *, is_draining: bool = False) -> Bid | None:
        """Return what to write now; None: look only. A process that drains keeps its lease and takes none."""
        self._asked_s = now_s
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
        """Take the answer to `bid`: whether it was written, and which lease was there before, with `left_s` to live.

        `found` empty: none. `left_s` below 0: it lives for ever.
        """
        lease, is_junk = self._read(found, left_s)
        self._replaces, self._next_s, self._is_outranking = b"", now_s + RENEW_S, False
        if bid is not None and wrote:
            self._hold(bid.term, LEASE_S)
        elif lease is not None and lease.boot_id == self._boot_id:  # written by a bid whose answer was lost
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
        """The process of boot id `left_boot_id` gave its lease back: if it had this name, the next bid may take it."""
        if left_boot_id and self.holder is not None and self.holder.boot_id == left_boot_id:
            self._free_s = float("-inf")

    def fail(self, now_s: float) -> None:
        """Redis did not answer. What it lacks for the next LEASE_S says nothing: it may have lost all leases."""
        self._free_s = max(self._free_s, now_s + LEASE_S)

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait before the next bid."""
        return max(0.0, self._next_s - now_s)

    def _read(self, found: bytes, left_s: float) -> tuple[Member | None, bool]:
        """Return the lease, if it is one of a process, and whether there is something else."""
        lease = read(self._name, found) if found else None
        if lease is not None and lease.boot_id != self._boot_id and not 0 <= left_s <= LEASE_LIFE_MAX_S:
            lease = None
        return lease, bool(found) and lease is None

    def _expect(self, found: bytes, next_s: float) -> None:
        """Replace this lease at the next bid."""
        self._replaces, self._next_s = found, next_s

    def _outranks(self, other: Member, now_s: float) -> bool:
        """True if this holder has the name by a later takeover than `other`, and its own lease has not run out."""
        if now_s >= self._lease_end_s:
            return False
        return other.term < self._term if other.term else other.boot_id == self._predecessor

    def _hold(self, term: int, left_s: float) -> None:
        self.state, self.holder, self._term = ElectionState.HOLDER, None, term
        self._lease_end_s = self._asked_s + left_s

    def _stand_by(self, lease: Member, found: bytes, left_s: float, now_s: float) -> None:
        self.state, self.holder = ElectionState.STANDBY, lease
        self._term = max(self._term, lease.term)
        self._free_s = max(now_s + left_s, self._free_s)
        self._next_s = now_s + min(RENEW_S, left_s + PAST_END_S)
        if lease.draining and lease.term:  # one of the previous release would take it back
            self._expect(found, now_s)
