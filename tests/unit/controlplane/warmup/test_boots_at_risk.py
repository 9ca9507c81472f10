"""Boots that the work of a warm-up ended: counted in whichever state the death is seen, and forgotten once it is over."""

from __future__ import annotations

from controlplane.rollouts.golden import Answer, fixed_prompts
from controlplane.warmup.actions import LifeAction, RunJob, Told
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import PassJob, PassResult, ProbeJob, ProbeResult, Result, SeedJob, SeedResult
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Package, Packages, encode, package_name
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import Seeding, WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

KEY = ReferenceKey("v1", "")
NAME = package_name("prefill", KEY)
PROMPTS = fixed_prompts(256, 1024)[:2]
TOKENS = ((1,), (2,))
WALL_S = 1_000_000.0


class Rig:
    """Lives of prefill-0, which restarts, and of prefill-1, which serves. The package has one prefix."""

    def __init__(self, replicas: int = 2, settings: WarmUpSettings = WarmUpSettings()) -> None:  # noqa: B008
        package = Package(
            name=NAME, model_version="v1", role="prefill", made_s=WALL_S, prefixes=((1, 2, 3, 4),)
        )
        packages = Packages(lambda: WALL_S)
        packages.learn({NAME: encode(package)})
        references = References(PROMPTS, {})
        references.restore(KEY, TOKENS)
        self.actions: list[LifeAction] = []
        self.condemned: list[str] = []
        self.now_s = 0.0
        self._seen: set[int] = set()
        self._engine = 0
        self.lives = Lives(
            settings,
            references,
            packages,
            lambda _: ModelBounds(1024, 256, {"prefill": 100}),
            self.actions.append,
            self.condemned.append,
        )
        self._members = [_member(number) for number in range(replicas)]
        self.lives.on_members(self._members, 0.0)
        if replicas > 1:
            self._report("prefill-1", pb.REPLICA_STATE_SERVING, "engine", proved=True)

    def boot(self, replica: str = "prefill-0") -> None:
        """A fresh engine of the replica."""
        self._engine += 1
        self._report(replica, pb.REPLICA_STATE_STARTING, f"engine-{self._engine}")
        self.step()

    def vanish(self) -> None:
        """The replica is gone with its lease."""
        self.lives.on_gone("prefill-0", "b0")
        self.lives.on_members(self._members[1:], self.now_s)
        self.step()
        self.lives.on_members(self._members, self.now_s)

    def _report(
        self, name: str, state: pb.ReplicaState.ValueType, engine: str, *, proved: bool = False
    ) -> None:
        report = pb.ReplicaLife(state=state, engine_boot_id=engine, proved=proved)
        self.lives.on_report(name, f"b{name[-1]}", report, self.now_s)

    def step(self, seconds: float = 0.1) -> None:
        """Let time go on."""
        self.now_s += seconds
        self.lives.step(UserQueues(), lambda _: (("router-0", "r:1"),), self.now_s)

    def job(self, kind: type[PassJob | SeedJob | ProbeJob]) -> RunJob:
        """Return the next job of this kind on prefill-0."""
        for _ in range(40):
            for each in self.actions:
                if not (isinstance(each, RunJob) and isinstance(each.job, kind) and is_of_it(each)):
                    continue
                if each.number not in self._seen:
                    self._seen.add(each.number)
                    return each
            self.step()
        raise AssertionError(f"no {kind.__name__}; {self.life}")

    def end(self, kind: type[PassJob | SeedJob | ProbeJob], result: Result) -> None:
        """End the next job of this kind."""
        job = self.job(kind)
        self.lives.on_result(job.number, result, self.now_s)
        self.step()

    def prove(self) -> None:
        """End the next probe with the golden tokens of its prompts."""
        run = self.job(ProbeJob)
        assert isinstance(run.job, ProbeJob)
        answers = tuple(Answer(TOKENS[PROMPTS.index(each)]) for each in run.job.prompts)
        self.lives.on_result(run.number, ProbeResult(answers), self.now_s)
        self.step()

    def warm(self) -> None:
        """End the passes over the shapes."""
        for cold in (1, 0):
            self.end(PassJob, PassResult(1.0, cold))

    @property
    def life(self) -> object:
        return self.lives.get("prefill-0")

    @property
    def state(self) -> LifeState:
        life = self.lives.get("prefill-0")
        assert life is not None
        return life.state

    @property
    def package(self) -> str:
        life = self.lives.get("prefill-0")
        assert life is not None
        return life.package

    @property
    def failed(self) -> int:
        return self.lives.boots.count("prefill-0")


