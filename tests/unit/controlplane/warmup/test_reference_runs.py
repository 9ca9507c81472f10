"""Reference runs beside users: they end early, and go on later."""

from __future__ import annotations

import random

import pytest

from controlplane.rollouts.golden import Answer, fixed_prompts
from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import ProbeJob, ProbeResult, ReferenceJob, ReferenceResult
from controlplane.warmup.life import WARM_BY_SERVICE_S
from controlplane.warmup.life_steps import CANNOT_TELL_S
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.reference_learning import RETRY_S, RETRY_S_MAX
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.unit.controlplane.warmup.leases import lease

KEY = ReferenceKey("v1", "")
PROMPTS = fixed_prompts(256, 1024)
TOKENS = tuple((at, at + 1) for at in range(len(PROMPTS)))
LATE = Answer(error="late")


class Rig:
    """Decode replicas of a version without golden tokens. Each reports the state of its lease."""

    def __init__(self, pools: dict[str, str] | None = None, **states: str) -> None:
        """`pools`: by replica, if it is not the default one."""
        self.pools = pools or {}
        self.actions: list[LifeAction] = []
        self.references = References(PROMPTS, {})
        self.now_s = 0.0
        self.queues = UserQueues()
        self.lives = Lives(
            WarmUpSettings(),
            self.references,
            Packages(lambda: 0.0),
            lambda _: ModelBounds(1024, 256, {"decode": 100}),
            self.actions.append,
            lambda _: None,
        )
        self.states = states
        self.meet()

    def meet(self, engine: str = "e1") -> None:
        """Take leases and reports. `engine`: the boot of the engine of `a`."""
        boots = {name: engine if name == "a" else "e1" for name in self.states}
        self.lives.on_members(
            [
                lease(name, state, engine=boots[name], pool=self.pools.get(name, "default"))
                for name, state in self.states.items()
            ],
            self.now_s,
        )
        for name, boot in boots.items():
            self.hear(name, boot)

    def hear(self, name: str, engine: str = "e1") -> None:
        """Take the report of one replica."""
        state = self.states[name]
        shown = "serving" if state == "cordoned" else state
        number = pb.ReplicaState.Value(f"REPLICA_STATE_{shown.upper()}")
        report = pb.ReplicaLife(state=number, engine_boot_id=f"{name}-{engine}", self_served=True)
        self.lives.on_report(name, "b1", report, self.now_s)

    def step(self) -> None:
        """Let time go on."""
        self.now_s += 0.5
        self.lives.step(self.queues, lambda _: (), self.now_s)

    def pass_by(self, seconds: float) -> None:
        """Let a step and `seconds` go by."""
        end_s = self.now_s + 0.5 + seconds
        while self.now_s < end_s:
            self.step()

    def run(self, most_s: float = 2000.0) -> tuple[int, ReferenceJob]:
        """Let time go on until a reference run begins."""
        end_s = self.now_s + most_s
        while self.now_s < end_s:
            self.step()
            while self.actions:
                action = self.actions.pop(0)
                if isinstance(action, RunJob) and isinstance(action.job, ReferenceJob):
                    return action.number, action.job
        raise AssertionError("no reference run")

    def answer(self, number: int, job: ReferenceJob, given: int) -> None:
        """End a run with answers to its first prompts."""
        good = tuple(Answer(TOKENS[PROMPTS.index(each)]) for each in job.prompts[:given])
        late = (LATE,) * (len(job.prompts) - len(good))
        error = "late" if late else ""
        self.lives.on_result(number, ReferenceResult((*good, *late), error), self.now_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_goes_on_with_the_prompts_that_are_left(seed: int) -> None:
    """Under a load no run has time for all prompts. Before, each began anew, for ever, at the cost of users."""
    chance, rig, asked = random.Random(seed), Rig(a="serving", b="serving"), dict[str, int]()
    for _ in range(500):
        if rig.references.expected(KEY):
            break
        number, job = rig.run()
        given = chance.randint(0, 6)
        for prompt in job.prompts[:given]:
            name = f"{job.target.process_id} {len(prompt.token_ids)}"
            asked[name] = asked.get(name, 0) + 1
        rig.answer(number, job, given)
    assert rig.references.expected(KEY) == TOKENS
    assert set(asked.values()) == {1} and len(asked) == 2 * len(PROMPTS)


def test_runs_without_an_answer_come_at_longer_intervals() -> None:
    """Each one costs users. One answer, and the interval is the first one again."""
    rig = Rig(a="serving")
    number, job = rig.run()
    pauses = list[float]()
    for _ in range(8):
        ended_s = rig.now_s
        rig.answer(number, job, 0)
        number, job = rig.run()
        pauses.append(rig.now_s - ended_s)
    assert pauses == [min(2.0**at * RETRY_S, RETRY_S_MAX) for at in range(1, 9)]
    ended_s = rig.now_s
    rig.answer(number, job, 1)
    rig.run()
    assert rig.now_s - ended_s == RETRY_S


def test_answers_of_an_earlier_boot_do_not_count() -> None:
    """The engine was started anew. The result of the earlier run is dropped, and a replica has one run at a time."""
    rig = Rig(a="serving")
    number, job = rig.run()
    rig.answer(number, job, 5)
    number, job = rig.run()
    assert len(job.prompts) == len(PROMPTS) - 5
    rig.meet("e2")
    with pytest.raises(AssertionError, match="no reference run"):
        rig.run(RETRY_S)
    rig.answer(number, job, len(job.prompts))
    number, job = rig.run()
    assert job.prompts == PROMPTS
    rig.answer(number, job, 3)
    assert rig.references.expected(KEY) == () and len(rig.run()[1].prompts) == len(PROMPTS) - 3


def test_a_replica_that_the_tokens_need_is_not_held_for_them() -> None:
    """One decode serves, as at the first start of a mesh. Its tokens count once the other agrees, which serves first."""
    rig = Rig(a="serving", b="probing")
    number, job = rig.run()
    assert job.target.process_id == "a"
    rig.answer(number, job, len(PROMPTS))
    rig.pass_by(CANNOT_TELL_S)
    life = rig.lives.get("b")
    assert life is not None and life.serves and not life.is_proved
    assert "no replica can tell" in life.reason
    number, job = rig.run()
    assert job.target.process_id == "b"
    rig.answer(number, job, len(PROMPTS))
    assert rig.references.expected(KEY) == TOKENS


def test_a_decode_that_two_others_can_prove_is_held() -> None:
    """Their tokens are under way, and prove it."""
    rig = Rig(a="serving", b="serving", c="probing")
    runs = [rig.run(), rig.run()]
    life = rig.lives.get("c")
    assert life is not None and life.state.is_held
    for number, job in runs:
        rig.answer(number, job, len(PROMPTS))
    assert rig.references.expected(KEY) == TOKENS
    rig.step()
    (probe,) = [
        each
        for each in rig.actions
        if isinstance(each, RunJob) and isinstance(each.job, ProbeJob) and each.job.target.process_id == "c"
    ]
    assert life.state.is_held and isinstance(probe.job, ProbeJob) and probe.job.prompts
    answers = tuple(Answer(TOKENS[PROMPTS.index(each)]) for each in probe.job.prompts)
    rig.lives.on_result(probe.number, ProbeResult(answers, frees_blocks=True), rig.now_s)
    rig.step()
    assert life.serves and set(life.passed) == {PROMPTS.index(each) for each in probe.job.prompts}


def test_a_decode_is_not_held_for_two_that_disagree() -> None:
    """They have told what they can. Only its own service breaks the tie."""
    rig = Rig(a="serving", b="serving")
    for tokens in (TOKENS, tuple((0, 0) for _ in PROMPTS)):
        number, _ = rig.run()
        rig.lives.on_result(number, ReferenceResult(tuple(map(Answer, tokens))), rig.now_s)
    rig.states["c"] = "probing"
    rig.meet()
    rig.pass_by(CANNOT_TELL_S)
    life = rig.lives.get("c")
    assert life is not None and life.serves and not life.is_proved
    number, job = rig.run()
    assert job.target.process_id == "c"
    rig.answer(number, job, len(PROMPTS))
    assert rig.references.expected(KEY) == TOKENS


def test_a_decode_is_not_held_for_one_that_rests() -> None:
    """Runs without an answer come minutes apart."""
    rig = Rig(a="serving", b="serving")
    runs = [rig.run(), rig.run()]
    for _ in range(3):
        for number, job in runs:
            rig.answer(number, job, 0)
        runs = [rig.run(), rig.run()]
    for number, job in runs:
        rig.answer(number, job, 0)
    rig.states["c"] = "probing"
    rig.meet()
    rig.pass_by(CANNOT_TELL_S)
    life = rig.lives.get("c")
    assert life is not None and life.serves


@pytest.mark.parametrize("silent_s", [0.0, CANNOT_TELL_S])
def test_a_decode_is_held_while_those_that_tell_are_silent_for_a_moment(silent_s: float) -> None:
    """A load stream opens again, or a new leader has not heard all of them."""
    rig = Rig(a="serving", b="serving", c="probing")
    rig.run()
    lives = [rig.lives.get(name) for name in "abc"]
    a, b, c = (life for life in lives if life is not None)
    for is_silent in (True, False, True):
        for life in (a, b):
            life.hear_engine(rig.now_s, is_silent=is_silent)
        rig.step()
    assert c.state.is_held
    rig.pass_by(silent_s)
    assert c.serves is (silent_s >= CANNOT_TELL_S)


def test_decodes_of_another_pool_can_tell() -> None:
    """Golden tokens are those of a version and an engine build, in all pools."""
    rig = Rig({"b": "other"}, a="serving", b="serving", c="probing")
    runs = [rig.run(), rig.run()]
    rig.pass_by(CANNOT_TELL_S)
    life = rig.lives.get("c")
    assert life is not None and life.state.is_held
    for number, job in runs:
        rig.answer(number, job, len(PROMPTS))
    assert rig.references.expected(KEY) == TOKENS


def test_a_decode_is_held_until_a_new_leader_has_heard_those_that_tell() -> None:
    """It is heard first. After a change of leader, each replica finds the new one within 2 s."""
    rig = Rig(a="serving", b="serving", c="probing")
    rig.lives.forget()
    rig.hear("c")
    rig.pass_by(CANNOT_TELL_S - 1.0)
    rig.lives.on_gone("c", "b1")
    rig.hear("c")
    rig.pass_by(CANNOT_TELL_S - 1.0)
    life = rig.lives.get("c")
    assert life is not None and life.state.is_held, "the time begins anew with its stream"
    rig.hear("a")
    rig.hear("b")
    rig.pass_by(2 * CANNOT_TELL_S)
    assert life.state.is_held
    for name in "ab":
        rig.lives.on_gone(name, "b1")
    rig.pass_by(CANNOT_TELL_S)
    assert life.serves and not life.is_proved


def test_a_decode_whose_leases_show_nobody_that_tells_waits_for_nobody() -> None:
    """All replicas start, and no package has golden tokens. Two serve at once, and the others wait for their tokens."""
    rig = Rig(a="probing", b="probing", c="probing", d="probing")
    rig.step()
    served = [name for name in "abcd" if (life := rig.lives.get(name)) is not None and life.serves]
    assert served == ["a", "b"]


def test_a_cordoned_decode_tells_nothing() -> None:
    """Another one serves, and needs the tokens of a second one. The held one is it, and serves."""
    rig = Rig(a="serving", b="cordoned", c="probing")
    number, job = rig.run()
    assert job.target.process_id == "a"
    rig.answer(number, job, len(PROMPTS))
    rig.pass_by(CANNOT_TELL_S)
    life = rig.lives.get("c")
    assert life is not None and life.serves
    number, job = rig.run()
    assert job.target.process_id == "c"


def test_a_cold_decode_that_users_wait_for_is_not_asked() -> None:
    """The prompts would be cold shapes beside its users."""
    rig = Rig(a="starting", b="starting")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    rig.run()
    lives = [rig.lives.get(name) for name in "ab"]
    ages = [life.age_s(rig.now_s) for life in lives if life is not None and life.serves and life.is_hurried]
    assert len(ages) == 2 and min(ages) >= WARM_BY_SERVICE_S
