"""Rate limits of callers at one frontend: each request reserves from token buckets, and settles at its end.

A request is admitted at once if the quota lease of its account has enough free tokens, requests and slots. Otherwise Redis
is asked, with many operations in one round trip. While Redis is unavailable, local buckets decide. INVARIANT: every change
of a request's reservation is one synchronous step, so a cancelled request leaves nothing reserved.
"""

from __future__ import annotations

from kvmesh.buckets.operations import Denied, Lower
from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.budgets.account_state import (
    EXTEND_TOKENS,
    MARGIN_TOKENS,
    AccountState,
    Holder,
    Reservation,
)
from services.frontend.accounts.budgets.account_states import AccountStates
from services.frontend.accounts.budgets.batcher import ANSWER_S, Batcher, Ledger
from services.frontend.accounts.budgets.estimates import Estimates, charge, estimate
from services.frontend.accounts.budgets.ledger_writer import LedgerWriter
from services.frontend.accounts.budgets.local_buckets import Outage
from services.frontend.accounts.budgets.local_fallback import LocalFallback
from services.frontend.accounts.budgets.maintenance import Maintenance
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.budgets.pending import PendingReservations
from services.frontend.accounts.budgets.redis_outage import RedisOutage
from services.frontend.accounts.budgets.refusals import OVERRUN, denied_error


