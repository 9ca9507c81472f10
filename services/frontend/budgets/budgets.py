"""The budgets of the callers at this frontend: reserves before a request starts, settles when it has ended.

A shell around slabs, local buckets and estimates. Where a slab of the account has room, a request is admitted at once;
otherwise Redis is asked, many in one round trip; where Redis answers nobody, local buckets decide. Every change of what a
request holds is one synchronous step, so that whoever is cancelled leaves nothing behind.

Settlements wait in memory while Redis is away, OWED_MAX of them; the oldest are dropped, whose reservations are then
settled at their estimate when their lease ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Final

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    Operation,
    Renew,
    Renewal,
    Renewed,
    Reserve,
    Settle,
    Settled,
    Spend,
    Spent,
    Sweep,
)
from kvmesh.clock import Clock
from kvmesh.errors import MeshError, internal
from kvmesh.tasks import persist
from kvmesh.tenants.caller import Caller
from services.frontend.budgets.estimates import Estimates, charge, estimate
from services.frontend.budgets.fallback import LocalBuckets, Outage
from services.frontend.budgets.metrics import BudgetMetrics
from services.frontend.budgets.pump import ANSWER_S, Ledger, Pump, Question
from services.frontend.budgets.refusals import denied_error, shed_error
from services.frontend.budgets.reservation import Holder, Reservation
from services.frontend.budgets.slabs import Slab
from services.frontend.budgets.standing import Standing

LEASE_S: Final = 15.0
RENEW_S: Final = 5.0
TICK_S: Final = 0.25
"""Between two looks at the slabs, and between two attempts at a Redis that is away."""

OWED_MAX: Final = 65_536
RENEWALS_MAX: Final = 256
"""Renewals in one operation: a script blocks everybody."""

IDLE_S: Final = 60.0
"""An account that nobody used for so long is forgotten."""

EXTEND_TOKENS: Final = 256
"""A stream that goes on behind its estimate reserves more each time it is so far ahead, and with each renewal."""

PROGRESS_TOKENS: Final = 64


class _Asked:
    """A request that waits for Redis."""

    __slots__ = ("future", "is_decided", "question", "reservation")

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.future: asyncio.Future[Reservation | MeshError] = asyncio.get_running_loop().create_future()
        self.question: Question | None = None
        self.is_decided = False
        """True if it was admitted or refused without Redis."""


class Budgets:
    """What callers may use, at this frontend. `boot_id` makes names of slabs unique. One loop's, never a thread's."""

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
        self.outage = Outage()
        self._clock = clock
        self._boot_id = boot_id
        self._names = itertools.count(1)
        self._frontends = 1
        self._pump = Pump(ledger, self._on_silence, self._on_answer, answer_s=answer_s)
        self._estimates = Estimates()
        self._standings: dict[Account, Standing] = {}
        self._by_id: dict[int, tuple[Account, Standing]] = {}
        """The same by identity: hashing an account costs more than admitting a request."""
        self._asking: dict[str, _Asked] = {}
        self._owed: deque[tuple[Standing, Operation]] = deque()
        self._local: LocalBuckets | None = None
        """While Redis is away."""
        self._opened: set[Standing] = set()
        """Those that the local buckets know."""
        self._adopting: dict[str, Reservation] = {}
        """Admitted locally and not settled: Redis shall know of them."""
        self._renewed_at_s = clock.now_s()

    def __repr__(self) -> str:
        return (
            f"Budgets({self.open_count} open, {len(self._asking)} asking, {len(self._owed)} owed, "
            f"{len(self._adopting)} local, {len(self._standings)} accounts)"
        )

    @property
    def open_count(self) -> int:
        """Reservations that are not settled."""
        return sum(len(each.open) + each.slab.open_requests for each in self._standings.values())

    @property
    def owed_count(self) -> int:
        """Settlements that wait for Redis."""
        return len(self._owed)

    @property
    def is_away(self) -> bool:
        """True while requests are admitted locally."""
        return self._local is not None

    @property
    def batch_total(self) -> int:
        """Round trips to Redis."""
        return self._pump.batch_total

    def on_members(self, frontends: int) -> None:
        """Take how many frontends share the limits, this one included."""
        self._frontends = max(1, frontends)
        for standing in self._standings.values():
            standing.slab.resize(standing.account, self._frontends)
        if self._local is not None:
            self._local.resize(self._frontends)

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
        reservation.holder, reservation.slab = Holder.SLAB, slab
        standing.live += 1
        self.metrics.slab.value += 1
        if slab.is_low:
            self._draw(standing, self._clock.now_s())
        if self._local is not None and standing in self._opened:
            self._local.hold(account)
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
        known = None if is_resumed else self._known_denial(standing, reservation, now_s)
        if known is not None:
            raise self._refused(denied_error(standing.account, known, reservation.tokens))
        if self._local is not None:
            decision = self._decide_locally(reservation, now_s)
        else:
            decision = await self._ask(reservation)
        if isinstance(decision, MeshError):
            raise self._refused(decision)
        return decision

    def check(self, caller: Caller) -> None:
        """Raise MeshError if any new request of `caller` would be refused now, however small: before it is even read.

        Only what a denial just before has told; a resumed request is never refused and need not be checked.
        """
        known = self._by_id.get(id(caller.account))
        if known is None:
            return
        standing, now_s = known[1], self._clock.now_s()
        if self._local is not None:
            if caller.service_class.is_sheddable and self.outage.is_shedding(now_s):
                raise self._refused(shed_error(standing.account, self._local.remaining(standing.account)))
            return
        if not standing.slab.free_requests:
            denied = standing.known_denial(0, now_s)
            if denied is not None:
                self.metrics.known_refusals.value += 1
                raise self._refused(denied_error(standing.account, denied, 0))

    def progress(self, reservation: Reservation, position: int) -> None:
        """Take how many tokens of output there are: a stream behind its estimate reserves more, and is never cut for it."""
        standing = reservation.standing
        reservation.position = position
        reservation.progress_at = position + PROGRESS_TOKENS
        more = reservation.prompt_tokens + position - reservation.tokens
        if standing is None or reservation.is_settled or more <= 0:
            return
        if reservation.holder is Holder.REDIS:
            if more >= EXTEND_TOKENS and self._local is None:
                self._renew(standing, [reservation])
            return
        reservation.tokens += more
        self.metrics.extensions.value += 1
        if reservation.slab is not None:
            reservation.slab.extend(more)
        elif self._local is not None:
            self._local.give_back(standing.account, -more, 0, self._clock.now_s())

    def ended(self, reservation: Reservation) -> None:
        """The request is over; what it is charged will be told by `settle`, which may come late."""
        standing = reservation.standing
        if standing is None or not reservation.is_live:
            return
        reservation.is_live = False
        standing.end(self._clock.now_s())
        if reservation.slab is not None:
            reservation.slab.release()
        if self._local is not None and standing in self._opened:
            self._local.release(standing.account)

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
        if reservation.slab is not None:
            self._settle_in_slab(reservation, reservation.slab, actual, refund_request)
            return
        del standing.open[reservation.id]
        operation = Settle(standing.account, reservation.id, actual, refund_request)
        if reservation.holder is Holder.REDIS:
            self._owe(standing, operation)
            return
        del self._adopting[reservation.id]
        if self._local is not None and standing in self._opened:
            left = reservation.tokens - actual
            self._local.give_back(standing.account, left, int(refund_request), self._clock.now_s())
        if reservation.is_doubtful:
            # Whether Redis has it or not: opened and settled it is charged once.
            self._owe(
                standing, Renew(standing.account, (Renewal(reservation.id, reservation.tokens),), LEASE_S)
            )
            self._owe(standing, operation)
        else:
            standing.spent_tokens += actual
            standing.spent_requests += not refund_request

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
                    now_s = self._clock.now_s()
                    for standing in self._standings.values():
                        standing.slab.cool()
                    self.tick(now_s)
                    await self._pump.drained()
                    if not self._is_telling:
                        return True
                    await asyncio.sleep(TICK_S / 10)
        except TimeoutError:
            return False

    def tick(self, now_s: float) -> None:
        """Do what is due. Called by `run` every TICK_S."""
        if self._local is not None:
            if not self._pump.is_busy:
                self._seek()
            return
        self._tell()
        is_due = now_s - self._renewed_at_s >= RENEW_S
        for standing in list(self._standings.values()):
            self._draw(standing, now_s)
            if is_due:
                self._renew(standing, standing.open.values())
                if standing.is_idle and now_s - standing.seen_at_s > IDLE_S:
                    del self._standings[standing.account]
        if is_due:
            self._renewed_at_s = now_s
            self._by_id.clear()
            for organisation in {account.organisation for account in self._standings}:
                self._pump.put(Question(Sweep(organisation), _ignore))

    @property
    def _is_telling(self) -> bool:
        """True if Redis does not know everything yet."""
        return bool(
            self._local is not None
            or self._owed
            or self._adopting
            or self._asking
            or any(
                each.spending or each.spent_tokens or each.spent_requests or each.slab.is_holding
                for each in self._standings.values()
            )
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(self._clock.now_s())

    # --- asking

    def _standing(self, account: Account) -> Standing:
        known = self._by_id.get(id(account))
        if known is not None:
            return known[1]
        now_s = self._clock.now_s()
        standing = self._standings.get(account)
        if standing is None:
            slab = Slab(self._slab_rid(), account, self._frontends, now_s)
            standing = self._standings[account] = Standing(account, slab, now_s)
        self._by_id[id(account)] = account, standing
        return standing

    def _slab_rid(self) -> str:
        return f"{self._boot_id}-slab-{next(self._names)}"

    def _estimated(
        self, standing: Standing, caller: Caller, rid: str, prompt_tokens: int, max_output_tokens: int
    ) -> Reservation:
        learner = self._estimates.learner(caller.tenant.name, caller.service_class.name)
        prompt, output = estimate(caller.tenant, learner, prompt_tokens, max_output_tokens)
        if not caller.tenant.is_strict:  # a guess must not make a request impossible
            output = min(output, max(0, int(standing.burst[0]) - prompt)) if standing.burst[1] else output
        return Reservation(rid, caller, standing, prompt, output)

    def _known_denial(self, standing: Standing, reservation: Reservation, now_s: float) -> Denied | None:
        """Return why Redis would refuse, where that is known without asking."""
        burst, scope = standing.burst
        if reservation.tokens > burst:
            return Denied("burst", scope, None, standing.remaining)
        if self._local is not None:
            return None
        denied = standing.known_denial(reservation.tokens, now_s)
        if denied is not None:
            self.metrics.known_refusals.value += 1
        return denied

    async def _ask(self, reservation: Reservation) -> Reservation | MeshError:
        asked = _Asked(reservation)
        standing = reservation.standing
        assert standing is not None
        operation = Reserve(
            standing.account, reservation.id, reservation.tokens, LEASE_S, force=reservation.is_forced
        )
        asked.question = Question(operation, partial(self._reserved, asked), asked.future)
        self._asking[reservation.id] = asked
        self._pump.put(asked.question)
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._asking.pop(reservation.id, None)
            if asked.future.done() and not asked.future.cancelled():
                decision = asked.future.result()
                if isinstance(decision, Reservation):  # it came in the same moment
                    self._abandon(decision)
            raise

    def _reserved(self, asked: _Asked, answer: Answer | None) -> None:
        """Take Redis's answer to a reserve."""
        reservation, standing = asked.reservation, asked.reservation.standing
        assert standing is not None and asked.question is not None
        self._asking.pop(reservation.id, None)
        now_s = self._clock.now_s()
        if isinstance(answer, Granted | Denied):
            standing.tell(answer.remaining, now_s)
        if asked.is_decided:
            self._answered_late(reservation, standing, answer)
        elif asked.future.done():
            if not isinstance(answer, Denied):  # its caller left
                self.metrics.abandoned.value += 1
                self._owe(standing, Settle(standing.account, reservation.id, 0, refund_request=True))
        elif isinstance(answer, Granted):
            self._admit(reservation, Holder.REDIS)
            self.metrics.redis.value += 1
            asked.future.set_result(reservation)
        elif isinstance(answer, Denied):
            denied = standing.deny(answer, reservation.tokens, now_s, self._frontends)
            asked.future.set_result(denied_error(standing.account, denied, reservation.tokens))
        elif asked.question.is_wrong:
            asked.future.set_result(internal())
        else:
            self._on_silence()
            self._decide(asked)

    def _answered_late(self, reservation: Reservation, standing: Standing, answer: Answer | None) -> None:
        """Redis speaks of a request that was decided on without it."""
        if reservation.holder is not Holder.LOCAL:
            if not isinstance(answer, Denied):  # it was refused
                self._owe(standing, Settle(standing.account, reservation.id, 0, refund_request=True))
        elif isinstance(answer, Denied):
            reservation.is_doubtful = False
        elif isinstance(answer, Granted) and not reservation.is_settled:
            self._adopted(reservation)
            if self._local is not None and standing in self._opened:
                self._local.give_back(standing.account, reservation.tokens, 1, self._clock.now_s())

    def _admit(self, reservation: Reservation, holder: Holder) -> None:
        standing = reservation.standing
        assert standing is not None
        reservation.holder = holder
        standing.open[reservation.id] = reservation
        standing.live += 1
        if holder is Holder.LOCAL:
            self._adopting[reservation.id] = reservation
        elif self._local is not None and standing in self._opened:
            self._local.hold(standing.account)

    def _adopted(self, reservation: Reservation) -> None:
        """Redis holds what was admitted locally."""
        reservation.holder, reservation.is_doubtful = Holder.REDIS, False
        self._adopting.pop(reservation.id, None)

    def _abandon(self, reservation: Reservation) -> None:
        self.metrics.abandoned.value += 1
        self.settle(reservation, 0, 0, 0, refund_request=True)

    def _refused(self, error: MeshError) -> MeshError:
        counter = self.metrics.refusals.get(error.reason)
        if counter is not None:
            counter.value += 1
        return error

    # --- without Redis

    def _on_silence(self) -> None:
        """Redis answers nobody: decide on all that wait, and on all that come."""
        now_s = self._clock.now_s()
        self.outage.lose(now_s)
        if self._local is None:
            self._local = LocalBuckets(self._frontends)
            for standing in self._standings.values():
                if standing.live:
                    self._open_locally(standing, now_s)
        for asked in list(self._asking.values()):
            self._decide(asked)

    def _on_answer(self) -> None:
        self.outage.answer(self._clock.now_s())

    def _decide(self, asked: _Asked) -> None:
        self._asking.pop(asked.reservation.id, None)
        if asked.future.done():
            return
        assert asked.question is not None
        asked.is_decided = True
        asked.reservation.is_doubtful = asked.question.is_sent
        asked.future.set_result(self._decide_locally(asked.reservation, self._clock.now_s()))

    def _decide_locally(self, reservation: Reservation, now_s: float) -> Reservation | MeshError:
        standing, local = reservation.standing, self._local
        assert standing is not None and local is not None
        account = standing.account
        self._open_locally(standing, now_s)
        is_forced = reservation.is_forced
        if not is_forced and reservation.caller.service_class.is_sheddable and self.outage.is_shedding(now_s):
            return shed_error(account, local.remaining(account))
        denied = local.admit(account, reservation.tokens, now_s, is_forced=is_forced)
        if denied is not None:
            denied = standing.timed(denied, now_s, self._frontends)
            return denied_error(account, denied, reservation.tokens)
        self._admit(reservation, Holder.LOCAL)
        self.metrics.local.value += 1
        return reservation

    def _open_locally(self, standing: Standing, now_s: float) -> None:
        if self._local is not None and standing not in self._opened:
            self._opened.add(standing)
            age_s = now_s - standing.remaining_at_s
            self._local.open(standing.account, standing.told, age_s, standing.live, now_s)

    def _seek(self) -> None:
        """Ask Redis whether it is back; once it is, tell it everything, and after a while ask it for reservations again."""
        if self.outage.back_at_s is not None:
            now_s = self._clock.now_s()
            if now_s - self._renewed_at_s >= RENEW_S:  # leases ran meanwhile
                self._renewed_at_s = now_s
                for standing in self._standings.values():
                    self._renew(standing, standing.open.values())
                    self._draw(standing, now_s)
            self._tell()  # last: what is given back above must be there to be taken
        organisation = next(iter(self._standings)).organisation if self._standings else "-"
        self._pump.put(Question(Sweep(organisation, 1), self._sought))

    def _sought(self, answer: Answer | None) -> None:
        if answer is None:
            return
        now_s = self._clock.now_s()
        if self.outage.may_end(now_s):
            self.outage.end()
            self._local = None
            self._opened.clear()
            for standing in self._standings.values():
                standing.forget_denial()
            self.tick(now_s)  # what was admitted since is told before anybody asks

    # --- telling Redis

    def _tell(self) -> None:
        """Tell Redis what it missed: who runs, what was settled, what was spent."""
        running: dict[Standing, list[Reservation]] = {}
        for reservation in self._adopting.values():
            assert reservation.standing is not None
            running.setdefault(reservation.standing, []).append(reservation)
        for standing, reservations in running.items():
            self._renew(standing, reservations)
        owed, self._owed = self._owed, deque()
        for standing, operation in owed:
            self._put_owed(standing, operation)
        for standing in self._standings.values():
            self._spend(standing)

    def _renew(self, standing: Standing, reservations: Iterable[Reservation]) -> None:
        """Renew leases; reserve what running streams are behind their estimates; let Redis know what it does not."""
        pairs = []
        for each in reservations:
            more = max(0, each.prompt_tokens + each.position - each.tokens)
            each.is_doubtful = True  # until there is an answer
            pairs.append((each, Renewal(each.id, each.tokens, 1, int(each.is_live), more)))
        for at in range(0, len(pairs), RENEWALS_MAX):
            part = pairs[at : at + RENEWALS_MAX]
            operation = Renew(standing.account, tuple(item for _, item in part), LEASE_S)
            self._pump.put(Question(operation, partial(self._renewed, standing, part)))

    def _renewed(
        self, standing: Standing, pairs: list[tuple[Reservation, Renewal]], answer: Answer | None
    ) -> None:
        if not isinstance(answer, Renewed):
            return
        standing.tell(answer.remaining, self._clock.now_s())
        for reservation, item in pairs:
            if item.extra_tokens:
                self.metrics.extensions.value += 1
                reservation.tokens = max(reservation.tokens, item.tokens + item.extra_tokens)
            if reservation.holder is Holder.LOCAL and not reservation.is_settled:
                self._adopted(reservation)

    def _owe(self, standing: Standing, operation: Operation) -> None:
        """Have `operation` done, now or when Redis is back."""
        if self._local is None:
            self._put_owed(standing, operation)
            return
        if len(self._owed) >= OWED_MAX:
            self._owed.popleft()
            self.metrics.dropped.value += 1
        self._owed.append((standing, operation))

    def _put_owed(self, standing: Standing, operation: Operation) -> None:
        question = Question(operation, _ignore)
        question.take = partial(self._paid, standing, question)
        self._pump.put(question)

    def _paid(self, standing: Standing, question: Question, answer: Answer | None) -> None:
        if isinstance(answer, Settled | Renewed | Spent):
            standing.tell(answer.remaining, self._clock.now_s())
        elif question.is_wrong:
            self.metrics.dropped.value += 1
        else:
            self._on_silence()
            self._owe(standing, question.operation)

    def _spend(self, standing: Standing) -> None:
        if standing.is_spending:
            return
        if standing.spending is None:
            if not (standing.spent_tokens or standing.spent_requests):
                return
            rid = f"{self._boot_id}-spent-{next(self._names)}"
            tokens, requests = standing.spent_tokens, standing.spent_requests
            standing.spending = Spend(standing.account, tokens, requests, rid)
            standing.spent_tokens = standing.spent_requests = 0
        standing.is_spending = True
        self._pump.put(Question(standing.spending, partial(self._spent, standing)))

    def _spent(self, standing: Standing, answer: Answer | None) -> None:
        standing.is_spending = False
        if isinstance(answer, Spent):
            standing.spending = None
            standing.tell(answer.remaining, self._clock.now_s())

    # --- slabs

    def _draw(self, standing: Standing, now_s: float) -> None:
        slab = standing.slab
        if slab.is_over:
            self._owe(
                standing,
                Settle(standing.account, slab.rid, slab.used_tokens, used_requests=slab.used_requests),
            )
            standing.slab = Slab(self._slab_rid(), standing.account, self._frontends, now_s)
            return
        is_away = self._local is not None
        if is_away and self.outage.back_at_s is None:
            slab.is_low = False
            return
        ask = slab.draw(now_s, may_grow=not is_away)
        if ask is None:
            return
        operation = Draw(
            standing.account,
            slab.rid,
            ask.number,
            ask.used_tokens,
            ask.used_requests,
            ask.tokens,
            ask.requests,
            ask.slots,
            LEASE_S,
            ask.least_tokens,
            ask.least_slots,
        )
        self._pump.put(Question(operation, partial(self._drawn, standing, slab)))

    def _drawn(self, standing: Standing, slab: Slab, answer: Answer | None) -> None:
        if not isinstance(answer, Drawn):
            slab.lost()
            return
        now_s = self._clock.now_s()
        standing.tell(answer.remaining, now_s)
        if answer.is_open:
            slab.drawn(answer.tokens, answer.requests, answer.slots)
            return
        slab.lost()  # Redis says it was settled: what runs in it is charged by itself
        slab.forfeit()
        standing.slab = Slab(self._slab_rid(), standing.account, self._frontends, now_s)

    def _settle_in_slab(
        self, reservation: Reservation, slab: Slab, actual: int, refund_request: bool
    ) -> None:
        standing = reservation.standing
        assert standing is not None
        slab.settle(reservation.tokens, actual, refund_request=refund_request)
        if slab is not standing.slab:
            standing.spent_tokens += actual
        elif slab.is_low:
            self._draw(standing, self._clock.now_s())


def _ignore(_: Answer | None) -> None:
    """Take an answer that tells nothing."""
