"""Accounting of each request from its reservation to its settlement.

INVARIANT: every reservation is given back or paid, on every path. A caller without limits makes no reservation.
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
"""An output position beyond that of any request."""


@dataclass(slots=True)
class Hold:
    """The reservation and the reported progress of one request.

    Owned by the request's handler. `Accounting.close` or `Accounting.release` ends it once, on every path.
    """

    reservation: Reservation | None = None
    received: int = 0
    """Output tokens that the client received before; the reservation counts output from this position."""
    is_successor: bool = False
    """True for a successor execution: its predecessor pays for the received output and the prompt."""
    spec: RequestSpec | None = None
    """The request, until it is over. None for a caller without limits."""
    report_progress_at: int = NEVER
    """Output position of the next progress report to Redis."""

    def trailers(self) -> Mapping[str, str]:
        """Return the trailers with the remaining budget."""
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
        """Raise MeshError if even the smallest new request of `caller`, which has limits, would be refused now."""
        self._budgets.check(caller)

    async def reserve(self, hold: Hold, spec: RequestSpec) -> RequestSpec:
        """Reserve tokens for `spec`, and keep the reservation in `hold`; return `spec` with the reservation's name.

        Raises MeshError with the limit that refuses the request.
        """
        caller = spec.caller
        if not caller.account.scopes:
            return spec
        hold.spec, hold.received = spec, len(spec.execution.received_ids)
        received = hold.received
        # A successor is admitted whatever budget is left: the tenant owes the tokens. Received output without proof of an
        # earlier execution is computed and paid as part of the prompt.
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
            spec.execution.earlier, spec.prompt_tokens, received, received, is_successor=hold.is_successor
        ):
            if hold.is_successor and each.is_predecessor:
                self._lower(spec, each, tokens)
        return replace(spec, reservation_id=reservation.id)

    def progress(self, hold: Hold, position: int) -> int:
        """Take the position of the output; return the position at which to call again."""
        reservation, spec = hold.reservation, hold.spec
        assert reservation is not None and spec is not None
        if position >= hold.report_progress_at:
            hold.report_progress_at = position + PROGRESS_TOKENS
            self._settlements.progress_reports.add(spec.request_id, spec.execution.owner, position)
        if position - hold.received >= reservation.progress_at:
            self._budgets.progress(reservation, position - hold.received)
        return hold.progress_at

    def release(self, hold: Hold) -> None:
        """Give everything back: the request was never admitted. May be called twice."""
        reservation, hold.reservation = hold.reservation, None
        spec, hold.spec = hold.spec, None
        if reservation is not None:
            self._pay(reservation, NOT_STARTED, 0, None)
        if spec is not None and _is_numbered(spec):
            # Without a report the execution would count as dead: each later execution would lower its reservation.
            inherited = hold.received if hold.is_successor else 0
            nothing = Report(
                spec.request_id, spec.execution.epoch, spec.execution.owner, 0, 0, 0, False, inherited
            )
            self._settlements.add(nothing)

    def close(self, hold: Hold, request: LiveRequest) -> None:
        """Report and pay the bill of a request that is over at this frontend, even if it continues at another."""
        if request.outcome is None:  # a bug on its way out
            self.release(hold)
            return
        reservation, hold.reservation = hold.reservation, None
        bill, spec = bills.of(request), request.spec
        hold.spec = None
        inherited = min(hold.received, bill.output_tokens) if hold.is_successor else 0
        # Tokens of an execution without a charge may be in flight to the client. A report makes its successor pay for them.
        if bill.is_nothing and not (request.progress.ids or _is_numbered(spec)):
            if reservation is not None:
                self._pay(reservation, bill, inherited, None)
            return
        report = Report(
            spec.request_id,
            spec.execution.epoch,
            spec.execution.owner,
            bill.prompt_tokens,
            bill.output_tokens,
            request.progress.recomputed_tokens,
            bill.is_complete,
            inherited,
        )
        if reservation is not None and not bill.is_nothing:
            # An execution with a charge pays in place of those with output that the client discarded.
            received, output = hold.received, bill.output_tokens
            for each, tokens in dues(
                spec.execution.earlier, spec.prompt_tokens, received, output, is_successor=hold.is_successor
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
        """Settle the part of the charge that this execution pays.

        The first `inherited` tokens of output, and the prompt, are charged to the reservation of the predecessor. If the
        predecessor has reported, this execution pays all tokens above that report, whatever number of received tokens the
        client states.
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
    """True if Redis has the execution in its record of the request."""
    return spec.execution.is_fenced and spec.execution.is_repeatable


def _is_only(request: LiveRequest, bill: Bill) -> bool:
    """True if no other execution can have been charged for the request, because its client read it to the end.

    The reservation is then settled at once, without waiting for Redis to answer the report.
    """
    spec = request.spec
    was_read = bill.is_complete and request.progress.delivered >= bill.output_tokens
    return was_read and spec.execution.is_fenced and spec.execution.epoch == 0
