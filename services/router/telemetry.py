"""Metrics and spans of the router: counted at the end of attempts, or read from the core at a scrape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock, wall_ns
from kvmesh.metrics import Counter, Metrics
from kvmesh.telemetry import Tracing, parse_traceparent
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.region_load import RegionLoad
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.hot.release_recorder import ReleaseRecorder
from services.router.index.index_reader import IndexReader
from services.router.placement.backlog import UTILISATION_S
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import Placement
from services.router.queue.queue_item import PRIORITY_CLASS_MAX
from services.router.regions.callers import Callers
from services.router.regions.guests import Guest
from services.router.regions.home import Home

ADMISSION_REASONS: Final = (
    pb.Refusal.REASON_QUEUE_FULL,
    pb.Refusal.REASON_DRAINING,
    pb.Refusal.REASON_DEADLINE,
    pb.Refusal.REASON_STALE_SNAPSHOT,
    pb.Refusal.REASON_INVALID,
    pb.Refusal.REASON_NO_REPLICA,
    pb.Refusal.REASON_GRANT,
)

SPREAD_PROMPTS: Final = 3
"""Mean work per replica, in typical prompts, from which on the imbalance is computed."""

NO_ERROR = frozenset(
    ("REASON_END_TOKEN", "REASON_LENGTH", "REASON_ADOPTED", "REASON_SUPERSEDED", "cancelled")
)
"""Outcomes that a span does not report as errors."""


class ForwardingTelemetry:
    """Counts attempts that ended and records their spans. A Record (services.router.forwarding.attempt_table)."""

    def __init__(self, metrics: Metrics, tracing: Tracing, block_tokens: int) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._block_tokens = block_tokens
        self._queue = metrics.histogram("queue_seconds", "Time of attempts in the router's queue.")
        self._first = metrics.histogram(
            "first_token_seconds", "Time from the release to replicas to the first token."
        )
        self._placements = {
            kind: metrics.counter("placements", "Attempts placed on replicas, by kind.", kind=kind)
            for kind in ("prefill", "local", "takeover")
        }
        self._rescheduled = metrics.counter(
            "rescheduled_requests", "Placements after the first one of an attempt."
        )
        self._prompt = metrics.counter("prompt_tokens", "Prompt tokens of prompts that were computed.")
        self._cached = metrics.counter(
            "cached_tokens", "Prompt tokens of the same attempts that were found in the prefix cache."
        )
        self._expected = metrics.counter(
            "expected_cached_tokens",
            "Prompt tokens of the same attempts that the router expected in the prefix cache.",
        )
        self._matched = metrics.counter(
            "matched_blocks", "KV blocks that placements expected in the prefix cache."
        )
        self._late = metrics.histogram(
            "first_token_late_seconds", "Lateness of first tokens against the estimate at the release."
        )
        self._early = metrics.histogram(
            "first_token_early_seconds", "Earliness of first tokens against the estimate at the release."
        )
        self._placed_seconds: dict[str, Counter] = {}
        self._wrong_hits: dict[str, Counter] = {}
        self._ended: dict[str, Counter] = {}
        self._control: dict[tuple[str, str], Counter] = {}

    def set_replicas(self, names: Iterable[str]) -> None:
        """Count the work of these replicas alone. The series of others are dropped: cardinality stays bounded."""
        wanted = set(names)
        for name in self._placed_seconds.keys() - wanted:
            del self._placed_seconds[name], self._wrong_hits[name]
            self._metrics.forget("placed_seconds", replica=name)
            self._metrics.forget("wrong_hit_tokens", replica=name)
        for name in sorted(wanted - self._placed_seconds.keys()):
            self._placed_seconds[name] = self._metrics.counter(
                "placed_seconds",
                "Estimated prefill seconds of the prompts that a replica computed.",
                replica=name,
            )
            self._wrong_hits[name] = self._metrics.counter(
                "wrong_hit_tokens",
                "Wrong hits: prompt tokens expected in the prefix cache of a replica that its engine did not find.",
                replica=name,
            )

    def __call__(self, attempt: Attempt, outcome: str, now_s: float) -> None:
        """Count an attempt that ended, and record its span if its trace is sampled.

        Attempts that no user waits for have a counter of their own.
        """
        if attempt.submitted.purpose:
            self._count_control_call(attempt.submitted.purpose, outcome)
            return
        ended = self._ended.get(outcome)
        if ended is None:
            ended = self._ended[outcome] = self._metrics.counter(
                "forwarded_requests", "Attempts that ended, by outcome.", outcome=outcome
            )
        ended.value += 1
        submitted, routing, first_s = attempt.submitted, attempt.routing, attempt.outcome.first_token_s
        self._rescheduled.value += routing.reschedule_count
        placement = routing.placement
        if submitted.is_takeover:
            self._placements["takeover"].value += 1
        elif placement is not None:
            self._placements["local" if placement.prefill is None else "prefill"].value += 1
            self._matched.value += placement.matched_blocks
            self._queue.observe(routing.released_s - submitted.arrived_s)
            if first_s:
                self._first.observe(first_s - routing.released_s)
                self._prompt.value += submitted.token_count
                self._cached.value += attempt.outcome.cached_tokens
                matched = placement.matched_blocks * self._block_tokens
                expected = min(matched, submitted.token_count - 1)
                self._expected.value += expected
                late_s = first_s - routing.released_s - placement.estimate_s
                (self._late if late_s >= 0 else self._early).observe(abs(late_s))
                self._count_at_replica(placement, max(0, expected - attempt.outcome.cached_tokens))
        if submitted.traceparent:
            self._record_span(attempt, outcome, now_s)

    def ended(self, outcome: str) -> int:
        """Return the attempts that ended with `outcome`, shadow traffic included."""
        counter = self._ended.get(outcome)
        return round(counter.value) if counter is not None else 0

    def _count_control_call(self, purpose: str, outcome: str) -> None:
        counter = self._control.get((purpose, outcome))
        if counter is None:
            about = "Attempts that no user waits for, by purpose and outcome."
            counter = self._metrics.counter("control_calls", about, purpose=purpose, outcome=outcome)
            self._control[purpose, outcome] = counter
        counter.value += 1

    def _count_at_replica(self, placement: Placement, wrong_hit_tokens: int) -> None:
        name = placement.prefill or placement.decode
        if name in self._placed_seconds:
            self._placed_seconds[name].value += placement.prefill_s
            self._wrong_hits[name].value += wrong_hit_tokens

    def _record_span(self, attempt: Attempt, outcome: str, now_s: float) -> None:
        parent = parse_traceparent(attempt.submitted.traceparent)
        if parent is None or not parent.sampled:
            return
        submitted, placement, first_s = (
            attempt.submitted,
            attempt.routing.placement,
            attempt.outcome.first_token_s,
        )
        end_ns, arrived_s, released_s = wall_ns(), submitted.arrived_s, attempt.routing.released_s
        self._tracing.record_span(
            "route",
            self._tracing.child(parent),
            end_ns - round((now_s - arrived_s) * 1e9),
            end_ns,
            {
                "request_id": submitted.request_id,
                "attempt": submitted.attempt,
                "prefill_replica": (placement.prefill or "") if placement is not None else "",
                "decode_replica": placement.decode if placement is not None else "",
                "matched_blocks": placement.matched_blocks if placement is not None else 0,
                "estimate_s": placement.estimate_s if placement is not None else 0.0,
                "queue_s": (released_s or now_s) - arrived_s,
                "first_token_s": first_s - arrived_s if first_s else 0.0,
                "cached_tokens": attempt.outcome.cached_tokens,
                "tokens": attempt.next_position - submitted.start_position,
                "outcome": outcome,
            },
            parent_span_id=parent.span_id,
            error="" if outcome in NO_ERROR else outcome,
        )


def export(
    core: ForwardingCore,
    policy: CostPolicy,
    index: IndexReader,
    dispatches: DispatchGossip,
    metrics: Metrics,
    clock: Clock,
) -> None:
    """Export the state of the core, read at each scrape."""
    attempts, local_index = core.attempts, policy.local_index
    metrics.gauge("queued_requests", "Attempts that wait in the queue.", lambda: len(core.queue))
    export_queue(core, metrics)
    export_gossip(dispatches, policy, metrics)
    metrics.gauge(
        "imbalance",
        "Work recently dispatched to the busiest prefill replica, over the mean of all; 0 while there is too little.",
        lambda: imbalance(core, policy, clock.now_s()),
    )
    metrics.gauge("live_requests", "Attempts that are placed and have not ended.", lambda: core.placed_count)
    metrics.gauge(
        "detached_requests",
        "Attempts without a frontend's stream: a takeover may follow.",
        lambda: attempts.detached_count,
    )
    metrics.gauge("index_blocks", "Distinct KV blocks in the local index.", lambda: local_index.block_count)
    metrics.total(
        "evicted_blocks",
        "KV blocks evicted from the local index at its bound.",
        lambda: local_index.evicted_block_total,
    )
    metrics.gauge(
        "in_flight_blocks",
        "KV blocks of prompts in flight, expected in the index soon.",
        lambda: local_index.in_flight_block_count,
    )
    metrics.total(
        "repaired_blocks",
        "Index entries that measured hits corrected.",
        lambda: local_index.repaired_block_total,
    )
    metrics.total("index_reloads", "Index snapshots loaded from Redis.", lambda: index.reload_total)
    metrics.total(
        "unreadable_entries", "Index entries that could not be parsed.", lambda: index.unreadable_total
    )
    metrics.total(
        "estimated_seconds", "Estimated prefill seconds of computed prompts.", lambda: policy.estimate_total_s
    )
    metrics.total(
        "measured_seconds", "Measured prefill seconds of the same prompts.", lambda: policy.measured_total_s
    )
    metrics.gauge(
        "backlog_requests", "Dispatched prompts that are not computed yet.", lambda: len(policy.backlog)
    )
    metrics.total("ejections", "Outlier ejections of replicas.", lambda: core.ejection_total)
    metrics.total(
        "contradictions",
        "Verdicts of replicas that a second replica contradicted, as reported by frontends.",
        lambda: core.contradiction_total,
    )
    metrics.gauge(
        "ejected_replicas",
        "Replicas in outlier ejection: they get no new requests.",
        lambda: sum(replica.ejection.is_ejected for replica in core.replicas.values()),
    )
    metrics.gauge(
        "placeable_replicas",
        "Replicas that may get new requests, ejected ones included.",
        lambda: sum(replica.is_placeable() for replica in core.replicas.values()),
    )


def imbalance(core: ForwardingCore, policy: CostPolicy, now_s: float) -> float:
    """Return the most work that a prefill replica was recently sent by all routers, over the mean of all replicas.

    0 while the mean is below SPREAD_PROMPTS typical prompts, and below half of what a replica can do in UTILISATION_S.
    """
    names = [one.name for one in core.replicas.values() if one.role == "prefill" and one.is_placeable()]
    work_s = [policy.backlog.recent_s(name, now_s) for name in names]
    total_s = sum(work_s)
    enough_s = len(work_s) * min(SPREAD_PROMPTS * policy.prefills.typical_s, UTILISATION_S / 2)
    return max(work_s) * len(work_s) / total_s if 0 < enough_s <= total_s else 0.0


def export_gossip(dispatches: DispatchGossip, policy: CostPolicy, metrics: Metrics) -> None:
    """Export the gossip among routers, and its losses."""
    peer_routers, exchange = dispatches.peer_routers, dispatches.exchange
    metrics.gauge("peer_routers", "Other routers that hold a lease.", lambda: len(peer_routers))
    metrics.gauge(
        "silent_peer_routers",
        "Peer routers without gossip messages: the failure detector counts them as silent.",
        lambda: peer_routers.silent_count,
    )
    metrics.gauge(
        "open_dispatches",
        "Own dispatched prompts that are not computed yet, as peer routers are told.",
        lambda: len(exchange.open),
    )
    metrics.total(
        "gossip_messages_dropped",
        "Gossip messages dropped because Redis is unavailable.",
        lambda: exchange.dropped_total,
    )
    metrics.total(
        "gossip_messages_missed",
        "Gossip messages of peer routers that were lost.",
        lambda: peer_routers.gap_total,
    )
    metrics.total(
        "gossip_messages_unreadable",
        "Gossip messages of peer routers that could not be parsed.",
        lambda: dispatches.unreadable_total,
    )
    metrics.total(
        "repaired_dispatches",
        "Dispatches, starts and finishes of peer routers that anti-entropy digests repaired.",
        lambda: peer_routers.repaired_total,
    )
    metrics.total(
        "refuted_dispatches",
        "Dispatches of peer routers that load reports refuted.",
        lambda: policy.reconciliation.refuted_total,
    )


def export_hot(recorder: ReleaseRecorder, metrics: Metrics) -> None:
    """Export the size of the record of hot prompts."""
    prompts = recorder.prompts
    metrics.gauge("hot_prompts", "Prompts of users in the record of hot prompts.", lambda: len(prompts))
    metrics.gauge("hot_prompt_bytes", "Bytes of the record of hot prompts.", lambda: prompts.byte_count)


def export_regions(callers: Callers, load: RegionLoad, metrics: Metrics, clock: Clock) -> None:
    """Export the guests of the router, by home region."""

    def guest_tokens_per_s(home: Home) -> float:
        load.sample(clock.now_s())
        return load.load(home).tokens_per_s

    for guest in (*callers.guests.values(), callers.unknown):
        region = guest.home.name
        metrics.gauge(
            "guest_tokens_per_second",
            "Uncached prompt tokens per second of callers of another region.",
            partial(guest_tokens_per_s, guest.home),
            region=region,
        )
        metrics.gauge(
            "grant_tokens_per_second",
            "Tokens per second that this router grants to callers of another region.",
            partial(_granted, guest, clock, "tokens_per_s"),
            region=region,
        )
        metrics.gauge(
            "grant_blocks",
            "KV blocks that this router grants to callers of another region.",
            partial(_granted, guest, clock, "blocks"),
            region=region,
        )
        metrics.gauge(
            "guest_blocks",
            "KV blocks that attempts of another region hold of its grant.",
            partial(getattr, guest.bucket, "blocks_used"),
            region=region,
        )
        metrics.total(
            "refused_guests",
            "Attempts of another region refused for lack of a grant.",
            partial(getattr, guest, "refused_total"),
            region=region,
        )


def _granted(guest: Guest, clock: Clock, dimension: str) -> float:
    return float(getattr(guest.grant(clock.now_s()), dimension))


def export_queue(core: ForwardingCore, metrics: Metrics) -> None:
    """Export the queue, releases, evictions and refusals."""
    queue, admission = core.queue, core.admission
    metrics.gauge("queued_tokens", "Prompt tokens of the attempts in the queue.", lambda: queue.tokens)
    metrics.gauge(
        "queued_uncached_tokens",
        "Estimated uncached prompt tokens of the attempts in the queue.",
        lambda: queue.work,
    )
    metrics.gauge(
        "queue_delay_seconds",
        "Estimated wait of a default-class request of a tenant with an empty queue.",
        lambda: core.queue_delay_us() / 1e6,
    )
    metrics.total(
        "evicted_requests",
        "Attempts evicted from the queue by more important ones.",
        lambda: queue.evicted_total,
    )
    for priority_class in range(PRIORITY_CLASS_MAX + 1):
        metrics.total(
            "released_requests",
            "Attempts released to replicas, by priority class.",
            partial(queue.released_totals.__getitem__, priority_class),
            priority_class=str(priority_class),
        )
    for reason in ADMISSION_REASONS:
        metrics.total(
            "refused_requests",
            "Attempts refused at admission, by reason.",
            partial(admission.refusals.__getitem__, reason),
            reason=name_of(pb.Refusal.Reason, reason),
        )
