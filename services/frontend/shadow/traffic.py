"""Shadow traffic of one frontend: samples requests, sends copies, compares the answers. Pure.

    offered ──► queued (QUEUE_MAX) ──► in flight (in_flight_max) ──► waits for the user's answer ──► compared
                   └──► dropped by reason ◄──┴───────────────────────────┘

Every list has a bound. A request beyond a bound is dropped and counted, and never waits. The user's request is only read,
except for a record of its log-probabilities. INVARIANT: nothing is in flight or queued while no shadow is in force.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.models.detokenizer import Detokenizer
from kvmesh.snapshot.assignment import session_hash
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.shadow import Shadow, ShadowMode
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request import LiveRequest
from services.frontend.shadow import copies
from services.frontend.shadow.comparison import UNPLACED, answer_of, compare, fault_of
from services.frontend.shadow.counts import ShadowTally
from services.frontend.shadow.ledger import Grant, TokenLedger
from services.frontend.shadow.off_switch import CEILING, DRAINING, EXPIRED, QUEUE_DELAY, TOKENIZER, OffSwitch
from services.frontend.shadow.pair import Copy, Pair
from services.frontend.shadow.shadow_core import ShadowCore

QUEUE_MAX: Final = 256
"""Sampled requests that wait to be copied."""

QUEUE_S: Final = 10.0
"""Longest wait in the queue. A later copy would find another mesh than the user's request did."""

IN_FLIGHT_MAX: Final = 8
CAPACITY_PART: Final = 10
"""In flight: at most a tenth of the target's decode slots, shared by the frontends, and at most IN_FLIGHT_MAX."""

WAITING_MAX: Final = 256
"""Pairs that wait for the end of the user's request."""

LATE: Final = "late"
NO_ROUTER: Final = "no_router"
NO_LEDGER: Final = "no_ledger"
MINUTE: Final = "minute"
TOO_LARGE: Final = "too_large"
QUEUE_FULL: Final = "queue_full"
MOVED: Final = "moved"
UNFINISHED: Final = "unfinished"
REFUSED: Final = "refused"
STOPPED: Final = "stopped"

DROPPED: Final = (
    *(LATE, NO_ROUTER, NO_LEDGER, MINUTE, TOO_LARGE, QUEUE_FULL, MOVED, UNFINISHED, REFUSED, STOPPED),
    *(EXPIRED, CEILING, TOKENIZER, DRAINING, QUEUE_DELAY),
)
"""Reasons why a sampled request was not copied or not compared."""


def in_flight_max(decode_slots: int, frontends: int) -> int:
    """Return the most requests with copies in flight at one of `frontends`. `decode_slots`: of the target's replicas."""
    shared = decode_slots // CAPACITY_PART // max(1, frontends)
    return max(1, min(IN_FLIGHT_MAX, shared))


