"""The judge: good canaries pass, each fault is found, missing data is never a pass, and a new leader continues."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from bench.rollouts.model import NO_FAULT, Fault, Model
from controlplane.rollouts.judge.events import (
    Ejection,
    Event,
    MemoryReading,
    ReplicaBoot,
)
from controlplane.rollouts.judge.judge import Judge, JudgeState
from controlplane.rollouts.judge.observation import (
    BASELINE,
    CANARY,
    CLIENT,
    STABLE,
    TRACKS,
    Batch,
    FailedAttempt,
    OpenRequest,
    RequestEnd,
    Track,
    TrackCounts,
)
from controlplane.rollouts.judge.settings import MIB, JudgeSettings, Step
from controlplane.rollouts.judge.verdict import GateState, Status, Verdict, VerdictKind

from .samples import START_S, STEP, Rollout, end, failed, gate, waiting

COMPARED = {"errors", "ttft", "gap", "computed_share"}


def test_a_good_canary_passes_every_step() -> None:
    """Through all steps of a rollout, with a baseline up to 25 %; ready for 50 % once the bounds hold."""
    rollout = Rollout(1)
    for index, weight in enumerate((1.0, 5.0, 25.0, 50.0, 100.0)):
        if index:
            rollout.judge.begin_step(Step(index, weight, has_baseline=weight < 50.0), rollout.now_s)
        verdict = rollout.seconds(45)
        assert verdict.kind == VerdictKind.PASS, verdict.reason
        assert verdict.comparison == (
            BASELINE if weight < 50 else STABLE if weight < 100 else verdict.comparison
        )
        assert bool(verdict.needs) == (weight < 50)
        assert verdict.is_ready_for_half
        assert verdict.baked_s == pytest.approx(45.0)
    assert "at 50 % or less" in verdict.comparison


def test_equal_tracks_are_not_rolled_back() -> None:
    """A/A: no false rollback in 30 rollouts of three looks and two steps."""
    for seed in range(30):
        rollout = Rollout(seed)
        for weight in (10.0, 50.0):
            rollout.judge.begin_step(Step(0, weight, has_baseline=weight < 50.0), rollout.now_s)
            assert rollout.seconds(41).kind == VerdictKind.PASS, f"seed={seed}"


@pytest.mark.parametrize(
    ("name", "fault", "seconds"),
    [
        ("errors", Fault(error_share=0.1), 45),
        ("ttft", Fault(ttft_ratio=1.5), 45),
        ("gap", Fault(gap_ratio=1.3), 45),
        ("computed_share", Fault(has_cache=False), 45),
    ],
)
@pytest.mark.parametrize("weight", [10.0, 50.0])
@pytest.mark.parametrize("has_baseline", [True, False])
def test_each_fault_is_found(
    name: str, fault: Fault, seconds: int, weight: float, has_baseline: bool
) -> None:
    """With and without a baseline, before and after 50 %. The verdict has the numbers that decided."""
    rollout = Rollout(3, step=Step(0, weight, has_baseline))
    verdict = rollout.seconds(seconds, fault)
    assert verdict.kind == VerdictKind.FAIL
    assert name in failed(verdict)
    found = gate(verdict, name)
    assert found.p is not None
    assert found.figure is not None
    assert found.bound is not None
    assert found.p < 5e-4
    assert found.figure > found.bound
    assert name in verdict.reason
    assert found.canary_samples >= 50
    assert found.comparison_samples > 0
    assert verdict.is_weaker == (weight < 50 and not has_baseline)


@pytest.mark.parametrize("fault", [Fault(ttft_ratio=2.0), Fault(error_share=0.3)])
def test_a_fault_at_100_percent_is_found_against_stable_before_it(fault: Fault) -> None:
    """The stable track is gone by then; its last 10 minutes are the comparison arm."""
    rollout = Rollout(4, step=Step(0, 50.0))
    assert rollout.seconds(21).kind == VerdictKind.PASS
    rollout.judge.begin_step(Step(1, 100.0), rollout.now_s)
    rollout.tracks = {CANARY: 25}
    verdict = rollout.seconds(20, fault)
    assert verdict.kind == VerdictKind.FAIL
    assert "stable" in verdict.comparison


def test_at_100_percent_the_load_of_stable_before_was_lower() -> None:
    """A TTFT 15 % above that of stable before the step passes there, and fails in a step with stable beside it."""
    slower = Fault(ttft_ratio=1.15)
    rollout = Rollout(5, step=Step(0, 50.0))
    rollout.model = Model(ttft_deviation=0.2)
    rollout.seconds(21)
    rollout.judge.begin_step(Step(1, 100.0), rollout.now_s)
    assert rollout.seconds(21, slower).kind == VerdictKind.PASS
    beside = Rollout(5, step=Step(0, 50.0))
    beside.model = Model(ttft_deviation=0.2)
    assert failed(beside.seconds(41, slower)) == {"ttft"}


def test_stable_before_the_step_is_that_of_ten_minutes() -> None:
    """What stable did earlier than that is no comparison; without any the step is not passed."""
    rollout = Rollout(6, step=Step(0, 50.0))
    rollout.model = Model(ttft_s=5.0)
    rollout.seconds(21)
    rollout.model = Model(ttft_s=0.2)
    rollout.now_s += 900.0
    rollout.seconds(21)
    rollout.judge.begin_step(Step(1, 100.0), rollout.now_s)
    assert failed(rollout.seconds(21, Fault(ttft_ratio=4.0))) == {"ttft"}
    fresh = Rollout(6, step=Step(0, 100.0))
    verdict = fresh.seconds(45)
    assert verdict.kind == VerdictKind.NEEDS_MORE
    assert gate(verdict, "ttft").state == GateState.NEEDS_MORE


def test_absolute_bounds_hold_at_100_percent_alone() -> None:
    """An operator's bounds fail a canary that is like stable."""
    settings = JudgeSettings(ttft_p95_max_s=0.25, error_share_max=0.001)
    rollout = Rollout(7, settings, Step(0, 50.0))
    rollout.model = Model(error_share=0.1)
    assert rollout.seconds(41).kind == VerdictKind.PASS
    rollout.judge.begin_step(Step(1, 100.0), rollout.now_s)
    assert failed(rollout.seconds(21)) == {"ttft_absolute", "errors_absolute"}
    within = Rollout(7, JudgeSettings(ttft_p95_max_s=2.0, error_share_max=0.1), Step(0, 50.0))
    within.seconds(21)
    within.judge.begin_step(Step(1, 100.0), within.now_s)
    assert within.seconds(21).kind == VerdictKind.PASS


