"""What can be asked of an organisation's budget in Redis, and what it answers.

Pure. Every operation may be sent again when its answer was lost: it is done once. Tokens and requests are whole numbers
>= 0, times are seconds. `rid` names a reservation: unique for ever, for example the owner of an execution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvmesh.buckets.limits import Account

LEASE_S_MAX = 3600.0
"""Longest lease; the keys in Redis live a day."""

SCOPES_MAX = 16
TOKENS_MAX = 2**31
"""Tokens of one operation: levels stay exact in a double."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Takes `tokens`, `requests` and `slots` from every scope of the account, or nothing. Answers Granted or Denied.

    `force`: always granted; what the levels do not hold becomes debt, repaid before the next admission, and the open
    overrun may exceed its limit.
    """

    account: Account
    rid: str
    tokens: int
    lease_s: float
    requests: int = 1
    slots: int = 1
    force: bool = False
    overrun: int = 0
    """Tokens that the request may use beyond `tokens`: open until it is settled, swept or has reserved them. Refused where
    a scope's open overrun would exceed its limit; with none open in the scope one request is granted whatever this is."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Ends a reservation: charges what was used of it, gives the rest back. Answers Settled.

    Used beyond the reservation becomes debt. Of one that was swept only what lies above the estimate is charged.
    A reservation that Redis does not know charges nothing, and cannot be made any more by a Reserve that comes late.
    """

    account: Account
    rid: str
    actual_tokens: int
    """Of the whole reservation; of a slab: since it was opened, as in `Draw.used_tokens`."""
    refund_request: bool = False
    """True: no request is charged either. Our fault, before the first token."""
    used_requests: int | None = None
    """Of a slab: requests since it was opened; the rest is given back. None: all."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """One reservation that still runs, as its frontend knows it."""

    rid: str
    tokens: int
    """All that it holds so far, earlier extensions included."""
    requests: int = 1
    slots: int = 1
    extra_tokens: int = 0
    """To hold from now on besides, whatever the levels are: debt, if need be."""
    overrun: int = 0
    """Tokens that it may use beyond all that it holds from now on."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews leases, extends reservations. Answers Renewed. Not for slabs: they draw.

    Opens again what was swept. What Redis has lost is made anew and taken from the levels, but never below 0: it
    had been paid for.
    """

    account: Account
    items: tuple[Renewal, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Lower:
    """Gives back what a reservation holds beyond `tokens`; it goes on as it was. Answers Lowered. Not for slabs.

    Whoever goes on with a request knows what the reservation before is worth, and not whether its frontend lives. If so,
    that settles what it knows; if not, a sweep charges `tokens`. Of what was swept already the rest is given back. Its open
    overrun is closed: the successor's reservation opens what is left of the request.
    """

    account: Account
    rid: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Opens a slab, or settles what was used of it and fills it again, in one step. Answers Drawn.

    A slab is one reservation for many requests. What it shall hold is granted as far as the levels reach, each of tokens,
    requests, slots and open overrun by itself; what it holds beyond goes back. Used is counted from when the slab was
    opened, so that a lost answer changes nothing. A Draw renews the lease, opens again what was swept, and opens anew what
    was lost.
    """

    account: Account
    rid: str
    number: int
    """1, 2, 3 ... per slab, one more each time something is sent; an older one that comes late is ignored."""
    used_tokens: int
    """Tokens charged to the slab since it was opened."""
    used_requests: int
    """Requests admitted from the slab since it was opened."""
    tokens: int
    """Tokens that it shall hold: the estimates of what runs, and what is to be given out."""
    requests: int
    """Requests that it shall hold to be given out."""
    slots: int
    """Slots that it shall hold: what runs, and what is to be given out."""
    lease_s: float
    least_tokens: int = 0
    """Estimates of what runs: held whatever the levels are."""
    least_slots: int = 0
    """What runs: held whatever others hold."""
    overrun: int = 0
    """Open overrun that it shall hold: of what runs, and to be given out."""
    least_overrun: int = 0
    """Open overrun of what runs: held whatever others hold."""


