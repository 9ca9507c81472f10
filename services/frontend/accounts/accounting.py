"""Budgets of requests from their reservation to their settlement: what is taken is given back or paid, on every path.

A shell around `Budgets` and `Settlements`. A caller without limits touches none of the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvmesh.tenants.caller import Caller
from services.frontend.accounts import bill as bills
from services.frontend.accounts.bill import NOT_STARTED, Bill
from services.frontend.accounts.budgets.account_state import Reservation
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.charge_split import dues
from services.frontend.accounts.progress_reports import PROGRESS_TOKENS
from services.frontend.accounts.settlement import Charge, Report, Settlements
from services.frontend.accounts.trailers import of_remaining
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import EarlierExecution, RequestSpec

NEVER: Final = 1 << 62
"""Output position that no request reaches."""


@dataclass(slots=True)
class Hold:
    """What one request holds. Owned by who serves it: `close` or `release` ends it, on every path, once."""

    reservation: Reservation | None = None
    received: int = 0
    """Output the client had already; the reservation counts from there."""
    is_successor: bool = False
    """True if the execution that gave it has paid for it, or will."""
    spec: RequestSpec | None = None
    """What it is held for, until that is over."""
    report_progress_at: int = NEVER
    """Output position at which Redis is told how far it came."""

    def trailers(self) -> Mapping[str, str]:
        """Return what is left of the budget, to be told the client."""
        return {} if self.reservation is None else of_remaining(self.reservation.remaining)

    @property
    def progress_at(self) -> int:
        """Output position at which `Accounting.progress` is to be called."""
        if self.reservation is None:
            return NEVER
        return min(self.report_progress_at, self.received + self.reservation.progress_at)


class Accounting:
    """See the module."""

    def __init__(self, settlements: Settlements, budgets: Budgets) -> None:
        self._budgets = budgets
        self._settlements = settlements

    def check(self, caller: Caller) -> None:
        """Raise MeshError if no new request of `caller`, who has limits, has a chance now, however small it is."""
        self._budgets.check(caller)

    async def reserve(self, hold: Hold, spec: RequestSpec) -> RequestSpec:
        """Reserve what `spec` may use, in `hold`; return it with its reservation.

        Raises MeshError with the quota that is used up.
        """
        caller = spec.caller
        if not caller.account.scopes:
            return spec
        hold.spec, hold.received = spec, len(spec.received_ids)
        received = hold.received
        # Who has output goes on, whatever is left: the tenant pays it back. What a client cannot show that it had is
        # computed and paid as its prompt is.
        hold.is_successor = spec.goes_ahead
        prompt = spec.prompt_tokens + (0 if hold.is_successor else received)
        asked = caller, spec.rid, prompt, spec.max_output_tokens - received, hold.is_successor
        reservation = self._budgets.try_reserve(*asked)
        if reservation is None:
            reservation = await self._budgets.reserve(*asked)
        hold.reservation = reservation
        if _is_numbered(spec):
            hold.report_progress_at = received + PROGRESS_TOKENS
        for each, tokens in dues(
            spec.earlier, spec.prompt_tokens, received, received, is_successor=hold.is_successor
        ):
            if hold.is_successor and each.is_predecessor:
                self._lower(spec, each, tokens)
        return replace(spec, reservation_id=reservation.id)

    def progress(self, hold: Hold, position: int) -> int:
        """Tell how far the output came; return the position at which to tell again."""
        reservation, spec = hold.reservation, hold.spec
        assert reservation is not None and spec is not None
        if position >= hold.report_progress_at:
            hold.report_progress_at = position + PROGRESS_TOKENS
            self._settlements.progress_reports.add(spec.request_id, spec.owner, position)
        if position - hold.received >= reservation.progress_at:
            self._budgets.progress(reservation, position - hold.received)
        return hold.progress_at

    def release(self, hold: Hold) -> None:
        """Give everything back: the request never became live. May be called twice."""
        reservation, hold.reservation = hold.reservation, None
        spec, hold.spec = hold.spec, None
        if reservation is not None:
            self._pay(reservation, NOT_STARTED, 0, None)
        if spec is not None and _is_numbered(spec):
            # Else it would seem to have died: each execution after it would hear of it, and lower its reservation.
            inherited = hold.received if hold.is_successor else 0
            nothing = Report(spec.request_id, spec.epoch, spec.owner, 0, 0, 0, False, inherited)
            self._settlements.add(nothing)

    def close(self, hold: Hold, request: LiveRequest) -> None:
        """Report and pay what the client of a request that is over was given, also of one that goes on elsewhere."""
        if request.outcome is None:  # a bug on its way out
            self.release(hold)
            return
        reservation, hold.reservation = hold.reservation, None
        bill, spec = bills.of(request), request.spec
        hold.spec = None
        inherited = min(hold.received, bill.output_tokens) if hold.is_successor else 0
        # Who is owed nothing may have given something: its tokens were on their way. Its heir must not leave them for it.
        if bill.is_nothing and not (request.progress.ids or _is_numbered(spec)):
            if reservation is not None:
                self._pay(reservation, bill, inherited, None)
            return
        report = Report(
            spec.request_id,
            spec.epoch,
            spec.owner,
            bill.prompt_tokens,
            bill.output_tokens,
            request.progress.recomputed_tokens,
            bill.is_complete,
            inherited,
        )
        if reservation is not None and not bill.is_nothing:
            # It pays for the request instead of those whose output its client let go. Who hangs up at once does not.
            received, output = hold.received, bill.output_tokens
            for each, tokens in dues(
                spec.earlier, spec.prompt_tokens, received, output, is_successor=hold.is_successor
            ):
                self._lower(spec, each, tokens)
        if reservation is None:
            self._settlements.add(report)
        elif _is_only(request, bill):
            self._pay(reservation, bill, inherited, None)
            self._settlements.add(report)
        else:
            self._budgets.ended(reservation)
            self._settlements.add(report, partial(self._pay, reservation, bill, inherited))

    def _lower(self, spec: RequestSpec, earlier: EarlierExecution, tokens: int) -> None:
        self._budgets.lower(spec.caller, earlier.owner or spec.request_id, tokens)

    def _pay(self, reservation: Reservation, bill: Bill, inherited: int, charge: Charge | None) -> None:
        """Settle with what is this execution's to pay.

        The first `inherited` tokens of output, and the prompt, are on the reservation of the execution that gave them. If
        that one has told how much it was, what lies above is paid here, whatever the client says that it had.
        """
        if charge is None:
            prompt = 0 if inherited else bill.prompt_tokens
            output = bill.output_tokens - inherited
        else:
            prompt, output = charge.paid_prompt_tokens, charge.paid_output_tokens
        cached = min(bill.cached_tokens, prompt)
        is_refunded = bill.is_request_refunded and not prompt + output
        self._budgets.settle(reservation, prompt, cached, output, refund_request=is_refunded)


def _is_numbered(spec: RequestSpec) -> bool:
    """True if Redis has noted it among the executions of the request."""
    return spec.is_fenced and (spec.is_keyed or spec.is_resumed)


def _is_only(request: LiveRequest, bill: Bill) -> bool:
    """True if no other execution can have been charged for the request: its client read it to the end.

    Then nobody need be asked, and its place is free when the client reads that end.
    """
    spec = request.spec
    was_read = bill.is_complete and request.progress.delivered >= bill.output_tokens
    return was_read and spec.is_fenced and spec.epoch == 0
