"""Packages that the leader makes from what routers recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import RecordJob, RecordResult, Shape
from controlplane.warmup.life_state import number_of
from controlplane.warmup.package_making import SERVED_MIN_S, PackageMaking, shape_rows
from controlplane.warmup.packages import PREFIXES_MAX, TENANTS_MIN, Packages, ShapeRow, package_name
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.shapes import BATCH_MAX, BATCH_PROMPT_TOKENS
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import LIFE, Member, Role

EVERY_S = 300.0
KEY = ReferenceKey("v1", "build")
ROUTERS = (("router-0", "router-0:1"),)


@dataclass
class Making:
    """A pool with a replica of each role that serves since 0."""

    actions: list[LifeAction] = field(default_factory=list)
    registered: tuple[tuple[int, ...], ...] = ()
    wall_s: float = 1000.0

    def __post_init__(self) -> None:
        self.fleet, self.packages = Fleet(), Packages(lambda: self.wall_s)
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            lease = Member(
                process_id=role,
                role=role,
                address=f"{role}:1",
                boot_id="boot",
                model_version="v1",
                block_tokens=2,
                capabilities=(LIFE,),
                digests={"engine": "build"},
            )
            serving = pb.ReplicaLife(state=number_of(LifeState.SERVING), engine_boot_id=f"{role}-engine")
            self.fleet.begin(lease, serving, 0.0)
        self.making = PackageMaking(
            EVERY_S,
            self.fleet,
            JobTable(self.actions.append),
            self.packages,
            References((), {}),
            lambda _: self.registered,
            lambda: self.wall_s,
        )

    def jobs(self, now_s: float) -> list[RecordJob]:
        """Return the questions of a step."""
        self.actions.clear()
        self.making.step(lambda _: ROUTERS, now_s)
        return [
            each.job for each in self.actions if isinstance(each, RunJob) and isinstance(each.job, RecordJob)
        ]


def test_routers_are_asked_once_in_a_while() -> None:
    """A pool is asked after steady service, with the number of tenants that protects users' prompts."""
    pool = Making()
    assert not pool.jobs(SERVED_MIN_S - 1)
    (job,) = pool.jobs(SERVED_MIN_S)
    assert (job.pool, job.routers, job.tenants_min) == ("default", ROUTERS, TENANTS_MIN)
    assert not pool.jobs(SERVED_MIN_S + EVERY_S - 1)
    assert pool.jobs(SERVED_MIN_S + EVERY_S)


def test_each_role_has_a_package() -> None:
    """Registered prefixes come first. The same record makes no further revision before the time."""
    pool = Making(registered=((1, 2),))
    (job,) = pool.jobs(SERVED_MIN_S)
    shared = b"".join(each.to_bytes(4, "little") for each in (3, 4, 5, 6))
    result = RecordResult((Shape(16), Shape(0, 4)), (shared,))
    assert not pool.making.take(job, RecordResult(error="no router answers"))
    made = pool.making.take(job, result)
    assert {each.name for each in made} == {package_name(role, KEY) for role in ("prefill", "decode")}
    for package in made:
        assert package.prefixes == ((1, 2), (3, 4, 5, 6)) and len(package.hashes) == 1
        assert pool.packages.usable(package.role, KEY) == package
    assert not pool.making.take(job, result)
    pool.wall_s += EVERY_S
    assert [each.revision for each in pool.making.take(job, result)] == [2, 2]


def test_a_quarantined_package_stays_quarantined() -> None:
    """A later revision has the same reason."""
    pool = Making()
    (job,) = pool.jobs(SERVED_MIN_S)
    (first, _) = pool.making.take(job, RecordResult((Shape(16),)))
    pool.packages.quarantine(first.name, "boots ended")
    pool.making.take(job, RecordResult((Shape(32),)))
    found = pool.packages.named(first.name)
    assert found is not None and found.quarantined == "boots ended" and found.shapes == (ShapeRow(32),)


def test_the_number_of_prefixes_is_bounded() -> None:
    """Prefixes beyond the bound are left out, the heaviest stay."""
    pool = Making()
    (job,) = pool.jobs(SERVED_MIN_S)
    prefixes = tuple(at.to_bytes(4, "little") * 2 for at in range(PREFIXES_MAX + 5))
    for package in pool.making.take(job, RecordResult((Shape(16),), prefixes)):
        assert len(package.prefixes) == PREFIXES_MAX and package.prefixes[0] == (0, 0)


def test_shapes_are_those_that_a_role_runs() -> None:
    """A prefill runs no batches. A batch without a prompt length has a short one."""
    given = (Shape(8192), Shape(0, 8 * BATCH_MAX), Shape(0, 1), Shape(4))
    prompts = (ShapeRow(8192), ShapeRow(4))
    assert shape_rows("prefill", given) == prompts
    assert set(shape_rows("decode", given)) == {*prompts, ShapeRow(BATCH_PROMPT_TOKENS, BATCH_MAX)}
