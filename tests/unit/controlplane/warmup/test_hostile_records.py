"""Packages that are made of hostile answers of routers."""

from __future__ import annotations

import random

from controlplane.rollouts.golden import fixed_prompts
from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.job_table import JobTable
from controlplane.warmup.jobs import RecordJob, RecordResult, Shape
from controlplane.warmup.package_making import SERVED_MIN_S, PackageMaking
from controlplane.warmup.packages import (
    PREFIX_TOKENS_MAX,
    PREFIXES_MAX,
    Packages,
    decode,
    encode,
)
from controlplane.warmup.references import References
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member

NOW_S = 1_700_000_000.0
REGISTERED = ((5, 6, 7, 8),)
ROUTERS = (("router-0", "r:1"),)


def _bytes(*ids: int) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in ids)


class Rig:
    """A pool with a serving replica of each role."""

    def __init__(self) -> None:
        self.actions: list[LifeAction] = []
        self.packages = Packages(lambda: NOW_S)
        fleet, jobs = Fleet(), JobTable(self.actions.append)
        prompts = fixed_prompts(256, 1024)[:2]
        self.making = PackageMaking(
            300.0, fleet, jobs, self.packages, References(prompts, {}), lambda _: REGISTERED, lambda: NOW_S
        )
        for role in ("prefill", "decode"):
            member = Member(
                process_id=role,
                role=role,
                address="a:1",
                boot_id="b",
                model_version="v1",
                block_tokens=4,
                capabilities=("life",),
            )
            state = pb.REPLICA_STATE_SERVING
            fleet.begin(member, pb.ReplicaLife(state=state, engine_boot_id=f"e-{role}"), 0.0)

    def job(self, now_s: float = SERVED_MIN_S) -> RecordJob:
        """Return the question to the routers."""
        self.making.step(lambda _: ROUTERS, now_s)
        (action,) = self.actions
        assert isinstance(action, RunJob) and isinstance(action.job, RecordJob)
        return action.job


def test_whatever_routers_tell_every_package_can_be_read_again() -> None:
    """Random and hostile answers: each package that is made passes the check of its readers."""
    for seed in range(300):
        rng, rig = random.Random(seed), Rig()
        values = (0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1)
        prefixes = [
            _bytes(*(rng.choice(values) for _ in range(rng.choice((1, 3, 4, 8)))))
            for _ in range(rng.choice((0, 3, 100)))
        ]
        if rng.random() < 0.3:
            prefixes.append(_bytes(1) * (PREFIX_TOKENS_MAX + rng.randrange(-4, 4)))
        if rng.random() < 0.1:
            prefixes += [_bytes(at, 1, 2, 3) for at in range(5000)]
        lengths = (0, 1, 16, 2**31 - 1, 2**31, 2**32 - 1)
        shapes = [
            Shape(rng.choice(lengths), rng.choice((0, 1, 5, 2**32 - 1)))
            for _ in range(rng.choice((0, 3, 200)))
        ]
        for made in rig.making.take(rig.job(), RecordResult(tuple(shapes), tuple(prefixes))):
            assert decode(made.name, encode(made)) == made, f"seed={seed}"
            assert len(made.prefixes) <= PREFIXES_MAX and made.prefixes[0] == REGISTERED[0], f"seed={seed}"