def test_a_look_is_made_at_planned_sizes_alone() -> None:
    """At 50, 100, 200, 400, 800, 1,600 canary sessions, once each, however often it is asked."""
    rollout = Rollout(8)
    at = []
    for _ in range(330):
        verdict = rollout.second()
        if verdict.is_look:
            at.append(gate(verdict, "errors").canary_samples)
        assert not rollout.judge.look(rollout.now_s).is_look
    assert at == [50, 100, 200, 400, 800, 1_600]
    assert verdict.looks == 6


def test_many_sessions_at_once_spend_one_look() -> None:
    """500 sessions in one batch are judged once; the next look is at 800."""
    rollout = Rollout(9)
    rollout.tracks = {CANARY: 500, BASELINE: 500, STABLE: 500}
    verdict = rollout.second()
    assert (verdict.looks, verdict.is_look) == (1, True)
    status = rollout.judge.status(rollout.now_s)
    assert (status.next_look_sessions, status.missing_sessions) == (800, 300)


def test_a_step_is_judged_on_its_own_samples() -> None:
    """TTFT x1.5 that begins after 400 good sessions is found by 100 bad ones."""
    rollout = Rollout(10)
    assert rollout.seconds(81).kind == VerdictKind.PASS
    rollout.judge.begin_step(Step(1, 25.0, has_baseline=True), rollout.now_s)
    assert failed(rollout.seconds(21, Fault(ttft_ratio=1.5))) == {"ttft"}