def is_of_it(run: RunJob) -> bool:
    """True if the job works on prefill-0."""
    return isinstance(run.job, PassJob | SeedJob | ProbeJob) and run.job.target.process_id == "prefill-0"


GOOD = ProbeResult(tuple(Answer(each) for each in TOKENS), True, 0, 0, "")
SICK = ProbeResult(tuple(Answer(error="lost") for _ in TOKENS), None, 0, 0, "")
FAILED = SeedResult(failed_prefixes=1)
"""The engine died from a prefix, and its replica said so at once."""


def _member(number: int) -> Member:
    return Member(
        process_id=f"prefill-{number}",
        role="prefill",
        address=f"p{number}:1",
        boot_id=f"b{number}",
        model_version="v1",
        block_tokens=4,
        state="serving" if number else "starting",
        draining=not number,
        capabilities=("life",),
        engine_boot_id="engine" if number else "",
    )


def test_an_engine_that_a_prefix_kills_is_counted_in_probing() -> None:
    """The step failed before the new boot was seen. The third boot goes without the package."""
    rig = Rig()
    for failed in range(2):
        rig.boot()
        assert rig.package == NAME and rig.failed == failed
        rig.warm()
        rig.end(SeedJob, FAILED)
        assert rig.state is LifeState.PROBING
        rig.end(ProbeJob, SICK)
    rig.boot()
    assert rig.failed == 2 and rig.package == "" and not rig.condemned
    assert sum(isinstance(each, Told) and each.what == "replica.warm_up_ended" for each in rig.actions) == 2


def test_a_good_probe_ends_the_risk() -> None:
    """Prefixes that a replica refused kill no engine: a later restart counts nothing."""
    rig = Rig()
    rig.boot()
    rig.warm()
    rig.end(SeedJob, FAILED)
    rig.end(ProbeJob, GOOD)
    assert rig.state is LifeState.SERVING
    rig.boot()
    assert rig.failed == 0 and rig.package == NAME


def test_a_replica_that_vanishes_in_its_warm_up_is_counted() -> None:
    """Its lease and its stream go with its engine, as those of a container do."""
    rig = Rig()
    for failed in range(2):
        rig.boot()
        assert rig.failed == failed
        rig.vanish()
    rig.boot()
    assert rig.failed == 2 and rig.package == ""


def test_seeding_behind_the_start_of_service_counts_too() -> None:
    """The only replica of a pool serves at once. A prefix that kills it there is left out by the third boot."""
    rig = Rig(replicas=1)
    for failed in range(2):
        rig.boot()
        assert rig.failed == failed and rig.package == NAME
        rig.prove()
        assert rig.state is LifeState.SERVING
        rig.job(SeedJob)
    rig.boot()
    assert rig.failed == 2 and rig.package == ""
    rig.prove()
    for _ in range(2):
        rig.step()
    assert rig.failed == 0, "it serves, and nothing of its warm-up is left"


def test_answers_from_before_a_failed_seeding_prove_nothing() -> None:
    """A prefix kills the engine after it has answered the golden prompts, and the answers come last."""
    rig = Rig()
    for failed in range(2):
        rig.boot()
        assert rig.package == NAME and rig.failed == failed
        seeding = rig.job(SeedJob)
        rig.warm()
        probe = rig.job(ProbeJob)
        rig.lives.on_result(seeding.number, FAILED, rig.now_s)
        rig.lives.on_result(probe.number, GOOD, rig.now_s)
        rig.step()
    rig.boot()
    assert rig.failed == 2 and rig.package == ""


def test_a_replay_follows_the_shapes_however_long_they_take() -> None:
    """An engine is cold for longer than a seeding may take."""
    rig = Rig(settings=WarmUpSettings(seeding=Seeding.REPLAY))
    rig.boot()
    slow = rig.job(PassJob)
    for _ in range(100):
        rig.step(1.0)
    rig.lives.on_result(slow.number, PassResult(100.0, 0), rig.now_s)
    rig.step()
    assert isinstance(rig.job(SeedJob).job, SeedJob)


def test_a_boot_starts_empty_until_a_seeding_has_copied_a_block() -> None:
    """Routers may list the blocks of the engine process before it, even after a first seeding that failed at once."""
    rig = Rig()
    for _ in range(2):
        rig.boot()
        for tries, copied in enumerate((0, 4, 0)):
            run = rig.job(SeedJob)
            assert isinstance(run.job, SeedJob) and run.job.starts_empty == (tries < 2)
            rig.lives.on_result(run.number, SeedResult(error="lost", pulled_blocks=copied), rig.now_s)
