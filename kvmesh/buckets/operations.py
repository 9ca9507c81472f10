"""Operations on an organisation's budget (nested token buckets) in Redis, and their answers. Pure.

Every operation is idempotent, except a Spend without `rid`. After a lost answer it may be sent again within five minutes,
and takes effect exactly once. Tokens and requests are whole numbers >= 0, times are seconds. `rid` names a reservation and
is never reused, for example the owner of an execution. A quota lease is one reservation for many requests (see Draw).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvmesh.buckets.limits import Account

LEASE_S_MAX = 3600.0
"""Longest lease of a reservation; the keys in Redis live a day."""

SCOPES_MAX = 16
TOKENS_MAX = 2**31
"""Tokens of one operation: levels stay exact in a double."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Takes `tokens`, `requests` and `slots` from every scope of the account, or nothing. Answers Granted or Denied.

    `force`: always granted. An amount above the levels becomes debt, which is repaid before the next admission. The open
    overrun may then exceed its limit.
    """

    account: Account
    rid: str
    tokens: int
    lease_s: float
    requests: int = 1
    slots: int = 1
    force: bool = False
    overrun: int = 0
    """Tokens that the request may use beyond `tokens`. They are open until the reservation is settled, swept or extended
    by them. The operation is denied if a scope's open overrun would exceed its limit. With no overrun open in the scope,
    one request is granted with any overrun."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Ends a reservation: charges the used amount and gives the unused amount back. Answers Settled.

    An amount beyond the reservation becomes debt. For a swept reservation only the amount above the estimate is charged.
    An unknown reservation charges nothing, and a late Reserve can no longer make it.
    """

    account: Account
    rid: str
    actual_tokens: int
    """Tokens of the whole reservation; for a quota lease, since its opening, as in `Draw.used_tokens`."""
    refund_request: bool = False
    """True: the request is not charged either, because the mesh failed before the first token."""
    used_requests: int | None = None
    """For a quota lease: requests since its opening; unused ones are given back. None: all are used."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """One open reservation, as its frontend knows it."""

    rid: str
    tokens: int
    """Tokens that it holds so far, earlier extensions included."""
    requests: int = 1
    slots: int = 1
    extra_tokens: int = 0
    """Extension: further tokens to hold, at any level. An amount above the levels becomes debt."""
    overrun: int = 0
    """Tokens that it may use beyond `tokens` and `extra_tokens`."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews leases and extends reservations. Answers Renewed. Not for quota leases, which use Draw.

    A swept reservation is opened again. A reservation that Redis has lost is recreated and taken from the levels, but
    never below 0, because it was paid for before.
    """

    account: Account
    items: tuple[Renewal, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Lower:
    """Lowers a reservation to `tokens` and gives the difference back; its lease does not change. Answers Lowered.

    Not for quota leases. A successor execution knows the tokens of its predecessor, but not whether the predecessor's
    frontend lives. A living frontend settles its own count; otherwise a sweep charges `tokens`. For a swept reservation
    too, the difference is given back. The open overrun of the lowered reservation is closed, because the successor's
    reservation opens the remaining overrun.
    """

    account: Account
    rid: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Opens a quota lease, or settles its used amount and refills it, in one step. Answers Drawn.

    A quota lease is one reservation for many requests. Tokens, requests, slots and open overrun are granted separately,
    each up to the wanted amount as far as the levels allow. Amounts above the wanted ones go back. Used amounts count from
    the opening of the quota lease, so that a lost answer changes nothing. A Draw also extends the time of the lease, opens
    a swept quota lease again, and recreates a lost one.
    """

    account: Account
    rid: str
    number: int
    """Sequence number per quota lease, from 1; a late Draw with an older number is ignored."""
    used_tokens: int
    """Tokens charged to the quota lease since its opening."""
    used_requests: int
    """Requests admitted from the quota lease since its opening."""
    tokens: int
    """Wanted tokens: the estimates of running requests, and those for new ones."""
    requests: int
    """Wanted requests, for new ones."""
    slots: int
    """Wanted slots: those of running requests, and those for new ones."""
    lease_s: float
    least_tokens: int = 0
    """Estimates of running requests; granted at any level."""
    least_slots: int = 0
    """Slots of running requests; granted even above the limit."""
    overrun: int = 0
    """Wanted open overrun: that of running requests, and some for new ones."""
    least_overrun: int = 0
    """Open overrun of running requests; granted even above the limit."""


