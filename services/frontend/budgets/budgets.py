"""The budgets of the callers at this frontend: reserves before a request starts, settles when it has ended.

A shell around slabs, local buckets and estimates. Where a slab of the account has room, a request is admitted at once;
otherwise Redis is asked, many in one round trip; where Redis answers nobody, local buckets decide. Every change of what a
request holds is one synchronous step, so that whoever is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import Answer, Denied, Granted, Reserve, Settle, Sweep
from kvmesh.clock import Clock
from kvmesh.errors import MeshError, internal
from kvmesh.tasks import persist
from kvmesh.tenants.caller import Caller
from services.frontend.budgets.detour import Detour
from services.frontend.budgets.estimates import Estimates, charge, estimate
from services.frontend.budgets.fallback import Outage
from services.frontend.budgets.metrics import BudgetMetrics
from services.frontend.budgets.pump import ANSWER_S, Ledger, Pump, Question
from services.frontend.budgets.refusals import denied_error
from services.frontend.budgets.reservation import Holder, Reservation
from services.frontend.budgets.slabs import Slab
from services.frontend.budgets.standing import Standing
from services.frontend.budgets.teller import LEASE_S, Teller

RENEW_S: Final = 5.0
TICK_S: Final = 0.25
"""Between two looks at the slabs, and between two attempts at a Redis that is away."""

IDLE_S: Final = 60.0
"""An account that nobody used for so long is forgotten."""

EXTEND_TOKENS: Final = 256
"""A stream that goes on behind its estimate reserves more each time it is so far ahead, and with each renewal."""

PROGRESS_TOKENS: Final = 64


class _Asked:
    """A request that waits for Redis."""

    __slots__ = ("future", "is_decided", "question", "reservation", "standing")

    def __init__(self, reservation: Reservation, standing: Standing) -> None:
        self.reservation = reservation
        self.standing = standing
        self.future: asyncio.Future[Reservation | MeshError] = asyncio.get_running_loop().create_future()
        self.question: Question | None = None
        self.is_decided = False
        """True if it was admitted or refused without Redis."""


class Budgets:
    """What callers may use, at this frontend. `boot_id` makes names of slabs unique. Its loop's alone, no thread's."""

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
        self._frontends = 1
        self._detour = Detour()
        self._pump = Pump(ledger, self._on_silence, self._on_answer, answer_s=answer_s)
        self._teller = Teller(self._pump, self._detour, boot_id, clock, metrics)
        self._estimates = Estimates()
        self._standings: dict[Account, Standing] = {}
        self._by_id: dict[int, tuple[Account, Standing]] = {}
        """The same by identity: hashing an account costs more than admitting a request."""
        self._asking: dict[str, _Asked] = {}
        self._renewed_at_s = clock.now_s()

    def __repr__(self) -> str:
        return (
            f"Budgets({self.open_count} open, {len(self._asking)} asking, {self.owed_count} owed, "
            f"{len(self._teller.adopting)} local, {len(self._standings)} accounts)"
        )

    @property
    def open_count(self) -> int:
        """Reservations that are not settled."""
        return sum(len(each.open) + each.slab.open_requests for each in self._standings.values())

    @property
    def owed_count(self) -> int:
        """Settlements that wait for Redis."""
        return self._teller.owed_count

    @property
    def is_away(self) -> bool:
        """True while requests are admitted locally."""
        return self._detour.is_on

    @property
    def outage(self) -> Outage:
        """Since when, and how often."""
        return self._detour.outage

    @property
    def batch_total(self) -> int:
        """Round trips to Redis."""
        return self._pump.batch_total

    def on_members(self, frontends: int) -> None:
        """Take how many frontends share the limits, this one included."""
        self._frontends = self._teller.frontends = max(1, frontends)
        self._detour.resize(self._frontends)
        for standing in self._standings.values():
            standing.slab.resize(standing.account, self._frontends)

    def check(self, caller: Caller) -> None:
        """Raise MeshError if any new request of `caller` would be refused now, however small: before it is even read.

        Only what a denial just before has told; a resumed request is never refused and need not be checked.
        """
        known = self._by_id.get(id(caller.account))
        if known is None:
            return
        standing, now_s = known[1], self._clock.now_s()
        if self._detour.is_on:
            error = self._detour.shed(Reservation("", caller, standing, 0, 0), now_s)
            if error is not None:
                raise self._refused(error)
        elif not standing.slab.free_requests:
            denied = standing.known_denial(1, now_s)
            if denied is not None:
                self.metrics.known_refusals.value += 1
                raise self._refused(denied_error(standing.account, denied, 0))

    def try_reserve(
        self, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int, is_resumed: bool = False
    ) -> Reservation | None:
        """Return a reservation that needs no question, or None: await `reserve`."""
        account = caller.account
        if not account.scopes:
            return Reservation("", caller, None, 0, max_output_tokens)
        known = self._by_id.get(id(account))
        standing = known[1] if known is not None else self._standing(account)
        slab = standing.slab
        if not slab.free_requests:
            return None
        learner = self._estimates.learner(caller.tenant.name, caller.service_class.name)
        prompt, output = estimate(caller.tenant, learner, prompt_tokens, max_output_tokens)
        if not slab.admit(prompt + output):
            return None
        slab.want(prompt + output)
        reservation = Reservation(rid, caller, standing, prompt, output)
        reservation.holder, reservation.slab, reservation.is_forced = Holder.SLAB, slab, is_resumed
        standing.live += 1
        self.metrics.slab.value += 1
        if slab.is_low:
            self._teller.draw(standing, self._clock.now_s())
        if self._detour.is_on:
            self._detour.hold(standing)
        return reservation

    async def reserve(
        self, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int, is_resumed: bool = False
    ) -> Reservation:
        """Return what was reserved. A resumed request is never refused: what is not there becomes debt.

        Raises MeshError: REQUEST_RATE_EXCEEDED, TOKEN_RATE_EXCEEDED, CONCURRENCY_EXCEEDED, COST_EXCEEDS_BURST or
        BUDGET_UNAVAILABLE, with the time to wait. Whoever is cancelled here holds nothing.
        """
        if not caller.account.scopes:
            return Reservation("", caller, None, 0, max_output_tokens)
        now_s = self._clock.now_s()
        standing = self._standing(caller.account)
        standing.seen_at_s = now_s
        reservation = self._estimated(standing, caller, rid, prompt_tokens, max_output_tokens)
        reservation.is_forced = is_resumed
        standing.slab.want(reservation.tokens)
        denied = None if is_resumed else self._known_denial(standing, reservation.tokens, now_s)
        if denied is not None:
            raise self._refused(denied_error(standing.account, denied, reservation.tokens))
        if self._detour.is_on:
            decision = self._decide_locally(reservation, standing, now_s)
        else:
            decision = await self._ask(_Asked(reservation, standing))
        if isinstance(decision, MeshError):
            raise self._refused(decision)
        return decision

    def progress(self, reservation: Reservation, position: int) -> None:
        """Take how many tokens of output there are: a stream behind its estimate reserves more, and is never cut for it."""
        standing = reservation.standing
        reservation.position = position
        reservation.progress_at = position + PROGRESS_TOKENS
        more = reservation.prompt_tokens + position - reservation.tokens
        if standing is None or reservation.is_settled or more <= 0:
            return
        if reservation.holder is Holder.REDIS:
            if more >= EXTEND_TOKENS and not self._detour.is_on:
                self._teller.renew(standing, [reservation])
            return
        reservation.tokens += more
        self.metrics.extensions.value += 1
        if reservation.slab is not None:
            reservation.slab.extend(more)
        else:
            self._detour.give_back(standing, -more, 0, self._clock.now_s())

    def ended(self, reservation: Reservation) -> None:
        """The request is over; what it is charged will be told by `settle`, which may come late."""
        standing = reservation.standing
        if standing is None or not reservation.is_live:
            return
        reservation.is_live = False
        standing.end(self._clock.now_s())
        if reservation.slab is not None:
            reservation.slab.release()
        if self._detour.is_on:
            self._detour.release(standing)

    def settle(
        self,
        reservation: Reservation,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        *,
        refund_request: bool = False,
    ) -> None:
        """Charge what the request used, and give back the rest. `refund_request`: nor does it count as a request.

        The discount on cached tokens is applied here. A second call is ignored.
        """
        standing = reservation.standing
        if standing is None or reservation.is_settled:
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
        standing.forget_denial()
        slab = reservation.slab
        if slab is None:
            del standing.open[reservation.id]
            if reservation.holder is Holder.LOCAL and self._detour.is_on:
                left = reservation.tokens - actual
                self._detour.give_back(standing, left, int(refund_request), self._clock.now_s())
            self._teller.settle(reservation, actual, refund_request=refund_request)
            return
        slab.settle(reservation.tokens, actual, refund_request=refund_request)
        if slab is not standing.slab:
            standing.spent_tokens += actual
        elif slab.is_low:
            self._teller.draw(standing, self._clock.now_s())

    async def run(self) -> None:
        """Draw slabs, renew leases and tell Redis what it missed, until cancelled. No answer of Redis ends it."""
        try:
            await persist(self._run, "budgets", pause_s=TICK_S)
        finally:
            await self._pump.close()

    async def flush(self, timeout_s: float) -> bool:
        """Give back what no request needs and wait until Redis knows everything, at most `timeout_s`.

        Returns whether that is so.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for standing in self._standings.values():
                        standing.slab.cool()
                    self.tick(self._clock.now_s())
                    await self._pump.drained()
                    if not self._is_telling:
                        return True
                    await asyncio.sleep(TICK_S / 10)
        except TimeoutError:
            return False

    def tick(self, now_s: float) -> None:
        """Do what is due. Called by `run` every TICK_S."""
        if self._detour.is_on:
            if not self._pump.is_busy:
                self._seek(now_s)
            return
        self._teller.tell(self._standings.values())
        is_due = now_s - self._renewed_at_s >= RENEW_S
        for standing in list(self._standings.values()):
            self._teller.draw(standing, now_s)
            if is_due:
                self._teller.renew(standing, standing.open.values())
                if standing.is_idle and now_s - standing.seen_at_s > IDLE_S:
                    del self._standings[standing.account]
        if is_due:
            self._renewed_at_s = now_s
            self._by_id.clear()
            for organisation in {account.organisation for account in self._standings}:
                self._pump.put(Question(Sweep(organisation), _ignore))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(self._clock.now_s())

    @property
    def _is_telling(self) -> bool:
        """True if Redis does not know everything yet."""
        return bool(
            self._detour.is_on
            or self._teller.owed_count
            or self._teller.adopting
            or self._asking
            or any(each.owes or each.slab.is_holding for each in self._standings.values())
        )

    def _standing(self, account: Account) -> Standing:
        known = self._by_id.get(id(account))
        if known is not None:
            return known[1]
        now_s = self._clock.now_s()
        self._teller.newest.see(account)
        standing = self._standings.get(account)
        if standing is None:
            slab = Slab(self._teller.name("slab"), account, self._frontends, now_s)
            standing = self._standings[account] = Standing(account, slab, now_s)
        self._by_id[id(account)] = account, standing
        return standing

    def _estimated(
        self, standing: Standing, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int
    ) -> Reservation:
        learner = self._estimates.learner(caller.tenant.name, caller.service_class.name)
        prompt, output = estimate(caller.tenant, learner, prompt_tokens, max_output_tokens)
        burst, _ = standing.burst
        if prompt + output > burst >= prompt and not caller.tenant.is_strict:
            output = int(burst) - prompt  # a guess must not make a request impossible
        return Reservation(rid, caller, standing, prompt, output)

    def _known_denial(self, standing: Standing, tokens: int, now_s: float) -> Denied | None:
        """Return why Redis would refuse, where that is known without asking."""
        burst, scope = standing.burst
        if tokens > burst:
            return Denied("burst", scope, None, standing.remaining)
        if self._detour.is_on:
            return None
        denied = standing.known_denial(tokens, now_s)
        if denied is not None:
            self.metrics.known_refusals.value += 1
        return denied

    async def _ask(self, asked: _Asked) -> Reservation | MeshError:
        reservation, account = asked.reservation, asked.standing.account
        operation = Reserve(account, reservation.id, reservation.tokens, LEASE_S, force=reservation.is_forced)
        asked.question = Question(operation, partial(self._reserved, asked), asked.future)
        self._asking[reservation.id] = asked
        self._pump.put(asked.question)
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._asking.pop(reservation.id, None)
            if asked.standing.open.get(reservation.id) is reservation:
                self.metrics.abandoned.value += 1  # it came in the same moment
                self.settle(reservation, 0, 0, 0, refund_request=True)
            raise

    def _reserved(self, asked: _Asked, answer: Answer | None) -> None:
        """Take Redis's answer to a reserve."""
        reservation, standing = asked.reservation, asked.standing
        assert asked.question is not None
        self._asking.pop(reservation.id, None)
        now_s = self._clock.now_s()
        if isinstance(answer, Granted | Denied):
            standing.tell(answer.remaining, now_s)
        if asked.is_decided:
            self._reserved_late(reservation, standing, answer)
        elif asked.future.done():
            if not isinstance(answer, Denied):  # its caller left
                self.metrics.abandoned.value += 1
                self._teller.owe(
                    standing, Settle(self._teller.account(standing), reservation.id, 0, refund_request=True)
                )
        elif isinstance(answer, Granted):
            self._admit(reservation, standing, Holder.REDIS)
            asked.future.set_result(reservation)
        elif isinstance(answer, Denied):
            denied = standing.deny(answer, reservation.tokens, now_s, self._frontends)
            asked.future.set_result(denied_error(standing.account, denied, reservation.tokens))
        elif asked.question.is_wrong:
            asked.future.set_result(internal())
        else:
            self._decide(asked)

    def _reserved_late(self, reservation: Reservation, standing: Standing, answer: Answer | None) -> None:
        """Redis speaks of a request that was decided on without it."""
        if reservation.holder is not Holder.LOCAL:
            if not isinstance(answer, Denied):  # it was refused
                self._teller.owe(
                    standing, Settle(self._teller.account(standing), reservation.id, 0, refund_request=True)
                )
        elif isinstance(answer, Denied):
            reservation.is_doubtful = False
        elif isinstance(answer, Granted) and not reservation.is_settled:
            self._teller.adopted(reservation)
            self._detour.give_back(standing, reservation.tokens, 1, self._clock.now_s())

    def _admit(self, reservation: Reservation, standing: Standing, holder: Holder) -> None:
        reservation.holder = holder
        standing.open[reservation.id] = reservation
        standing.live += 1
        if holder is Holder.LOCAL:
            self.metrics.local.value += 1
            self._teller.adopting[reservation.id] = reservation
        else:
            self.metrics.redis.value += 1
            self._detour.hold(standing)

    def _refused(self, error: MeshError) -> MeshError:
        counter = self.metrics.refusals.get(error.reason)
        if counter is not None:
            counter.value += 1
        return error

    def _on_silence(self) -> None:
        """Redis answers nobody: decide on all that wait, and on all that come."""
        self._detour.begin(self._standings.values(), self._clock.now_s())
        for asked in list(self._asking.values()):
            self._decide(asked)

    def _on_answer(self) -> None:
        self._detour.outage.answer(self._clock.now_s())

    def _decide(self, asked: _Asked) -> None:
        self._asking.pop(asked.reservation.id, None)
        if asked.future.done():
            return
        assert asked.question is not None
        asked.is_decided = True
        asked.reservation.is_doubtful = asked.question.is_sent
        now_s = self._clock.now_s()
        self._detour.begin(self._standings.values(), now_s)
        asked.future.set_result(self._decide_locally(asked.reservation, asked.standing, now_s))

    def _decide_locally(
        self, reservation: Reservation, standing: Standing, now_s: float
    ) -> Reservation | MeshError:
        error = self._detour.admit(reservation, now_s)
        if error is not None:
            return error
        self._admit(reservation, standing, Holder.LOCAL)
        return reservation

    def _seek(self, now_s: float) -> None:
        """Ask Redis whether it is back; once it is, tell it everything, and after a while ask it for reservations again."""
        if self._detour.outage.back_at_s is not None:
            if now_s - self._renewed_at_s >= RENEW_S:  # leases ran meanwhile
                self._renewed_at_s = now_s
                for standing in self._standings.values():
                    self._teller.renew(standing, standing.open.values())
                    self._teller.draw(standing, now_s)
            self._teller.tell(self._standings.values())
        organisation = next(iter(self._standings)).organisation if self._standings else "-"
        self._pump.put(Question(Sweep(organisation, 1), self._sought))

    def _sought(self, answer: Answer | None) -> None:
        now_s = self._clock.now_s()
        if answer is None or not self._detour.outage.may_end(now_s):
            return
        self._detour.end()
        for standing in self._standings.values():
            standing.forget_denial()
        self.tick(now_s)  # what was admitted since is told before anybody asks


def _ignore(_: Answer | None) -> None:
    """Take an answer that tells nothing."""
