"""The judge lets a good run pass and sees every kind of violation: each is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.cells import FAULTS, PARTS
from tests.chaos.judge import DRAIN_S, LIMITS
from tests.chaos.records import CANCELLED, COMPLETE, FAILED, STUCK, Budget, Placing, Process, Seen
from tests.unit.chaos.runs import Judged, good_run


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_good_run_has_no_violation(part: str, fault: str) -> None:
    """A stream that ended as its client wanted, exactly and in time, is no violation in any cell."""
    for seed in (1, 2):
        assert good_run(part, fault, seed).violations() == []


def wrong_token(run: Judged) -> None:
    run.complete().ids[7] ^= 1


def repeated_token(run: Judged) -> None:
    one = run.complete()
    one.ids.insert(5, one.ids[4])


def missing_token(run: Judged) -> None:
    del run.complete().ids[5]


def short_answer(run: Judged) -> None:
    del run.complete().ids[-1]


def long_answer(run: Judged) -> None:
    run.complete().ids.append(17)


def wrong_token_before_a_cancel(run: Judged) -> None:
    next(one for one in run.seen.values() if one.end == CANCELLED and one.ids).ids[0] ^= 1


def broken_rule(run: Judged) -> None:
    run.complete().broken_rules.append("started twice")


def never_seen(run: Judged) -> None:
    del run.seen[run.complete().number]


def stuck(run: Judged) -> None:
    run.complete().end = STUCK


def lost(run: Judged) -> None:
    one = run.complete()
    one.end, one.code, one.reason = FAILED, "UNAVAILABLE", "ATTEMPTS_EXHAUSTED"


def refused(run: Judged) -> None:
    one = run.complete()
    one.end, one.code, one.reason, one.ids = FAILED, "RESOURCE_EXHAUSTED", "QUEUE_FULL", []


def cancelled_by_nobody(run: Judged) -> None:
    run.complete().end = CANCELLED


def deadline_of_nobody(run: Judged) -> None:
    one = run.complete()
    one.end, one.code, one.reason = FAILED, "DEADLINE_EXCEEDED", "DEADLINE"


def early_deadline(run: Judged) -> None:
    one = next(one for one in run.seen.values() if one.code == "DEADLINE_EXCEEDED")
    one.ended_s -= 0.2
    one.came_s = [at_s for at_s in one.came_s if at_s <= one.ended_s]


def late_deadline(run: Judged) -> None:
    next(one for one in run.seen.values() if one.code == "DEADLINE_EXCEEDED").ended_s += 3.0


def silence(run: Judged) -> None:
    one = run.complete()
    one.came_s = [at_s if index < 5 else at_s + LIMITS.silent_s for index, at_s in enumerate(one.came_s)]
    one.ended_s += LIMITS.silent_s


def held_blocks(run: Judged) -> None:
    run.after = replace(run.after, held={"decode-0 blocks reserved": 3})


def spoilt(run: Judged, name: str, **changes: object) -> None:
    """Replace fields of one process as it is after the run."""
    processes: dict[str, Process] = dict(run.after.processes)
    processes[name] = replace(processes[name], **changes)  # type: ignore[arg-type]
    run.after = replace(run.after, processes=processes)


def held_tasks(run: Judged) -> None:
    spoilt(run, "router-0", tasks=20 + LIMITS.tasks + 1)


def held_fds(run: Judged) -> None:
    spoilt(run, "frontend-0", fds=30 + LIMITS.fds + 1)


def held_memory(run: Judged) -> None:
    spoilt(run, "prefill-0", resident_bytes=(100 << 20) + LIMITS.resident_bytes + 1)


def lasting_key(run: Judged) -> None:
    run.after = replace(run.after, keys_for_good=[*run.after.keys_for_good, "kvmesh:exec:1234"])


def restarted(run: Judged) -> None:
    spoilt(run, "prefill-0-engine", life="another one")


def not_serving(run: Judged) -> None:
    spoilt(run, "redis", is_serving=False)


def gone(run: Judged) -> None:
    processes = dict(run.after.processes)
    del processes["decode-0"]
    run.after = replace(run.after, processes=processes)


def too_many_retries(run: Judged) -> None:
    # 30 s x 3/s + 40 + 10 % of 20 requests
    run.after = replace(run.after, budgets={"frontend-0": Budget(120, 3 + 133)})


def too_many_retries_of_a_new_process(run: Judged) -> None:
    run.after = replace(run.after, budgets={"frontend-0": Budget(20, 133)})


def too_many_free_retries(run: Judged) -> None:
    # 20 + one for each of 40 requests, paid from the budget or not
    run.after = replace(run.after, budgets={"frontend-0": Budget(140, 3, 5 + 61)})


def too_many_placements(run: Judged) -> None:
    # each of 24 prompts was handed to three more
    run.after = replace(run.after, placings={"router-0": Placing(124, 72)})


def not_readmitted(run: Judged) -> None:
    run.moments = replace(run.moments, served_s=None)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("TOKENS", wrong_token),
        ("TOKENS", repeated_token),
        ("TOKENS", missing_token),
        ("TOKENS", short_answer),
        ("TOKENS", long_answer),
        ("TOKENS", wrong_token_before_a_cancel),
        ("RULE", broken_rule),
        ("HANG", never_seen),
        ("HANG", stuck),
        ("LOST", lost),
        ("LOST", refused),
        ("LOST", cancelled_by_nobody),
        ("LOST", deadline_of_nobody),
        ("DEADLINE", early_deadline),
        ("DEADLINE", late_deadline),
        ("SILENCE", silence),
        ("LEAK", held_blocks),
        ("LEAK", held_tasks),
        ("LEAK", held_fds),
        ("LEAK", held_memory),
        ("LEAK", lasting_key),
        ("RESTART", restarted),
        ("NOT_SERVING", not_serving),
        ("NOT_SERVING", gone),
        ("RETRIES", too_many_retries),
        ("RETRIES", too_many_retries_of_a_new_process),
        ("RETRIES", too_many_free_retries),
        ("RETRIES", too_many_placements),
        ("NOT_READMITTED", not_readmitted),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_violation_is_seen(kind: str, spoil: Callable[[Judged], None]) -> None:
    """One thing spoilt gives a violation of its kind, and of no other."""
    for seed in (1, 2):
        run = good_run(seed=seed)
        spoil(run)
        assert run.kinds() == {kind}, run.violations()


def test_a_client_without_time_to_wait_is_over_its_deadline() -> None:
    """UNAVAILABLE within a second of its own deadline, with a reason, is no loss; earlier, or without one, it is."""
    for reason, early_s, kinds in (
        ("DRAINING", 0.5, set[str]()),
        ("DRAINING", 2.0, {"LOST"}),
        ("", 0.5, {"LOST"}),
        ("INTERNAL", 0.5, {"LOST"}),
    ):
        run = good_run(seed=2)
        one = max((one for one in run.seen.values() if one.code), key=lambda one: one.ended_s)
        assert one.ended_s - one.sent_s > 3
        one.code, one.reason = "UNAVAILABLE", reason
        one.ended_s -= early_s
        one.came_s = [at_s for at_s in one.came_s if at_s <= one.ended_s]
        assert run.kinds() == kinds, (reason, early_s)


def hit_plain_stream(fault: str) -> Judged:
    """Return a run with a fault on a frontend: one of its plain clients gets UNAVAILABLE from the transport."""
    for seed in range(1, 50):
        run = good_run("frontend", fault, seed)
        for stream in run.plan.streams:
            one = run.seen[stream.number]
            if stream.is_plain and f"frontend-{stream.frontend}" == run.plan.target and one.end == COMPLETE:
                one.end, one.code, one.text = FAILED, "UNAVAILABLE", "Socket closed"
                one.came_s = [at_s for at_s in one.came_s if at_s <= run.moments.fault_s]
                one.ids, one.ended_s = one.ids[: len(one.came_s)], run.moments.fault_s + 0.3
                return run
    raise AssertionError("no seed gives such a stream")


def of_code(run: Judged, code: str) -> None:
    next(one for one in run.seen.values() if one.code == "UNAVAILABLE").code = code


def plain_failure(run: Judged) -> Seen:
    """Return the stream that `hit_plain_stream` ended."""
    return next(one for one in run.seen.values() if one.code == "UNAVAILABLE")


@pytest.mark.parametrize("fault", ["kill", "pause", "cut"])
def test_a_plain_client_of_the_hit_frontend_is_excused(fault: str) -> None:
    """No other frontend can continue its stream, so the client must get UNAVAILABLE at once."""
    assert hit_plain_stream(fault).violations() == []


def test_a_slow_frontend_excuses_nothing() -> None:
    """Late packets and lost ones are no reason to end a stream."""
    assert hit_plain_stream("slow").kinds() == {"LOST"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_was_sent_behind_the_return_is_never_excused(fault: str) -> None:
    """The frontend answers health: it has to serve."""
    run = hit_plain_stream(fault)
    one = plain_failure(run)
    one.sent_s, one.ids, one.came_s = run.moments.returned_s + 0.1, [], []
    one.ended_s = one.sent_s + 0.1
    assert run.kinds() == {"LOST"}


def test_a_stream_that_fails_long_behind_the_return_is_lost() -> None:
    """The watchdogs of client and frontend end it within their time, or it goes on."""
    run = hit_plain_stream("pause")
    one = plain_failure(run)
    one.ended_s = run.moments.returned_s + LIMITS.told_s - 0.1
    one.came_s.append(one.ended_s - 1.0)
    assert run.violations() == []
    one.ended_s += 0.2
    assert run.kinds() == {"LOST"}


def test_a_draining_frontend_keeps_its_plain_clients() -> None:
    """It ends their streams only when the drain's time is over, and says why; it refuses new ones."""
    run = hit_plain_stream("term")
    assert run.kinds() == {"LOST"}
    plain_failure(run).reason = "DRAINING"
    assert run.kinds() == {"LOST"}

    one = plain_failure(run)
    run.moments = replace(run.moments, mended_s=32.0, returned_s=34.0, served_s=34.2)
    one.ended_s = run.moments.fault_s + DRAIN_S + 0.1
    one.came_s += [5.0 + index for index in range(26)]
    assert run.violations() == []
    one.reason = ""
    assert run.kinds() == {"LOST"}