@dataclass(frozen=True, slots=True)
class Spend:
    """Takes amounts that were spent without Redis from the levels, never below 0. Answers Spent."""

    account: Account
    tokens: int
    requests: int
    rid: str = ""
    """Name of the spending; a repetition within five minutes is ignored. Empty: every Spend counts."""


@dataclass(frozen=True, slots=True)
class Show:
    """Reads the levels of the account's scopes and the organisation's ledger, without changes. Answers Shown."""

    account: Account


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settles reservations with an expired lease at their estimate, at most `count` <= 1000. Answers Swept."""

    organisation: str
    count: int = 100


Operation: TypeAlias = Reserve | Settle | Renew | Lower | Draw | Spend | Show | Sweep


@dataclass(frozen=True, slots=True)
class RemainingBudget:
    """Remaining budget in the scope with the least. None: no scope limits it. Below 0: debt."""

    requests: float | None = None
    tokens: float | None = None
    concurrency: int | None = None


Reason: TypeAlias = Literal["requests", "tokens", "concurrency", "overrun", "burst"]
"""The limit that denies a request. "burst": the request needs more than the bucket can ever hold."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The reservation is made."""

    remaining: RemainingBudget
    is_repeated: bool = False
    """True if the reservation existed already; nothing was charged again."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing was taken."""

    reason: Reason
    scope: str
    """Scope of the limit that denies: of rates the one with the longest wait, of open overrun the one with the largest
    excess. Among equals, and for other reasons, the innermost."""
    wait_s: float | None
    """Time until the levels suffice, to the millisecond, if no other request takes from them.
    None: not known (concurrency, overrun) or never (burst)."""
    remaining: RemainingBudget
    is_claimed: bool = False
    """True if a claim of a larger request, refused before, causes the wait. A request above the claim need not wait."""
    overrun_excess: int = 0
    """Tokens by which the scope's open overrun must shrink first; 0 for any other reason."""


SettledState: TypeAlias = Literal["settled", "late", "repeated", "unknown"]
"""A late settlement comes after a sweep. A repeated or unknown one charges nothing."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Effect of a settlement."""

    refunded: int
    """Tokens given back."""
    overrun: int
    """Tokens charged beyond the reservation."""
    state: SettledState
    remaining: RemainingBudget


RenewedState: TypeAlias = Literal["renewed", "reopened", "recreated", "settled"]
"""Reopened after a sweep, or recreated after a loss of Redis's memory. A settled one has ended and is not changed."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """State of each item of the Renew, in its order."""

    states: tuple[RenewedState, ...]
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Lowered:
    """Effect of a Lower."""

    refunded: int
    """Tokens given back; 0 also if the reservation is settled or unknown."""
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Drawn:
    """Amounts that the quota lease holds now."""

    tokens: int
    requests: int
    slots: int
    is_open: bool
    """False if the quota lease was settled; it holds nothing and cannot be opened again."""
    remaining: RemainingBudget
    overrun: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """The spending is taken."""

    is_repeated: bool
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Swept:
    """Reservations that a sweep settled."""

    reservations: int
    tokens: int
    is_done: bool
    """False if there may be more."""


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """Current usage of one scope. None: not limited; levels below 0 are debt."""

    scope: str
    requests: float | None
    tokens: float | None
    slots: int
    """Slots in use, also without a limit."""
    overrun: int = 0
    """Open overrun in tokens, also without a limit."""


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """The organisation's ledger in tokens. INVARIANT: reserved + extended = settled + refunded + swept + held."""

    reserved: int = 0
    extended: int = 0
    settled: int = 0
    refunded: int = 0
    swept: int = 0
    """Settled at the estimate, because the frontend of the reservation was lost. Reopening and lowering reduce it."""
    overrun: int = 0
    """Charged beyond reservations."""
    spent: int = 0
    """Spent without Redis, as stated by Spend."""
    sweep_count: int = 0
    reopen_count: int = 0
    recreate_count: int = 0
    open_count: int = 0
    """Open reservations."""
    tombstone_count: int = 0
    """Ended reservations, remembered for some time."""

    @property
    def held(self) -> int:
        """Tokens in open reservations."""
        return self.reserved + self.extended - self.settled - self.refunded - self.swept


@dataclass(frozen=True, slots=True)
class Shown:
    """Answer to Show."""

    uses: tuple[ScopeUsage, ...]
    """In the order of the account's scopes."""
    ledger_totals: LedgerTotals


Answer: TypeAlias = Granted | Denied | Settled | Renewed | Lowered | Drawn | Spent | Shown | Swept