class Budgets:
    """Reserves and settles. `boot_id` makes the names of quota leases unique. Not safe for threads."""

    def __init__(
        self,
        ledger: Ledger,
        boot_id: str,
        clock: Clock,
        metrics: BudgetMetrics,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.metrics = metrics
        self._clock = clock
        self._local_fallback = LocalFallback()
        self._estimates = Estimates()
        batcher = self._batcher = Batcher(ledger, self._on_outage, self._on_answer, answer_s=answer_s)
        ledger_writer = self._ledger_writer = LedgerWriter(
            batcher, self._local_fallback, boot_id, clock, metrics
        )
        self._account_states = AccountStates(ledger_writer.current_limits, ledger_writer.name)
        self._redis_outage = RedisOutage(
            self._local_fallback, batcher, ledger_writer, self._account_states, clock, metrics
        )
        self._pending = PendingReservations(
            batcher,
            ledger_writer,
            self._local_fallback,
            self._redis_outage,
            clock,
            metrics,
            give_back=self._give_back,
        )
        self._maintenance = Maintenance(
            batcher,
            ledger_writer,
            self._local_fallback,
            self._redis_outage,
            self._pending,
            self._account_states,
            clock,
        )

    def __repr__(self) -> str:
        return (
            f"Budgets({self.open_count} open, {len(self._pending)} pending, {self.owed_count} owed, "
            f"{len(self._ledger_writer.unrecorded)} local, {len(self._account_states)} accounts)"
        )

    @property
    def open_count(self) -> int:
        """Number of reservations without a settlement."""
        return sum(len(each.open) + each.quota_lease.open_requests for each in self._account_states)

    @property
    def owed_count(self) -> int:
        """Number of settlements that wait for Redis."""
        return self._ledger_writer.owed_count

    @property
    def is_degraded(self) -> bool:
        """True while requests are admitted locally (degraded mode)."""
        return self._local_fallback.is_on

    @property
    def outage(self) -> Outage:
        """The state of the circuit to Redis."""
        return self._local_fallback.outage

    @property
    def batch_total(self) -> int:
        """Number of round trips to Redis."""
        return self._batcher.batch_total

    @property
    def invalid_total(self) -> int:
        """Number of operations that Redis rejects for good."""
        return self._batcher.invalid_total

    def on_members(self, frontends: int, rank: int = 0) -> None:
        """Set the number of frontends that share the limits, and the rank of this one, 0 to `frontends` - 1."""
        frontends = self._ledger_writer.frontends = max(1, frontends)
        self._local_fallback.resize(frontends, rank)
        self._account_states.resize(frontends)

    def check(self, caller: Caller) -> None:
        """Raise MeshError if even the smallest new request of `caller` would be refused now.

        Called before the message is read. The check uses a recent denial of Redis, or, in an outage, the shedding of
        sheddable classes. A resumed request is never refused and need not be checked.
        """
        account_state = self._account_states.known(caller.account)
        if account_state is None:
            return
        now_s = self._clock.now_s()
        if self._local_fallback.is_on:
            error = self._local_fallback.shed(Reservation("", caller, account_state, 0, 0), now_s)
            if error is not None:
                raise self._refused(error)
        elif not account_state.quota_lease.free_requests:
            denied = account_state.denial_cache.get(1, 0, now_s)
            if denied is not None and not denied.is_claimed:  # larger requests may use the claim
                self.metrics.known_refusals.value += 1
                raise self._refused(denied_error(account_state.account, denied, 0))

    def try_reserve(
        self, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int, is_resumed: bool = False
    ) -> Reservation | None:
        """Return a reservation that needs no round trip. None: await `reserve` with the same arguments.

        `rid`: name of the reservation. `is_resumed`: an engine had the request.
        """
        account = caller.account
        if not account.scopes:
            return Reservation("", caller, None, 0, max_output_tokens)
        account_state = self._account_states.known(account) or self._account_states.of(
            account, self._clock.now_s()
        )
        quota_lease = account_state.quota_lease
        if not quota_lease.free_requests:
            return None
        learner = self._estimates.learner(caller.tenant.name, caller.service_class.name)
        prompt, output = estimate(caller.tenant, learner, prompt_tokens, max_output_tokens)
        most = prompt_tokens + max_output_tokens if account_state.has_tokens else 0
        reservation = Reservation(rid, caller, account_state, prompt, output, most)
        tokens, overrun = reservation.tokens, reservation.overrun
        if not quota_lease.admit(tokens, overrun):
            return None
        quota_lease.want(tokens, overrun)
        reservation.holder, reservation.quota_lease, reservation.is_forced = (
            Holder.QUOTA_LEASE,
            quota_lease,
            is_resumed,
        )
        account_state.begin(overrun, self._clock.now_s())
        self.metrics.quota_lease.value += 1
        if quota_lease.is_low:
            self._ledger_writer.draw(account_state, self._clock.now_s())
        if self._local_fallback.is_on:
            self._local_fallback.hold(account_state)
        return reservation

    async def reserve(
        self, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int, is_resumed: bool = False
    ) -> Reservation:
        """Return the reservation. A resumed request is never refused: missing tokens become debt.

        Raises MeshError: REQUEST_RATE_EXCEEDED, TOKEN_RATE_EXCEEDED, CONCURRENCY_EXCEEDED, COST_EXCEEDS_BURST or
        BUDGET_UNAVAILABLE, with the time to wait. A request that is cancelled while it waits reserves nothing.
        """
        if not caller.account.scopes:
            return Reservation("", caller, None, 0, max_output_tokens)
        now_s = self._clock.now_s()
        account_state = self._account_states.of(caller.account, now_s)
        account_state.seen_at_s = now_s
        reservation = self._estimated(account_state, caller, rid, prompt_tokens, max_output_tokens)
        reservation.is_forced = is_resumed
        tokens, overrun = reservation.tokens, reservation.overrun
        account_state.quota_lease.want(tokens, overrun)
        denied = None if is_resumed else self._known_denial(account_state, tokens, overrun, now_s)
        if denied is not None:
            raise self._refused(denied_error(account_state.account, denied, tokens, overrun))
        if self._local_fallback.is_on:
            decision = self._redis_outage.decide(reservation, account_state, now_s)
        else:
            decision = await self._pending.ask(reservation, account_state)
        if isinstance(decision, MeshError):
            raise self._refused(decision)
        return decision

    def progress(self, reservation: Reservation, position: int) -> None:
        """Take the number of output tokens. A stream near the end of its reservation reserves more, and is never cut."""
        account_state, quota_lease = reservation.account_state, reservation.quota_lease
        reservation.position = position
        reservation.progress_at = position + EXTEND_TOKENS - MARGIN_TOKENS
        more = reservation.lacking
        if account_state is None or reservation.is_settled or not more:
            return
        if quota_lease is None:  # a local admission has reserved the maximum
            if not self._local_fallback.is_on:
                self._ledger_writer.renew(account_state, [reservation])
            return
        now_s = self._clock.now_s()
        account_state.extend(reservation, more, now_s)
        quota_lease.extend(more)
        self.metrics.extensions.value += 1
        if quota_lease is account_state.quota_lease and quota_lease.is_low:
            self._ledger_writer.draw(account_state, now_s)

    def lower(self, caller: Caller, rid: str, tokens: int) -> None:
        """Lower the charge of reservation `rid`, perhaps of a dead frontend, to at most `tokens`.

        Sent now or when Redis is back. A reservation in a quota lease is unknown to Redis and stays as it is.
        """
        account_state = self._account_states.known(caller.account)
        if account_state is not None:
            self._ledger_writer.owe(
                account_state, Lower(self._ledger_writer.account(account_state), rid, tokens)
            )

    def ended(self, reservation: Reservation) -> None:
        """Free the slot of a request that is over. `settle` may come later."""
        account_state = reservation.account_state
        if account_state is None or not reservation.is_live:
            return
        reservation.is_live = False
        account_state.end(self._clock.now_s())
        if reservation.quota_lease is not None:
            reservation.quota_lease.release()
        if self._local_fallback.is_on:
            self._local_fallback.release(account_state)

    def settle(
        self,
        reservation: Reservation,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        *,
        refund_request: bool = False,
    ) -> None:
        """Charge the tokens that the request used, and give back the rest. `refund_request`: do not count the request.

        This method applies the discount on cached tokens. Idempotent.
        """
        account_state = reservation.account_state
        if account_state is None or reservation.is_settled:
            return
        if reservation.is_live:
            self.ended(reservation)
        reservation.is_settled = True
        caller = reservation.caller
        actual = charge(caller.tenant, prompt_tokens, cached_tokens, output_tokens)
        has_overrun = actual > reservation.estimate
        if has_overrun:
            self.metrics.overruns.value += 1
            self.metrics.overrun_tokens.value += actual - reservation.estimate
        if output_tokens and not reservation.is_forced:
            self._estimates.learn(
                caller, prompt_tokens, cached_tokens, output_tokens, has_overrun=has_overrun
            )
        self.metrics.charge(caller.tenant.name, actual)
        account_state.denial_cache.clear()
        quota_lease, overrun = reservation.quota_lease, reservation.overrun
        account_state.close(overrun, self._clock.now_s())
        if quota_lease is None:
            del account_state.open[reservation.id]
            if reservation.holder is Holder.LOCAL and self._local_fallback.is_on:
                left = reservation.tokens - actual
                self._local_fallback.give_back(account_state, left, int(refund_request), self._clock.now_s())
            self._ledger_writer.settle(reservation, actual, refund_request=refund_request)
            return
        quota_lease.settle(reservation.tokens, actual, refund_request=refund_request, overrun=overrun)
        if quota_lease is not account_state.quota_lease:
            account_state.spent_tokens += actual
        elif quota_lease.is_low:
            self._ledger_writer.draw(account_state, self._clock.now_s())

    async def run(self) -> None:
        """Run the maintenance until cancelled. No answer of Redis ends it."""
        try:
            await self._maintenance.run()
        finally:
            await self._batcher.close()

    async def flush(self, timeout_s: float) -> bool:
        """Give back quota leases without requests and wait until no operation waits for Redis, at most `timeout_s`.

        Returns False at the timeout.
        """
        return await self._maintenance.flush(timeout_s)

    def _estimated(
        self,
        account_state: AccountState,
        caller: Caller,
        rid: str,
        prompt_tokens: int,
        max_output_tokens: int,
    ) -> Reservation:
        learner = self._estimates.learner(caller.tenant.name, caller.service_class.name)
        prompt, output = estimate(caller.tenant, learner, prompt_tokens, max_output_tokens)
        burst, _ = account_state.burst
        if prompt + output > burst >= prompt and not caller.tenant.is_strict:
            output = int(burst) - prompt  # an estimate must not make a request impossible
        most = prompt_tokens + max_output_tokens if account_state.has_tokens else 0
        return Reservation(rid, caller, account_state, prompt, output, most)

    def _known_denial(
        self, account_state: AccountState, tokens: int, overrun: int, now_s: float
    ) -> Denied | None:
        """Return the refusal that is known without asking Redis, or None."""
        burst, scope = account_state.burst
        if tokens > burst:
            return Denied("burst", scope, None, account_state.remaining)
        if self._local_fallback.is_on:
            return None
        denied = account_state.denial_cache.get(tokens, overrun, now_s)
        if denied is not None:
            self.metrics.known_refusals.value += 1
        return denied

    def _refused(self, error: MeshError) -> MeshError:
        counter = self.metrics.refusals.get(error.reason)
        if counter is not None:
            counter.value += 1
        self.metrics.overrun_refusals.value += OVERRUN in error.metadata
        return error

    def _give_back(self, reservation: Reservation) -> None:
        self.settle(reservation, 0, 0, 0, refund_request=True)

    def _on_outage(self) -> None:
        """Begin an outage: local buckets decide all waiting and all new requests."""
        self._redis_outage.begin(self._clock.now_s())
        self._pending.decide_all()

    def _on_answer(self) -> None:
        self._redis_outage.answered()


def watch_budgets(metrics: Metrics, budgets: Budgets) -> None:
    """Export open reservations, waiting settlements, and the state of the circuit to Redis."""
    metrics.gauge(
        "budget_reservations_open", "Reservations without a settlement.", lambda: budgets.open_count
    )
    metrics.gauge(
        "budget_settlements_waiting", "Settlements that wait for Redis.", lambda: budgets.owed_count
    )
    metrics.gauge(
        "budget_local_fallback",
        "1 while Redis is unavailable for budgets and requests are admitted locally.",
        lambda: budgets.is_degraded,
    )
    metrics.total("budget_outages", "Outages of Redis for budgets.", lambda: budgets.outage.total)
    metrics.total("budget_round_trips", "Round trips to Redis for budgets.", lambda: budgets.batch_total)
    metrics.total(
        "budget_faults",
        "Operations of budgets that Redis rejected for good.",
        lambda: budgets.invalid_total,
    )