def test_a_frontend_that_drains_or_is_down_may_refuse() -> None:
    """DRAINING, or no listener: a plain client has no other frontend. It keeps the tokens that it received."""
    for reason in ("", "DRAINING"):
        run = hit_plain_stream("term")
        one = plain_failure(run)
        one.sent_s, one.reason, one.ids, one.came_s = run.moments.fault_s + 0.1, reason, [], []
        assert run.violations() == []
        one.reason = "QUEUE_FULL"
        assert run.kinds() == {"LOST"}
        one.reason, one.ids = reason, run.truth[one.number][:1]
        assert run.kinds() == {"LOST"}


def test_a_plain_client_must_be_told_at_once() -> None:
    """More than a second behind the kill is too late."""
    run = hit_plain_stream("kill")
    next(one for one in run.seen.values() if one.code == "UNAVAILABLE").ended_s += 1.0
    assert run.kinds() == {"LATE"}


def test_a_plain_client_must_be_told_something_it_can_act_on() -> None:
    """A reason that names a bug, or none of the table, does not help it."""
    for reason in ("INTERNAL", "OUT_OF_CHEESE"):
        run = hit_plain_stream("cut")
        plain_failure(run).reason = reason
        assert run.kinds() == {"UNTYPED"}


def test_only_unavailable_and_only_at_the_hit_frontend_is_excused() -> None:
    """Another status, the other frontend, another part, a failure before the fault: each is a lost stream."""
    run = hit_plain_stream("kill")
    of_code(run, "INTERNAL")
    assert run.kinds() == {"LOST"}

    run = hit_plain_stream("kill")
    run.plan = replace(run.plan, target="frontend-0" if run.plan.target == "frontend-1" else "frontend-1")
    assert run.kinds() == {"LOST"}

    run = hit_plain_stream("kill")
    run.moments = replace(run.moments, fault_s=run.moments.fault_s + 1)
    assert run.kinds() == {"LOST"}


