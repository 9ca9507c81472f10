"""Random schedules of faults behind a frontend: each client gets each token once, in order, and one end."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.inference.v1 import inference_pb2
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from tests.unit.frontend.fake_mesh import DETACHED_S, Client, FakeMesh, Router, oracle, spec

REFUSALS = [
    pb.Refusal.REASON_QUEUE_FULL,
    pb.Refusal.REASON_DRAINING,
    pb.Refusal.REASON_NO_REPLICA,
    pb.Refusal.REASON_STALE_SNAPSHOT,
    pb.Refusal.REASON_KV_FULL,
    pb.Refusal.REASON_QUEUE_TIMEOUT,
]
FAILURES = [
    pb.Failure.CODE_REPLICA_LOST,
    pb.Failure.CODE_ENGINE_LOST,
    pb.Failure.CODE_ENGINE_ERROR,
    pb.Failure.CODE_HANDOFF_LOST,
    pb.Failure.CODE_STALLED,
    pb.Failure.CODE_GAP,
    pb.Failure.CODE_INTERNAL,
]


def core_of(draw: random.Random, attempts_max: int = 8) -> FrontendCore:
    return FrontendCore(
        Limits(attempts_max, DETACHED_S, 16),
        limit=64,
        retries=RetryBudget(0.1, 3.0, 1000.0),
        jitter=draw.random,
    )


class Schedule:
    """A random run of a core, some clients and a mesh in which `fault_share` of the steps are faults."""

    def __init__(self, seed: int, fault_share: float) -> None:
        self.draw = random.Random(seed)
        self.core = core_of(self.draw)
        self.mesh = FakeMesh(self.core, self.draw, self.draw.randint(1, 3))
        self.clients: list[Client] = []
        self.fault_share = fault_share
        for router in self.mesh.routers:
            if self.draw.random() < 0.8:
                self.mesh.open(router)

    def run(self, steps: int) -> None:
        """Take random steps, then let all requests end."""
        for _ in range(steps):
            self.step()
            self.core.assert_consistent()
        for _ in range(4000):
            for router in self.mesh.routers:
                router.is_frozen = False
                self.mesh.open(router)
            self.mesh.settle()
            for client in self.clients:
                client.read(self.mesh.now_s)
            self.core.assert_consistent()
            if all(client.is_done for client in self.clients) and not self.core.admitted.leaving:
                break
            self.mesh.advance(0.05)
        self.mesh.settle()
        self.mesh.advance(DETACHED_S)

    def step(self) -> None:
        """Take one random step."""
        draw, mesh = self.draw, self.mesh
        router = draw.choice(mesh.routers)
        if draw.random() < self.fault_share:
            self._fault(router)
            return
        choice = draw.randrange(8)
        if choice == 0 and len(self.clients) < 12:
            self._begin()
        elif choice == 1:
            mesh.send_up(router)
        elif choice == 2:
            mesh.arrive_up(router)
        elif choice == 3:
            mesh.send_down(router)
        elif choice == 4:
            mesh.arrive_down(router)
        elif choice == 5 and mesh.runs:
            mesh.work(draw.choice(mesh.runs))
        elif choice == 6 and self.clients:
            draw.choice(self.clients).read(mesh.now_s)
        elif choice == 7:
            mesh.advance(draw.choice([0.001, 0.01, 0.1]))

    def _begin(self) -> None:
        draw, number = self.draw, len(self.clients) + 1
        changes: dict[str, object] = {}
        if draw.random() < 0.2:
            changes = {"deadline_s": self.mesh.now_s + draw.uniform(0.1, 5), "is_clients_deadline": False}
        if draw.random() < 0.2:
            whole = oracle(spec(number).prompt_ids, spec(number).max_output_tokens)
            received = tuple(whole[: draw.randint(0, len(whole))])
            changes |= {"is_resumed": True, "attempt_base": 256, "received_ids": received}
        self.clients.append(Client(self.core, spec(number, **changes), self.mesh.now_s))

    def _fault(self, router: Router) -> None:
        draw, mesh = self.draw, self.mesh
        choice = draw.randrange(10)
        run = draw.choice(mesh.runs) if mesh.runs else None
        if choice < 2:
            mesh.cut(router)
        elif choice < 5:
            mesh.open(router)
        elif choice == 5:
            router.is_frozen = not router.is_frozen
        elif choice == 6 and self.clients and draw.random() < 0.3:
            self.core.leave(draw.choice(self.clients).request, mesh.now_s)
        elif run is None:
            return
        elif choice == 7:
            if run.stage == "queued" and run.router is not None:
                mesh.refuse(run, draw.choice(REFUSALS), draw.choice([0, 0, 50]))
            elif draw.random() < 0.5:
                mesh.fail(run, draw.choice(FAILURES))
        elif choice == 8:
            mesh.repeat(run)
        elif choice == 9 and draw.random() < 0.3:
            mesh.skip(run)


def check(schedule: Schedule, seed: int) -> list[str]:
    """Check the guarantees for every client; return the outcomes."""
    core, outcomes = schedule.core, []
    for client in schedule.clients:
        asked, request = client.spec, client.request
        whole = oracle(asked.prompt_ids, asked.max_output_tokens)
        have = [*asked.execution.received_ids, *client.ids]
        assert request.outcome is not None, f"seed={seed} {request} never ended"
        assert have == whole[: len(have)], f"seed={seed} {request}"
        outcomes.append(request.outcome.name)
        if request.outcome.finish_reason in (
            inference_pb2.FINISH_REASON_END_TOKEN,
            inference_pb2.FINISH_REASON_LENGTH,
        ):
            assert have == whole, f"seed={seed} {request} ended early"
    assert not core.admitted.serving and not core.admitted.leaving, f"seed={seed}"
    assert not any(peer.slots for peer in core.peers), f"seed={seed}"
    assert core.next_wake_s() is None, f"seed={seed}"
    assert not schedule.mesh.runs, f"seed={seed} left running: {schedule.mesh.runs}"
    return outcomes


@pytest.mark.parametrize(("fault_share", "served_share"), [(0.0, 1.0), (0.02, 0.7), (0.1, 0.5), (0.3, 0.14)])
def test_every_token_once_and_one_end_under_random_faults(fault_share: float, served_share: float) -> None:
    """No fault causes a repeated token, a gap or a leak, and each request ends once.

    Streams are cut anywhere, rows are repeated and lost, adopts are refused, attempts cross.
    """
    outcomes: list[str] = []
    resumes = takeovers = 0
    for seed in range(60):
        schedule = Schedule(seed, fault_share)
        try:
            schedule.run(steps=700)
        except Exception as error:
            raise AssertionError(f"seed={seed}") from error
        outcomes += check(schedule, seed)
        resumes += sum(client.request.retry_state.resumes for client in schedule.clients)
        takeovers += sum(client.request.takeovers for client in schedule.clients)
    served = sum(outcome in ("END_TOKEN", "LENGTH", "DEADLINE", "DEADLINE_CUT") for outcome in outcomes)
    assert len(outcomes) > 500
    assert served >= len(outcomes) * served_share, f"{served} of {len(outcomes)}: {sorted(set(outcomes))}"
    if fault_share in (0.02, 0.1):
        assert resumes > 10 and takeovers > 10, "the schedule had no fault"
