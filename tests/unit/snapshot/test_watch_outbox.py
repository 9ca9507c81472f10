"""The outbox of a stream to the leader: one place per kind, reports on change and as the heartbeat."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from controlplane.rollouts.view import HEARD_S
from controlplane.watch import SILENCE_S
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.published import Term
from kvmesh.snapshot.watch_outbox import KEEPALIVE_S, REASON_CHARACTERS_MAX, REPORT_S, WatchOutbox


def name(version: int) -> pb.SnapshotName:
    """Return a name of term 1."""
    return pb.SnapshotName(term=pb.Term(number=1, leader="c"), version=version)


class Source:
    """The state of a process, and how often it was asked for."""

    def __init__(self) -> None:
        self.is_observed = False
        self.live = self.memory_bytes = 0
        self.waiting: list[pb.ObservationBatch] = []
        self.counts: list[shadow_pb2.ShadowReport] = []
        self.asked = 0

    def report(self) -> pb.ReceiverReport:
        """Return the state."""
        self.asked += 1
        return pb.ReceiverReport(live_request_count=self.live, engine_memory_bytes=self.memory_bytes)

    def observations(self) -> pb.ObservationBatch | None:
        """Return the next batch."""
        return self.waiting.pop(0) if self.waiting else None

    def shadows(self) -> list[shadow_pb2.ShadowReport]:
        """Return the changed counts of shadow traffic."""
        counts, self.counts = self.counts, []
        return counts


def test_hello_comes_first_and_only_a_leader_gets_reports() -> None:
    """A process that does not lead gets the introduction and nothing else."""
    outbox, source = WatchOutbox(pb.ReceiverHello(process_id="p")), Source()
    first = outbox.take(0.0, source)
    assert first is not None and first.hello.process_id == "p" and not first.HasField("report")
    assert outbox.take(100.0, source) is None and outbox.next_s() == float("inf")
    outbox.is_leader = True
    later = outbox.take(100.0, source)
    assert later is not None and not later.HasField("hello") and later.HasField("report")


def test_a_leader_that_does_not_read_costs_no_memory() -> None:
    """The outbox keeps the last answer of each kind, and cuts long reasons."""
    outbox, source = WatchOutbox(pb.ReceiverHello()), Source()
    for version in range(1, 10_000):
        outbox.apply(name(version))
        outbox.reject(name(version + 1), "x" * 10_000, Term(version, "d"))
    message = outbox.take(0.0, source)
    assert message is not None
    assert message.applied == name(9_999) and message.rejected.name == name(10_000)
    assert len(message.rejected.reason) == REASON_CHARACTERS_MAX
    assert message.rejected.highest_term == pb.Term(number=9_999, leader="d")
    assert outbox.take(0.0, source) is None


def test_a_live_receiver_is_heard_long_before_the_leader_misses_it() -> None:
    """Two reports in a row may be lost, at a leader of this release and of the last commit."""
    longest_s = KEEPALIVE_S + REPORT_S
    assert 2 * longest_s <= SILENCE_S and 2 * longest_s <= HEARD_S


def test_reports_come_on_change_and_as_a_keepalive() -> None:
    """Under any schedule: a change or observations within a second, each look during a rollout, else one in four seconds.

    The memory of the engine alone is no change. Nothing is sent twice in a second, and the last report is never older.
    """
    chance, outbox, source = random.Random(11), WatchOutbox(pb.ReceiverHello()), Source()
    outbox.is_leader = True
    now_s = reported_s = looked_s = float("-inf")
    told, asked, kinds = -1, 0, Counter[str]()
    now_s = 0.0
    for _ in range(6_000):
        now_s += chance.choice((0.0, 0.01, 0.3))
        source.memory_bytes += 1
        if chance.random() < 0.02:
            source.live += 1
        if chance.random() < 0.02:
            source.waiting.append(pb.ObservationBatch(sequence=1))
        if chance.random() < 0.01:
            source.is_observed = not source.is_observed
        if chance.random() < 0.05:
            outbox.apply(name(chance.randint(1, 9)))
        due_s, has_batch = outbox.next_s(), bool(source.waiting)
        message = outbox.take(now_s, source)
        has_report = message is not None and message.HasField("report")
        if now_s < due_s:
            assert message is None
            continue
        if source.asked == asked:
            assert message is not None and message.HasField("applied") and not has_report
            continue
        assert source.asked == asked + 1 and now_s - looked_s >= REPORT_S
        asked, looked_s = source.asked, now_s
        is_late = now_s - reported_s >= KEEPALIVE_S
        assert has_report == (has_batch or source.live != told or source.is_observed or is_late)
        kinds["sent" if has_report else "kept"] += 1
        if message is not None and has_report:
            assert message.HasField("observations") == has_batch
            assert message.report == pb.ReceiverReport(
                live_request_count=source.live, engine_memory_bytes=source.memory_bytes
            )
            reported_s, told = now_s, source.live
        assert now_s - reported_s < KEEPALIVE_S + REPORT_S
    assert min(kinds["sent"], kinds["kept"]) > 50


def test_a_change_of_a_life_is_reported_at_once_and_a_held_replica_each_second() -> None:
    """The age of a state alone is reported only while the replica is held."""
    outbox, source = WatchOutbox(pb.ReceiverHello()), LifeSource()
    outbox.report_now()
    assert outbox.take(0.0, source) is not None
    assert outbox.next_s() == float("inf"), "no leader, no report"
    outbox.is_leader = True
    sent = []
    for tick in range(200):  # 20 s
        now_s = tick / 10
        source.life.age_ms = tick * 100
        if tick == 105:
            source.life.state = pb.REPLICA_STATE_SERVING
            outbox.report_now()
            assert outbox.next_s() <= now_s
        if (message := outbox.take(now_s, source)) is not None:
            sent.append((tick, message.report.life.state))
    held = [tick for tick, state in sent if state == pb.REPLICA_STATE_WARMING]
    assert held == [*range(0, 105, 10)]
    served = [tick for tick, state in sent if state == pb.REPLICA_STATE_SERVING]
    assert served[0] == 105 and all(b - a >= 10 * KEEPALIVE_S for a, b in pairwise(served))


class LifeSource(Source):
    """The state of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.life = pb.ReplicaLife(state=pb.REPLICA_STATE_WARMING)

    def report(self) -> pb.ReceiverReport:
        """Return the state, with its life."""
        return pb.ReceiverReport(life=self.life)


def test_changed_counts_of_shadow_traffic_are_sent_at_the_next_look() -> None:
    """Counts are no heartbeat: unchanged ones are not sent again."""
    outbox, source = WatchOutbox(pb.ReceiverHello()), Source()
    outbox.is_leader = True
    assert outbox.take(0.0, source) is not None
    source.counts = [shadow_pb2.ShadowReport(shadow="s", sequence=1)]
    assert outbox.take(REPORT_S / 2, source) is None
    message = outbox.take(REPORT_S, source)
    assert message is not None and [each.sequence for each in message.shadows] == [1]
    assert outbox.take(2 * REPORT_S, source) is None