def test_requests_of_the_step_before_do_not_count() -> None:
    """A request that started before the step and ends in it belongs to neither sample."""
    rollout = Rollout(11)
    rollout.judge.begin_step(Step(1, 25.0, has_baseline=True), START_S + 100.0)
    ends = tuple(end(session=f"s{each}", outcome="A", ttft_s=None) for each in range(100))
    rollout.judge.observe(Batch("f", 1, ends), START_S + 101.0)
    status = rollout.judge.status(START_S + 101.0)
    assert [arm.sessions for arm in status.arms] == [0, 0, 0]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_busy_minute_after_the_rise_is_no_fault(is_told: bool) -> None:
    """Stable has most sessions of the low weight. Were they compared, the busy minute would count against the canary."""
    rollout, random = Rollout(35, step=Step(0, 50.0)), Random(2)
    arms: tuple[Track, Track] = (CANARY, STABLE)
    for weight, seconds, median_s in ((10.0, 10, 0.05), (50.0, 25, 0.5)):
        if is_told:
            rollout.judge.weigh(weight, rollout.now_s)
        for _ in range(seconds):
            rows = [
                end(
                    track,
                    f"{track}/{rollout.number}/{each}",
                    started_s=rollout.now_s,
                    ended_s=rollout.now_s + 0.9,
                    ttft_s=median_s * random.lognormvariate(0.0, 0.3),
                )
                for track, share in zip(arms, (weight / 10, 10 - weight / 10), strict=True)
                for each in range(round(share))
            ]
            verdict = rollout.second(ends=tuple(rows))
    assert failed(verdict) == (set() if is_told else {"ttft"})
    assert verdict.looks >= 1


def test_a_rise_begins_samples_anew_and_keeps_time_and_looks() -> None:
    """The same weight again changes nothing."""
    rollout = Rollout(36)
    rollout.judge.weigh(5.0, rollout.now_s)
    rollout.seconds(21)
    rollout.judge.weigh(5.0, rollout.now_s)
    before = rollout.judge.look(rollout.now_s)
    assert before.looks == 2 and before.arms[0].sessions >= 100
    rollout.judge.weigh(10.0, rollout.now_s)
    after = rollout.judge.look(rollout.now_s)
    assert (after.kind, after.looks, after.baked_s) == (VerdictKind.NEEDS_MORE, 2, before.baked_s)
    assert [arm.sessions for arm in after.arms] == [0, 0, 0]
    assert rollout.judge.status(rollout.now_s).next_look_sessions == 50
    assert failed(rollout.seconds(21, Fault(ttft_ratio=1.5))) == {"ttft"}


def test_the_needs_before_half_add_up_over_steps() -> None:
    """Too few sessions in each of three steps, enough in all of them together."""
    rollout = Rollout(12, step=Step(0, 1.0, has_baseline=True))
    rollout.model = Model(error_share=0.0)
    ready = []
    for index in range(4):
        if index:
            rollout.judge.begin_step(Step(index, 5.0 * index, has_baseline=True), rollout.now_s)
        ready.append(rollout.seconds(11).is_ready_for_half)
    assert ready == [False, False, False, True]


def test_an_error_hidden_by_retries_is_found() -> None:
    """Every request ends well, and one in eight needed a second attempt on the canary."""
    rollout = Rollout(13)
    number = 0

    def batch() -> tuple[RequestEnd, ...]:
        nonlocal number
        found = []
        for track in TRACKS:
            for _ in range(8):
                number += 1
                attempts = (FailedAttempt("ENGINE_ERROR", f"{number}", rollout.now_s),)
                is_retried = track == CANARY and number % 8 == 0
                found.append(
                    end(track, f"{number}", started_s=rollout.now_s, ended_s=rollout.now_s + 0.5)
                    if not is_retried
                    else end(
                        track,
                        f"{number}",
                        started_s=rollout.now_s,
                        ended_s=rollout.now_s + 0.5,
                        failed_attempts=attempts,
                    )
                )
        return tuple(found)

    for _ in range(30):
        verdict = rollout.second(ends=batch())
        if verdict.kind == VerdictKind.FAIL:
            break
    assert failed(verdict) == {"errors"}
    assert "ENGINE_ERROR" in verdict.reason


def test_errors_of_clients_are_shown_and_not_judged() -> None:
    """Every canary request is cancelled after its first token."""
    rollout = Rollout(14)
    for _ in range(45):
        started_s = rollout.now_s
        rows = [
            replace(each, outcome=CLIENT)
            if each.track == CANARY and int(each.session.split("/")[2])
            else each
            for track, number in rollout.tracks.items()
            for place in range(number)
            for each in rollout.model.session(
                rollout.random, track, f"{track}/{rollout.number}/{place}", started_s
            )
        ]
        verdict = rollout.second(ends=tuple(rows))
    assert verdict.kind == VerdictKind.PASS
    assert verdict.arms[0].client == 4 * 45