def test_a_plain_client_of_a_frozen_frontend_may_wait_for_it() -> None:
    """Its longest silence is the fault's and the watchdog's."""
    run = hit_plain_stream("pause")
    one = plain_failure(run)
    one.end, one.code, one.text, one.ids = COMPLETE, "", "", run.truth[one.number]
    one.ended_s = one.came_s[-1] + run.plan.away_s + LIMITS.silent_s - 0.1
    assert run.violations() == []
    one.ended_s += 0.2
    assert run.kinds() == {"SILENCE"}


def test_a_part_takes_its_name_back_in_time() -> None:
    """Judged where another process had the name, from the kill of that one on."""
    for fault, returned_s, kinds in (
        ("duplicate", 5.0 + LIMITS.takeover_s, set()),
        ("duplicate", 5.1 + LIMITS.takeover_s, {"LATE"}),
        ("pause", 60.0, set()),
    ):
        run = good_run("prefill", fault)
        run.moments = replace(run.moments, returned_s=returned_s, served_s=returned_s + 0.1)
        assert run.kinds() == kinds, (fault, returned_s)


def test_no_fault_may_change_the_rollout() -> None:
    """A rollout that was taken back, or another weight, is a violation; a mesh without a rollout is not judged."""
    for now in ("r-1 ROLLING_BACK at 0 %", "r-1 BAKING at 10 %", "r-2 BAKING at 20 %", ""):
        run = good_run("control", "kill")
        run.after = replace(run.after, rollout=now)
        assert run.kinds() == {"ROLLOUT"}, now
        run.before = replace(run.before, rollout="")
        assert run.violations() == []


