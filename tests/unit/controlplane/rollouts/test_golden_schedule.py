"""The runs of golden prompts: the reference first, each replica, each step, one in turn; differences are final."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.rollouts import golden_schedule as gs
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.golden import Answer, GoldenSet, Prompt
from controlplane.rollouts.golden_schedule import GoldenRun, GoldenSchedule
from controlplane.rollouts.settings import Expectation
from controlplane.rollouts.view import GoldenState
from kvmesh.membership.member import Member
from tests.unit.controlplane.rollouts.facts import SETTINGS, in_state, until

PROMPTS = (Prompt((1, 2), 2), Prompt((3,), 2))
OUTPUTS = ((7, 8), (5, 6))
OWN = GoldenSet((Prompt((9,), 1),), ((4,),))


def member(pool: str, role: str, number: int = 0, **fields: Any) -> Member:
    """Return a leased replica."""
    name = f"{pool}-{role}-{number}"
    given = {
        "process_id": name,
        "boot_id": "b1",
        "address": "10.0.0.1:1",
        "model_version": "v",
        "block_tokens": 32,
    }
    return Member(role=role, pool=pool, **{**given, **fields})  # type: ignore[arg-type]  # fields by name


STABLE = [member("stable", "prefill"), member("stable", "decode")]
CANARY = [member("next", "prefill"), member("next", "decode"), member("next", "decode", 1)]
OTHERS = [member("next", "router"), member("young", "decode"), member("other", "prefill")]
ALL = [*STABLE, *CANARY, *OTHERS]


def good(run: GoldenRun) -> tuple[Answer, ...]:
    """Return the right answers of a run."""
    outputs = OUTPUTS if run.prompts == PROMPTS else OWN.outputs
    return tuple(Answer(output[:1] if run.role == "prefill" else output) for output in outputs)


def bad(run: GoldenRun) -> tuple[Answer, ...]:
    """Return answers of which the first differs."""
    return (Answer((0,)), *good(run)[1:])


def absent(run: GoldenRun) -> tuple[Answer, ...]:
    """Return answers without the last one."""
    return (*good(run)[:-1], Answer(error="queue full"))


class Leader:
    """A schedule with its time: `run` starts what is due and answers it at once."""

    def __init__(self, document: RolloutDocument, **sets: GoldenSet) -> None:
        self.document = document
        self.schedule = GoldenSchedule(PROMPTS, sets)
        self.now_s = 1000.0
        self.members = ALL

    def due(self, after_s: float = 0.0) -> list[GoldenRun]:
        self.now_s += after_s
        return self.schedule.due(self.document, self.members, self.now_s)

    def run(self, answer: Any = good, after_s: float = 0.0) -> list[str]:
        """Return the names of the replicas that ran."""
        runs = self.due(after_s)
        for run in runs:
            self.schedule.take(run, answer(run), self.now_s)
        return [run.process_id for run in runs]

    def state(self) -> GoldenState:
        return self.schedule.facts(self.document).state

    @property
    def reason(self) -> str:
        return self.schedule.facts(self.document).reason


def prepared(**sets: GoldenSet) -> Leader:
    """Return a leader whose rollout has run all golden prompts of PREPARING."""
    leader = Leader(in_state("PREPARING"), **sets)
    leader.run()
    leader.run()
    assert leader.state() is GoldenState.GREEN
    return leader


def test_preparing_runs_stable_and_then_each_replica_of_the_canary() -> None:
    """Green when all have answered right. Routers and other pools run nothing."""
    leader = Leader(in_state("PREPARING"))
    assert leader.state() is GoldenState.MISSING
    runs = leader.due()
    assert [(run.process_id, run.is_reference, run.step) for run in runs] == [("stable-decode-0", True, 0)]
    assert leader.due() == [] and 'stable pool "stable" has not answered' in leader.reason
    leader.schedule.take(runs[0], good(runs[0]), leader.now_s)
    assert sorted(leader.run()) == ["next-decode-0", "next-decode-1", "next-prefill-0"]
    assert leader.state() is GoldenState.GREEN and leader.run() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_canary_without_a_role_is_not_green(role: str) -> None:
    """No replica, no pass."""
    leader = Leader(in_state("PREPARING"))
    leader.members = [each for each in ALL if each.pool != "next" or each.role != role]
    leader.run()
    leader.run()
    assert leader.state() is GoldenState.MISSING and f"has no {role}" in leader.reason


def test_a_difference_is_final() -> None:
    """Also when the replica is gone, and nothing runs any more."""
    leader = prepared()
    leader.document = until(in_state("BAKING"), "BAKING", 1)
    leader.run(bad)
    assert leader.state() is GoldenState.RED and "output token 0 is 0; 7 is expected" in leader.reason
    leader.members = STABLE
    assert leader.run(after_s=100.0) == [] and leader.state() is GoldenState.RED


def test_an_absent_answer_is_repeated_after_five_seconds() -> None:
    """It is neither a pass nor a difference, at stable as well."""
    leader = Leader(in_state("PREPARING"))
    leader.run(absent)
    assert "queue full" in leader.reason and leader.run(after_s=4.9) == []
    assert leader.run(after_s=0.2) == ["stable-decode-0"]
    leader.run(absent)
    assert leader.state() is GoldenState.MISSING and "queue full" in leader.reason
    assert leader.run(after_s=4.9) == [] and len(leader.run(after_s=0.2)) == 3
    assert leader.state() is GoldenState.GREEN


def test_a_short_result_is_no_pass() -> None:
    """A run must answer each prompt."""
    leader = Leader(in_state("PREPARING"))
    leader.run()
    leader.run(lambda run: good(run)[:1])
    assert leader.state() is GoldenState.MISSING and "no answer" in leader.reason


def test_each_step_runs_every_replica_again_and_then_one_in_turn() -> None:
    """In BAKING one replica runs each 30 s, the one first whose run is the oldest."""
    leader = prepared()
    leader.document = until(in_state("BAKING"), "BAKING", 1)
    assert leader.state() is GoldenState.MISSING
    assert len(leader.run()) == 3 and leader.state() is GoldenState.GREEN
    turns = [leader.run(after_s=1.0) for _ in range(95)]
    ran = [names[0] for names in turns if names]
    assert len(ran) == 3 and set(ran) == {each.process_id for each in CANARY}
    leader.document = until(leader.document, "BAKING", 2)
    assert leader.state() is GoldenState.MISSING and len(leader.run()) == 3


def test_a_new_boot_must_answer_anew() -> None:
    """And a lost run does not block its replica for ever."""
    leader = prepared()
    leader.members = [*STABLE, *CANARY[:2], member("next", "decode", 1, boot_id="b2")]
    runs = leader.due()
    assert [run.boot_id for run in runs] == ["b2"] and leader.state() is GoldenState.MISSING
    assert leader.due(after_s=gs.EXPIRES_S - 1) == [] and len(leader.due(after_s=1.0)) == 1


def test_draining_replicas_do_not_run() -> None:
    """They would refuse."""
    leader = Leader(in_state("PREPARING"))
    leader.run()
    leader.members = [*CANARY[:2], member("next", "decode", 1, draining=True)]
    assert len(leader.run()) == 2 and leader.state() is GoldenState.GREEN


def test_at_most_four_runs_at_a_time() -> None:
    """A large pool is checked in several rounds."""
    leader = Leader(in_state("PREPARING"))
    leader.members = [*STABLE, *(member("next", role, at) for role in gs.ROLES for at in range(6))]
    leader.run()
    assert len(leader.due()) == gs.RUNS_MAX and leader.due() == []


def test_a_version_with_other_tokens_has_a_set_of_its_own() -> None:
    """The stable pool does not run. Without the set nothing runs, and the reason names the version."""
    different = structs.replace(SETTINGS, expectation=Expectation.DIFFERENT)
    leader = Leader(in_state("PREPARING", different), v2=OWN)
    assert all(run.prompts == OWN.prompts and not run.is_reference for run in leader.due())
    leader.now_s += gs.EXPIRES_S
    assert len(leader.run()) == 3 and leader.state() is GoldenState.GREEN
    without = Leader(in_state("PREPARING", different), v1=OWN)
    assert without.run() == [] and 'version "v2" has no golden set' in without.reason


def test_results_of_another_rollout_do_not_count() -> None:
    """A late result of the rollout before is dropped, and the facts of a new one are missing."""
    leader = Leader(in_state("PREPARING"))
    runs = leader.due()
    leader.document = structs.replace(leader.document, id="r-2")
    assert leader.state() is GoldenState.MISSING
    leader.due()
    leader.schedule.take(runs[0], good(runs[0]), leader.now_s)
    assert "has not answered" in leader.reason
    leader.schedule.take(replace(runs[0], rollout="r-2"), good(runs[0]), leader.now_s)
    assert len(leader.run()) == 3


def test_random_schedules_are_never_green_without_every_answer() -> None:
    """Answers, losses, new boots and steps at random: green means that each replica answered right in this step."""
    for seed in range(100):
        chance = random.Random(seed)
        leader, step = Leader(in_state("PREPARING")), 0
        right: set[tuple[str, str, int]] = set()
        open_runs: list[GoldenRun] = []
        boots = dict.fromkeys((each.process_id for each in CANARY), 1)
        for _ in range(200):
            open_runs += leader.due(after_s=chance.choice((0.5, 3.0, 40.0)))
            chance.shuffle(open_runs)
            for run in open_runs[: chance.randrange(3)]:
                answer = chance.choice((good, good, absent))
                leader.schedule.take(run, answer(run), leader.now_s)
                key = (run.process_id, run.boot_id, run.step)
                right.add(key) if answer is good else right.discard(key)
                open_runs.remove(run)
            if chance.random() < 0.05:
                boots[chance.choice(list(boots))] += 1
                leader.members = [
                    *STABLE,
                    *(structs.replace(each, boot_id=f"b{boots[each.process_id]}") for each in CANARY),
                ]
                leader.due()
            if chance.random() < 0.05 and step < 3:
                step += 1
                leader.document = structs.replace(leader.document, state_name="BAKING", step=step)
            if leader.state() is GoldenState.GREEN:
                present = {
                    (each.process_id, each.boot_id, step)
                    for each in leader.members
                    if each.pool == "next" and each.role in gs.ROLES
                }
                assert present <= right, f"seed={seed}"