@pytest.mark.parametrize(("computed", "kind"), [(60, VerdictKind.FAIL), (None, VerdictKind.INCONCLUSIVE)])
def test_a_canary_too_slow_for_the_deadlines_of_clients_does_not_pass(
    computed: int | None, kind: VerdictKind
) -> None:
    """No canary request gets a token before its client gives up: no error, no TTFT, but a lower bound.

    Requests that reached no replica count as if their whole prompt were uncached, and here nothing compares with that.
    """
    rollout = Rollout(15)
    for _ in range(11):
        now_s = rollout.now_s
        rows = []
        for each in range(5):
            name = f"{rollout.number}/{each}"
            for track in (BASELINE, STABLE):
                ttft_s = rollout.random.lognormvariate(-2.0, 0.5)
                rows.append(end(track, f"{track}{name}", started_s=now_s, ended_s=now_s + 1.0, ttft_s=ttft_s))
            gave_up = end(CANARY, name, started_s=now_s, ended_s=now_s + 3.0, outcome=CLIENT, ttft_s=None)
            rows.append(replace(gave_up, gap_median_s=None, computed_tokens=computed, output_tokens=0))
        verdict = rollout.second(ends=tuple(rows))
    assert verdict.kind == kind
    assert gate(verdict, "ttft").state.value == kind.value


def test_open_requests_count_as_at_least_their_age() -> None:
    """Half of the canary's sessions wait for their first token, and the others are quick."""
    rollout = Rollout(16)
    for second in range(21):
        old = tuple(
            OpenRequest(CANARY, f"open-{each}", 5.0, False, 0.0, 400, 120, running_requests=4)
            for each in range(5 * (second - 6))
        )
        verdict = rollout.second(open_requests=old)
    assert failed(verdict) == {"ttft"}


@pytest.mark.parametrize(
    ("canary", "others", "kind"),
    [
        (waiting(CANARY, 10, 10.0), (), VerdictKind.FAIL),
        (waiting(CANARY, 9, 60.0), (), VerdictKind.NEEDS_MORE),
        (waiting(CANARY, 10, 9.9), (), VerdictKind.NEEDS_MORE),
        (waiting(CANARY, 10, 10.0) + waiting(CANARY, 191, 1.0), (), VerdictKind.NEEDS_MORE),
        (waiting(CANARY, 10, 10.0) + waiting(CANARY, 190, 1.0), (), VerdictKind.FAIL),
        (waiting(CANARY, 10, 10.0), waiting(STABLE, 10, 12.0), VerdictKind.INCONCLUSIVE),
        (waiting(CANARY, 10, 10.0), waiting(STABLE, 300, 1.0), VerdictKind.FAIL),
        ((), waiting(STABLE, 50, 60.0), VerdictKind.NEEDS_MORE),
        ((OpenRequest(CANARY, "s", 60.0, True, 10.0),) * 10, (), VerdictKind.FAIL),
        ((OpenRequest(CANARY, "s", 60.0, True, 0.1),) * 10, (), VerdictKind.NEEDS_MORE),
    ],
)
def test_a_hang_fails_at_once(
    canary: tuple[OpenRequest, ...], others: tuple[OpenRequest, ...], kind: VerdictKind
) -> None:
    """Ten requests and 5 % of those open, without a token for 10 s; a hang of all tracks is not the canary's."""
    assert Rollout(17).second(open_requests=canary + others).kind == kind


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([ReplicaBoot(CANARY, "r", START_S - 100.0 * each) for each in range(3)], "crash_loop"),
        ([Ejection(CANARY, "r", START_S - 5.0), Ejection(CANARY, "r", START_S - 300.0)], "ejections"),
    ],
)
def test_facts_fail_at_once(events: list[Event], name: str) -> None:
    """Before any look; the verdict stays."""
    rollout = Rollout(18)
    for event in events:
        rollout.judge.note(event)
    verdict = rollout.judge.look(START_S)
    assert (verdict.kind, failed(verdict)) == (VerdictKind.FAIL, {name})
    assert rollout.seconds(30) == verdict
    with pytest.raises(ValueError, match=name):
        rollout.judge.begin_step(Step(1, 25.0), rollout.now_s)