def test_all_receivers_hold_one_snapshot() -> None:
    """A receiver behind the others, or without a snapshot, is a violation."""
    for name in ("1.control-0/6", ""):
        run = good_run("control", "pause")
        run.after = replace(run.after, snapshots={**run.after.snapshots, "router-0": name})
        assert run.kinds() == {"SNAPSHOTS"}, name


def test_keys_of_the_control_plane_may_stay() -> None:
    """Its documents, and the board; any other key without an expiry is a leak."""
    for key, kinds in (
        ("kvmesh:snapshot", set()),
        ("kvmesh:control:rollouts", set()),
        ("kvmesh:control:x", {"LEAK"}),
    ):
        run = good_run()
        run.after = replace(run.after, keys_for_good=[*run.after.keys_for_good, key])
        assert run.kinds() == kinds, key


def test_another_control_process_may_lead_with_the_streams_of_all_receivers() -> None:
    """The leader's tasks may move to another control process; more than the leader had are a leak."""
    for tasks, kinds in ((70, set()), (90, {"LEAK"})):
        run = good_run("control", "kill")
        leader, follower = Process("life", True, 70, 30, 100 << 20), Process("life", True, 20, 30, 100 << 20)
        run.before = replace(
            run.before,
            processes={**run.before.processes, "control-0": leader, "control-1": follower},
        )
        run.after = replace(
            run.after,
            processes={
                **run.after.processes,
                "control-0": replace(leader, tasks=20),
                "control-1": replace(follower, tasks=tasks),
            },
        )
        assert run.kinds() == kinds, tasks