@dataclass(frozen=True, slots=True)
class Spend:
    """Takes from the levels what was spent without Redis, never below 0. Answers Spent."""

    account: Account
    tokens: int
    requests: int
    rid: str = ""
    """Names the spending, so that it is taken once if it is sent twice within five minutes. Empty: each counts."""


@dataclass(frozen=True, slots=True)
class Show:
    """Asks for the levels of the account's scopes and for the organisation's ledger. Answers Shown. Changes nothing."""

    account: Account


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settles reservations whose lease is over at their estimate, at most `count` <= 1000. Answers Swept."""

    organisation: str
    count: int = 100


Operation: TypeAlias = Reserve | Settle | Renew | Lower | Draw | Spend | Show | Sweep


@dataclass(frozen=True, slots=True)
class RemainingBudget:
    """What is left in the scope that has least. None: no scope limits it. Below 0: debt."""

    requests: float | None = None
    tokens: float | None = None
    concurrency: int | None = None


Reason: TypeAlias = Literal["requests", "tokens", "concurrency", "overrun", "burst"]
"""Which limit refuses. "burst": the request asks for more than the limit ever holds."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The reservation is made."""

    remaining: RemainingBudget
    is_repeated: bool = False
    """True if Redis knew it already: nothing was charged again."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing was taken."""

    reason: Reason
    scope: str
    """Whose limit: the one to wait for longest, of equals the innermost."""
    wait_s: float | None
    """Until the levels hold it, to the millisecond, if no other request takes from them.
    None: not known (concurrency, overrun) or never (burst)."""
    remaining: RemainingBudget
    is_claimed: bool = False
    """True if it must wait for a larger request that was refused before it; who needs more may not have to."""
    overrun_excess: int = 0
    """Tokens by which the scope's open overrun must shrink first; 0 for any other reason."""


SettledState: TypeAlias = Literal["settled", "late", "repeated", "unknown"]
"""late: it had been swept. repeated, unknown: nothing was charged."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What the settlement changed."""

    refunded: int
    """Tokens given back."""
    overrun: int
    """Tokens charged beyond the reservation."""
    state: SettledState
    remaining: RemainingBudget


RenewedState: TypeAlias = Literal["renewed", "reopened", "recreated", "settled"]
"""reopened: it had been swept. recreated: Redis had lost it. settled: it is over, nothing was changed."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """What became of each item of the Renew, in its order."""

    states: tuple[RenewedState, ...]
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Lowered:
    """What was given back."""

    refunded: int
    """0 too if the reservation is settled or not known."""
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the slab holds now."""

    tokens: int
    requests: int
    slots: int
    is_open: bool
    """False if the slab was settled: it holds nothing and never will again."""
    remaining: RemainingBudget
    overrun: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """The spending is taken."""

    is_repeated: bool
    remaining: RemainingBudget


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found."""

    reservations: int
    tokens: int
    is_done: bool
    """False if there may be more."""


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """Live use of one scope. None: not limited; levels below 0 are debt."""

    scope: str
    requests: float | None
    tokens: float | None
    slots: int
    """Slots that are held, also where they are not limited."""
    overrun: int = 0
    """Open overrun in tokens, also where it is not limited."""


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """The organisation's ledger in tokens: reserved + extended = settled + refunded + swept + held, always."""

    reserved: int = 0
    extended: int = 0
    settled: int = 0
    refunded: int = 0
    swept: int = 0
    """Settled at the estimate, because the frontend that held it was gone; less by what was opened again
    or lowered."""
    overrun: int = 0
    """Charged beyond reservations."""
    spent: int = 0
    """Taken for what was spent without Redis, as it was stated."""
    sweep_count: int = 0
    reopen_count: int = 0
    recreate_count: int = 0
    open_count: int = 0
    """Reservations that are open."""
    tombstone_count: int = 0
    """Reservations that are over and remembered for a while."""

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