@pytest.mark.parametrize(
    "events",
    [
        [ReplicaBoot(CANARY, "r", START_S), ReplicaBoot(CANARY, "r", START_S - 1.0)],
        [ReplicaBoot(CANARY, f"r{each}", START_S) for each in range(5)],
        [ReplicaBoot(CANARY, "r", START_S + 301.0 * each) for each in range(5)],
        [ReplicaBoot(STABLE, "r", START_S)] * 5,
        [Ejection(CANARY, "r", START_S - 5.0)],
        [
            Ejection(CANARY, "r", START_S - 5.0),
            Ejection(CANARY, "r", START_S - 300.0),
            Ejection(STABLE, "s", START_S - 250.0),
        ],
        [Ejection(CANARY, "r", START_S - 1.0), Ejection(CANARY, "r", START_S - 1.5)],
    ],
)
def test_facts_below_their_bound_do_not_fail(events: list[Event]) -> None:
    """Two boots, boots of several replicas, slow boots, other tracks, ejections of all pools, or just now."""
    rollout = Rollout(19)
    for event in events:
        rollout.judge.note(event)
    assert failed(rollout.judge.look(START_S)) == set()


def growing(
    judge: Judge, track: Any, mib_per_s: float, *, until_s: float = 1e9, role: str = "decode"
) -> None:
    """Read a replica for 2 minutes; it grows until `until_s`."""
    for second in range(0, 120, 5):
        used = round((500 + mib_per_s * min(second, until_s)) * MIB)
        judge.note(MemoryReading(track, f"{track}-{role}", role, used, START_S + second))


@pytest.mark.parametrize(
    ("canary", "until_s", "baseline", "state"),
    [
        (1.0, 1e9, 0.0, GateState.FAIL),
        (1.0, 1e9, 0.4, GateState.FAIL),
        (1.0, 1e9, 0.9, GateState.PASS),  # both grow
        (0.3, 1e9, 0.0, GateState.PASS),  # 36 MiB
        (3.0, 40.0, 0.0, GateState.PASS),  # a cache that is full after 40 s
        (1.0, 1e9, None, GateState.INCONCLUSIVE),
    ],
)
def test_a_leak_is_steady_growth_that_the_baseline_lacks(
    canary: float, until_s: float, baseline: float | None, state: GateState
) -> None:
    """64 MiB, without slowing down, and twice as fast as the other replicas of the role."""
    rollout = Rollout(23)
    growing(rollout.judge, CANARY, canary, until_s=until_s)
    growing(rollout.judge, STABLE, 5.0, role="prefill")
    if baseline is not None:
        growing(rollout.judge, BASELINE, baseline)
    assert gate(rollout.judge.look(START_S + 120.0), "leak").state == state


def test_a_differing_baseline_makes_its_gate_inconclusive() -> None:
    """Baseline and canary are slow beside stable: the canary alone is not to blame, and does not pass."""
    rollout = Rollout(24)
    for _ in range(41):
        rows: list[RequestEnd] = []
        for track, number in rollout.tracks.items():
            model = replace(rollout.model, gap_s=0.02 if track == STABLE else 0.04)
            for each in range(number):
                name = f"{track}/{rollout.number}/{each}"
                rows += model.session(rollout.random, track, name, rollout.now_s)
        verdict = rollout.second(ends=tuple(rows))
    assert verdict.kind == VerdictKind.INCONCLUSIVE
    assert "baseline differs from stable" in gate(verdict, "gap").reason
    assert gate(verdict, "errors").state == GateState.PASS


def test_dropped_observations_are_inconclusive() -> None:
    """More than 1 % of the ends of a track lost their row. Ends that the rollout did not place have no row either."""
    for dropped, kind in ((1, VerdictKind.PASS), (2, VerdictKind.INCONCLUSIVE)):
        rollout = Rollout(25)
        rollout.seconds(11)
        verdict = rollout.second(ends=(), counts=(TrackCounts(CANARY, 100, 100, dropped),))
        assert verdict.kind == kind, verdict.reason
        assert verdict.arms[0].dropped == dropped
    assert "1.3% of the ends on track canary were dropped" in verdict.reason