class ShadowTraffic:
    """See the module. `users`: the core of users' requests, which is read alone.

    `detokenizer(version)` returns a new detokenizer, `has_tokenizer(one, other)` is true if two versions make the
    same ids of each prompt. `wall_s()` is Unix time. `on_wake` is called when `pump` has work.
    """

    def __init__(
        self,
        users: FrontendCore,
        core: Callable[[ShadowTraffic], ShadowCore],
        *,
        detokenizer: Callable[[str], Detokenizer],
        share_tokenizer: Callable[[str, str], bool],
        wall_s: Callable[[], float],
        boot_id: str = "",
    ) -> None:
        self.shadow: Shadow | None = None
        """The shadow in force. None: nothing is copied."""
        self.last: Shadow | None = None
        """The shadow in force, else the last one: its ledger takes unused tokens back."""
        self.tally: ShadowTally | None = None
        """Counts of the shadow in force, else of the last one."""
        self.ledger = TokenLedger(0)
        self.in_flight_max = IN_FLIGHT_MAX
        self.copied_total = self.token_total = 0
        self.dropped_totals: Counter[str] = Counter()
        """Requests that were sampled and not copied or not compared, by reason."""
        self.on_wake: Callable[[], None] = lambda: None
        self.core = core(self)
        self._users = users
        self._detokenizer = detokenizer
        self._share_tokenizer = share_tokenizer
        self._wall_s = wall_s
        self._boot_id = boot_id
        self._content: Content | None = None
        self._versions: dict[str, str] = {}
        """Model version by pool of the copies."""
        self._switch = OffSwitch(0.0)
        self._queue: deque[Pair] = deque()
        self._in_flight: list[Pair] = []
        self._waiting: deque[Pair] = deque()
        self._readable: dict[LiveRequest, None] = {}
        """Copies with output that nothing has taken."""

    def __repr__(self) -> str:
        name = self.shadow.id if self.shadow is not None else "off"
        lists = f"{len(self._queue)} queued, {len(self._in_flight)} in flight, {len(self._waiting)} waiting"
        return f"ShadowTraffic({name}, {lists})"

    @property
    def queued(self) -> int:
        """Sampled requests that wait to be copied."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Requests with a running copy."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to pump."""
        return not (self._queue or self._in_flight or self._waiting)

    # Snapshots.

    def take(self, content: Content, now_s: float) -> None:
        """Put `content` in force. A shadow that it lacks ends at once: its copies are cancelled."""
        self._content = content
        wanted = content.shadows[0] if content.shadows else None
        versions = {track.pool: track.model_version for track in content.pools}
        if wanted is not None and self.shadow is not None and wanted.id == self.shadow.id:
            self._versions = versions
            return
        self._stop(now_s)
        self._versions = versions
        if wanted is not None:
            self.shadow = self.last = wanted
            self.tally = ShadowTally(wanted.id, self._boot_id, keeps_tokens=wanted.keeps_tokens)
            self.ledger = TokenLedger(wanted.token_max)
            self._switch = OffSwitch(wanted.expires_ms / 1000)
            self.check(now_s)

    def _stop(self, now_s: float) -> None:
        if self.shadow is None:
            return
        pairs = [*self._queue, *self._in_flight, *self._waiting]
        running = [copy for pair in self._in_flight for copy in pair.copies]
        for pair in pairs:
            pair.release()
            self._drop(STOPPED)
        self.shadow = None
        self._queue.clear()
        self._in_flight.clear()
        self._waiting.clear()
        self._readable.clear()
        for copy in running:
            self.core.leave(copy.request, now_s)
            self._settle(copy)
        self.ledger.close()
        self.on_wake()

    def check(self, now_s: float) -> None:
        """Decide anew whether requests are copied."""
        shadow, content, tally = self.shadow, self._content, self.tally
        if shadow is None or content is None or tally is None:
            return
        stable = content.stable
        delays = [peer.queue_delay_s for peer in self._users.peers.of_pool(stable.pool) if peer.link.is_up]
        tally.off_reason = self._switch.reason(
            now_s,
            self._wall_s(),
            max(delays, default=0.0),
            has_tokenizer=all(
                self._share_tokenizer(stable.model_version, self._versions[pool]) for pool in shadow.pools
            ),
            is_draining=self._users.is_draining,
        )
        tally.ledger_tokens = self.ledger.total
        if tally.off_reason:
            self._drop_queue(tally.off_reason)

    # Users' requests.

    def offer(self, request: LiveRequest, now_s: float) -> None:
        """Consider a user's request that was just submitted. Its copy is sent by a later `pump`."""
        shadow, tally, content = self.shadow, self.tally, self._content
        if shadow is None or tally is None or content is None:
            return
        spec = request.spec
        tenant = spec.caller.tenant.name
        if spec.execution.is_resumed or spec.execution.epoch or spec.pool != content.stable.pool:
            return
        if not shadow.samples(tenant, spec.affinity):
            return
        tally.counts.sampled += 1
        reason = tally.off_reason or (QUEUE_FULL if len(self._queue) >= QUEUE_MAX else "")
        if reason:
            self._drop(reason)
            return
        if spec.logprobs:
            request.output.kept_logprobs = array("d")
        self._queue.append(Pair(request, session_hash(tenant, spec.affinity), now_s))
        if len(self._in_flight) < self.in_flight_max:
            self.on_wake()

    # Copies.

    def on_end(self, request: LiveRequest) -> None:
        """Take the end of a copy. Implements core.Observer."""
        self.on_wake()

    def _on_ready(self, request: LiveRequest) -> None:
        self._readable[request] = None
        self.on_wake()

    def pump(self, now_s: float) -> None:
        """Take the output of copies, settle those that ended, compare, and send the next copies."""
        readable, self._readable = self._readable, {}
        for request in readable:
            if request.output.has_waiting():
                request.output.forget_waiting()
                self.core.deliver(request, request.output.taken, now_s)
        self._settle_ended()
        self._send(now_s)

    def sweep(self, now_s: float) -> None:
        """Decide anew whether requests are copied, compare the pairs with an ended user's request, then `pump`."""
        self.check(now_s)
        self._compare()
        self.pump(now_s)

    def _settle_ended(self) -> None:
        for pair in list(self._in_flight):
            for copy in pair.copies:
                if copy.request.outcome is not None:
                    self._settle(copy)
            if not pair.is_copied:
                continue
            self._in_flight.remove(pair)
            if pair.user.outcome is not None:
                self._compare_pair(pair)
                continue
            self._waiting.append(pair)
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popleft().release()
                self._drop(UNFINISHED)

    def _settle(self, copy: Copy) -> None:
        if not copy.is_settled:
            copy.is_settled = True
            used = min(copy.taken, copy.used_tokens)
            self.ledger.give_back(copy.taken, used)
            self.token_total += used
            if self.tally is not None:
                self.tally.counts.tokens += used

    def _send(self, now_s: float) -> None:
        shadow = self.shadow
        while shadow is not None and self._queue and len(self._in_flight) < self.in_flight_max:
            pair = self._queue[0]
            reason = self._obstacle(pair, shadow, now_s)
            if reason is None:
                return
            self._queue.popleft()
            if reason:
                pair.release()
                self._drop(reason)
                continue
            self._copy(pair, shadow, now_s)

    def _obstacle(self, pair: Pair, shadow: Shadow, now_s: float) -> str | None:
        """Return why `pair` cannot be copied; empty: its tokens are taken. None: it waits for a lease."""
        spec, core = pair.user.spec, self.core
        if now_s - pair.queued_s > QUEUE_S or spec.timing.deadline_s <= now_s:
            return LATE
        if not all(core.peers.can_place(pool, self._versions[pool]) for pool in shadow.pools):
            return NO_ROUTER
        need = copies.needed_tokens(spec, shadow) * len(shadow.pools)
        match self.ledger.take(need, now_s):
            case Grant.TAKEN:
                return ""
            case Grant.WAIT:
                return None
            case Grant.MINUTE:
                return MINUTE
            case Grant.TOO_LARGE:
                return TOO_LARGE
            case Grant.NO_REDIS:
                return NO_LEDGER
            case Grant.CEILING:
                self._switch.on_ceiling()
                if self.tally is not None:
                    self.tally.off_reason = CEILING
                return CEILING

    def _copy(self, pair: Pair, shadow: Shadow, now_s: float) -> None:
        need = copies.needed_tokens(pair.user.spec, shadow)
        untaken = need * len(shadow.pools)
        order = (
            1 if self.copied_total % 2 else -1
        )  # neither pool is always the first, for the comparison of latency
        try:
            for pool in shadow.pools[::order]:
                spec = copies.copied(pair.user.spec, shadow, pool, self._versions[pool], now_s)
                output = copies.output_of(spec, self._detokenizer(spec.model_version))
                if spec.logprobs:
                    output.kept_logprobs = array("d")
                request = self.core.submit(spec, output, lambda: None, now_s)
                untaken -= need
                copy = Copy(request, pool, need, now_s)
                pair.copies.append(copy)
                request.note_token_s = copy.note_token
                request.on_ready = _ready(self._on_ready, request)
        finally:
            self._in_flight.append(pair)
            if untaken:  # a bug in a copy: its tokens count as used
                self.ledger.give_back(untaken, untaken)
            elif self.tally is not None:
                self.copied_total += 1
                self.tally.counts.copied += 1

    # Comparison.

    def _compare(self) -> None:
        for _ in range(len(self._waiting)):
            pair = self._waiting.popleft()
            if pair.user.outcome is None:
                self._waiting.append(pair)
            else:
                self._compare_pair(pair)

    def _compare_pair(self, pair: Pair) -> None:
        try:
            self._count(pair)
        finally:
            pair.release()

    def _count(self, pair: Pair) -> None:
        shadow, tally, content, user = self.shadow, self.tally, self._content, pair.user
        if shadow is None or tally is None or content is None:
            return
        if user.must_reread or user.moves:
            self._drop(MOVED)
            return
        answer = answer_of(user, is_users=True)
        for copy in pair.copies:
            if fault_of(copy.request) in UNPLACED:
                self._drop(REFUSED)
                continue
            is_baseline = copy.pool != shadow.to_pool
            its = answer_of(copy.request, is_users=False)
            compared = compare(answer, its, has_whole_length=shadow.mode is ShadowMode.FULL)
            tally.add(pair.session, compared, answer, its, is_baseline=is_baseline)
            difference = compared.difference(its)
            if difference is not None:
                at_ms = round(1000 * self._wall_s())
                tally.note(difference, user.spec.request_id, copy.pool, answer, its, at_ms)
        of_target = sorted(pair.copies, key=lambda copy: copy.pool != shadow.to_pool)
        times = [copy.latency() for copy in of_target]
        if len(times) == 2 and times[0] is not None and times[1] is not None:  # target and baseline
            tally.add_latency(pair.session, times[0], times[1])

    # Reports.

    def report(self) -> Sequence[pb.ShadowReport]:
        """Return the counts that changed since the last report."""
        return self.tally.report() if self.tally is not None else ()

    def _drop(self, reason: str) -> None:
        self.dropped_totals[reason] += 1
        if self.tally is not None:
            self.tally.drop(reason)

    def _drop_queue(self, reason: str) -> None:
        for pair in self._queue:
            pair.release()
            self._drop(reason)
        self._queue.clear()

    def assert_consistent(self) -> None:
        """Raise AssertionError if a bound or the ledger is broken. For tests, after every event."""
        self.ledger.assert_consistent()
        assert len(self._queue) <= QUEUE_MAX and len(self._waiting) <= WAITING_MAX, self
        held = sum(copy.taken for pair in self._in_flight for copy in pair.copies if not copy.is_settled)
        assert self.ledger.held == held, (self.ledger.held, held)
        if self.shadow is None:
            assert self.is_idle and not self.core.admitted.serving, self


def _ready(note: Callable[[LiveRequest], None], request: LiveRequest) -> Callable[[], None]:
    return lambda: note(request)