def test_no_fault_is_found_by_incomplete_observations() -> None:
    """A canary with errors, and 3 % of the ends of stable are missing: the look is inconclusive."""
    rollout = Rollout(25)
    for _ in range(21):
        verdict = rollout.second(Fault(error_share=0.3), counts=(TrackCounts(STABLE, 40, 40, 1),))
    assert verdict.kind == VerdictKind.INCONCLUSIVE
    assert failed(verdict) == set()


def test_silence_is_inconclusive() -> None:
    """No batch of any frontend for 30 s; status names the silent ones."""
    rollout = Rollout(26)
    assert rollout.seconds(11).kind == VerdictKind.PASS
    later_s = rollout.now_s + 31.0
    assert rollout.judge.look(later_s).kind == VerdictKind.INCONCLUSIVE
    status = rollout.judge.status(later_s)
    assert (status.silent_frontends, status.since_observation_s) == (("f",), 31.0)


def test_lost_batches_are_inconclusive() -> None:
    """A gap in the numbers of a frontend."""
    rollout = Rollout(27)
    rollout.seconds(11)
    rollout.number += 3
    assert rollout.second().kind == VerdictKind.INCONCLUSIVE


def test_a_batch_counts_once() -> None:
    """A frontend sends again what was not confirmed."""
    judge = Judge(JudgeSettings())
    judge.begin_step(STEP, START_S)
    batch = Batch("f", 1, (end(),), counts=(TrackCounts(CANARY, 1, 1),))
    judge.observe(batch, START_S + 1.0)
    before = msgspec.json.encode(judge.save(START_S + 1.0))
    judge.observe(batch, START_S + 1.0)
    assert msgspec.json.encode(judge.save(START_S + 1.0)) == before
    assert judge.confirmed() == {"f": 1}


@pytest.mark.parametrize("missing", [CANARY, BASELINE])
def test_a_missing_arm_is_never_a_pass(missing: str) -> None:
    """Neither a canary without requests nor a baseline without."""
    rollout = Rollout(28)
    rollout.tracks = {track: number for track, number in rollout.tracks.items() if track != missing}
    assert rollout.seconds(45).kind == VerdictKind.NEEDS_MORE


def test_no_observations_are_never_a_pass() -> None:
    """Before the first batch, and without a step."""
    judge = Judge(JudgeSettings())
    with pytest.raises(ValueError, match="no step"):
        judge.look(START_S)
    judge.begin_step(STEP, START_S)
    assert judge.look(START_S + 1_000.0).kind == VerdictKind.NEEDS_MORE


def test_arms_without_a_common_stratum_are_inconclusive() -> None:
    """The canary computes whole prompts, the baseline a few tokens of them: no TTFT is comparable."""
    rollout = Rollout(29)
    for _ in range(11):
        rows = [
            end(
                track,
                f"{track}/{rollout.number}/{each}",
                started_s=rollout.now_s,
                ended_s=rollout.now_s + 0.5,
                prompt_tokens=2_000,
                computed_tokens=1_000 if track == CANARY else 100,
            )
            for track in TRACKS
            for each in range(5)
        ]
        verdict = rollout.second(ends=tuple(rows))
    assert gate(verdict, "ttft").state == GateState.INCONCLUSIVE
    assert "share a stratum" in gate(verdict, "ttft").reason


def test_requests_of_a_single_token_need_no_gap() -> None:
    """Where no track has a gap, the gate does not apply; where only the canary lacks it, data is missing."""
    for lacking, kind in ((TRACKS, VerdictKind.PASS), ((CANARY,), VerdictKind.NEEDS_MORE)):
        rollout = Rollout(30)
        for _ in range(11):
            rows = [
                replace(row, gap_median_s=None, output_tokens=1) if track in lacking else row
                for track, number in rollout.tracks.items()
                for each in range(number)
                for row in rollout.model.session(
                    rollout.random, track, f"{track}/{rollout.number}/{each}", rollout.now_s
                )
            ]
            verdict = rollout.second(ends=tuple(rows))
        assert verdict.kind == kind, verdict.reason


def test_moved_sessions_are_cold_and_no_fault() -> None:
    """Against stable the first request of a session does not count in the computed share; later ones do."""
    for computed_later, kind in ((100, VerdictKind.PASS), (400, VerdictKind.FAIL)):
        rollout = Rollout(31, step=Step(0, 50.0))
        random = Random(1)
        for _ in range(21):
            rows = []
            for track in (CANARY, STABLE):
                for each in range(5):
                    for turn in range(3):
                        computed = 100
                        if track == CANARY:
                            computed = 400 if turn == 0 else computed_later
                        rows.append(
                            end(
                                track,
                                f"{track}/{rollout.number}/{each}",
                                started_s=rollout.now_s + turn / 10,
                                ended_s=rollout.now_s + 0.9,
                                ttft_s=random.lognormvariate(-2.0, 0.3),
                                prompt_tokens=400,
                                computed_tokens=computed,
                            )
                        )
            verdict = rollout.second(ends=tuple(rows))
        assert ("computed_share" in failed(verdict)) == (kind == VerdictKind.FAIL), computed_later


@pytest.mark.parametrize("seed", range(6))
def test_a_new_leader_continues_as_the_old_one_would(seed: int) -> None:
    """Through JSON at a random second of a random rollout: the same verdicts, looks and status ever after."""
    random = Random(seed)
    fault = random.choice([NO_FAULT, Fault(ttft_ratio=1.3), Fault(error_share=0.03)])
    rollout, kept = Rollout(seed, JudgeSettings(sessions_max=100)), random.randrange(5, 90)
    other: Judge | None = None
    for second in range(120):
        if second in (30, 60, 90) and rollout.judge.look(rollout.now_s).kind != VerdictKind.FAIL:
            step = Step(second // 30, (0, 25.0, 50.0, 100.0)[second // 30], has_baseline=second < 60)
            for judge in filter(None, (rollout.judge, other)):
                judge.begin_step(step, rollout.now_s)
        if second == kept:
            document = msgspec.json.encode(rollout.judge.save(rollout.now_s))
            state = msgspec.json.decode(document, type=JudgeState)
            other = Judge(JudgeSettings(sessions_max=100), state, now_s=rollout.now_s)
            assert msgspec.json.encode(other.save(rollout.now_s)) == document
        if other is None:
            rollout.second(fault)
            continue
        first = rollout.judge
        rollout.judge = _Both(first, other)  # type: ignore[assignment]
        verdict = rollout.second(fault)
        rollout.judge = first
        assert other.look(rollout.now_s) == first.look(rollout.now_s), f"seed={seed}"
        assert other.status(rollout.now_s) == first.status(rollout.now_s)
        assert verdict.kind in set(VerdictKind)


class _Both:
    """Gives two judges the same observations, and compares their verdicts."""

    def __init__(self, first: Judge, second: Judge) -> None:
        self._first, self._second = first, second

    def observe(self, batch: Batch, now_s: float) -> None:
        self._first.observe(batch, now_s)
        self._second.observe(batch, now_s)

    def look(self, now_s: float) -> Verdict:
        verdict = self._first.look(now_s)
        assert self._second.look(now_s) == verdict
        return verdict


def test_the_time_between_two_leaders_is_not_baked() -> None:
    """Seconds baked stand in the document."""
    rollout = Rollout(32)
    rollout.seconds(10)
    document = msgspec.json.encode(rollout.judge.save(rollout.now_s))
    state = msgspec.json.decode(document, type=JudgeState)
    later = Judge(JudgeSettings(), state, now_s=rollout.now_s + 100.0)
    assert later.save(rollout.now_s + 105.0).baked_s == pytest.approx(15.0)


def test_verdict_and_status_go_through_json() -> None:
    """The history keeps every number that decided."""
    rollout = Rollout(33)
    verdict = rollout.seconds(45, Fault(ttft_ratio=2.0))
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
    status = rollout.judge.status(rollout.now_s)
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    assert status.verdict == verdict
    assert {each.gate for each in status.verdict.gates} >= COMPARED


def test_status_spends_no_look() -> None:
    """However often an operator watches."""
    rollout = Rollout(34)
    rollout.seconds(9)
    rollout.number += 1
    ends = tuple(
        end(session=f"x{each}", started_s=rollout.now_s, ended_s=rollout.now_s + 1) for each in range(50)
    )
    rollout.judge.observe(Batch("f", rollout.number, ends), rollout.now_s)
    before = msgspec.json.encode(rollout.judge.save(rollout.now_s))
    status = rollout.judge.status(rollout.now_s)
    assert status.missing_sessions == 0
    assert msgspec.json.encode(rollout.judge.save(rollout.now_s)) == before
