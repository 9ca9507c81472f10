"""The whole mesh under random schedules: streams cut, peers frozen and back, processes killed or drained, engines lost."""

from __future__ import annotations

import random

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.accounts import bill
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.requests.request import LiveRequest
from services.router.forwarding.core import ForwardingCore
from tests.simulation.mesh import DETACHED_S, Mesh
from tests.simulation.streams import Stream

WHOLE = (pb.FINISH_REASON_END_TOKEN, pb.FINISH_REASON_LENGTH)


class Schedule:
    """One random run; the same for the same seed."""

    def __init__(self, seed: int, fault_share: float) -> None:
        self.draw = random.Random(seed)
        self.mesh = Mesh(
            self.draw,
            frontends=self.draw.randint(1, 2),
            routers=self.draw.randint(1, 2),
            prefills=self.draw.randint(1, 2),
            decodes=self.draw.randint(1, 2),
        )
        self.fault_share = fault_share
        self.faults = 0
        self.mesh.connect()

    def run(self, steps: int) -> None:
        """Take random steps, then let everything come to rest."""
        mesh = self.mesh
        for _ in range(steps):
            self.step()
            mesh.settle()
            mesh.assert_consistent()
        for stream in mesh.streams:
            stream.frozen = False
        for name, core in list(mesh.cores.items()):
            if (core.admission if isinstance(core, ForwardingCore) else core).is_draining:
                mesh.kill(name)  # a draining process ends, and is started again
        for _ in range(3000):
            for stream in mesh.streams:
                stream.notice(mesh.now_s)
            mesh.connect()
            mesh.travel()
            for engine in mesh.engines.values():
                engine.step(mesh.now_s)
            for client in mesh.clients:
                client.read(mesh.now_s)
            mesh.assert_consistent()
            if all(client.is_done for client in mesh.clients) and not mesh.held():
                break
            mesh.advance(0.05)
        mesh.advance(DETACHED_S)

    def step(self) -> None:
        """Do one random thing."""
        draw, mesh = self.draw, self.mesh
        if draw.random() < self.fault_share:
            self.fault()
            return
        stream = draw.choice(mesh.streams)
        choice = draw.randrange(10)
        if choice == 0 and sum(not client.is_done for client in mesh.clients) < 16:
            mesh.submit()
        elif choice in (1, 2):
            stream.write_up(mesh.now_s)
            stream.write_down(mesh.now_s)
        elif choice == 3:
            stream.arrive_up(mesh.now_s)
        elif choice == 4:
            stream.arrive_down(mesh.now_s)
        elif choice == 5:
            mesh.travel()
        elif choice in (6, 7):
            mesh.engines[draw.choice(list(mesh.engines))].step(
                mesh.now_s, tokens=draw.randint(1, 3), chosen=lambda _: draw.random() < 0.8
            )
        elif choice == 8 and mesh.clients:
            draw.choice(mesh.clients).read(mesh.now_s)
        elif choice == 9:
            mesh.advance(draw.choice((0.001, 0.01, 0.05)))

    def fault(self) -> None:
        """Break something, or repair something."""
        draw, mesh = self.draw, self.mesh
        self.faults += 1
        stream: Stream = draw.choice(mesh.streams)
        choice = draw.randrange(14)
        if choice < 2:
            stream.cut(mesh.now_s, server_knows=draw.random() < 0.5)
        elif choice == 2:
            stream.notice(mesh.now_s)
        elif choice < 6:
            mesh.connect()
        elif choice == 6:
            stream.frozen = True
        elif choice < 9:
            stream.frozen = False
        elif choice == 9:
            mesh.kill(draw.choice((*mesh.prefill_names, *mesh.decode_names, *mesh.router_names)))
        elif choice == 10 and mesh.clients:
            client = draw.choice(mesh.clients)
            if not client.is_done:
                client.has_left = True
                client.core.leave(client.request, mesh.now_s)
        elif choice == 11:
            mesh.advance(draw.choice((0.5, DETACHED_S, 3.5)))
        elif choice == 12:
            name = draw.choice(list(mesh.engines))
            engine = mesh.engines[name]
            mesh.boots += 1
            engine.crash(engine.boot_id if draw.random() < 0.5 else f"{name}.{mesh.boots}", mesh.now_s)
        elif choice == 13:
            name = draw.choice((*mesh.prefill_names, *mesh.decode_names, *mesh.router_names))
            mesh.cores[name].drain()


@pytest.mark.parametrize(("fault_share", "whole_share"), [(0.0, 0.6), (0.01, 0.6), (0.05, 0.5), (0.15, 0.3)])
def test_every_token_once_and_nothing_left(fault_share: float, whole_share: float) -> None:
    """Under any faults: no repeat, no gap, one end for each request, equal tokens, and nothing held at the end."""
    ends: list[str] = []
    whole = takeovers = resumes = 0
    for seed in range(26):
        schedule = Schedule(seed, fault_share)
        try:
            schedule.run(steps=600)
            mesh = schedule.mesh
            for client in mesh.clients:
                wanted, end = mesh.oracle(client.spec), client.request.outcome
                assert end is not None, f"{client.request} never ended"
                assert client.ids == wanted[: len(client.ids)], f"{client.request}: wrong tokens"
                if end.finish_reason in WHOLE and not client.has_left:
                    assert client.ids == wanted, f"{client.request} ended early as {end.name}"
                    whole += 1
                # Streams keep order here: a gap can only be a side that continued at the wrong position.
                assert all(attempt.fault != "GAP" for attempt in client.request.attempts), (
                    f"{client.request}: a gap"
                )
                paid = bill.of(client.request).output_tokens
                assert len(client.ids) <= paid <= len(client.ids) + FLOW_CONTROL_WINDOW, (
                    f"{client.request}: {paid} tokens are charged, {len(client.ids)} were read"
                )
                ends.append(end.name)
                takeovers += client.request.takeovers
                resumes += client.request.retry_state.resumes
            assert not mesh.held(), "\n".join(mesh.held())
        except Exception as error:
            raise AssertionError(f"seed={seed} fault_share={fault_share}: {error}") from error
    tally = {end: ends.count(end) for end in set(ends)}
    assert len(ends) > 500
    assert whole >= len(ends) * whole_share, f"{whole} of {len(ends)} whole: {tally}"
    if fault_share >= 0.01:
        assert takeovers > 3 and resumes > 10, (
            f"the schedule breaks nothing: {takeovers} takeovers, {resumes} resumes"
        )


def test_a_late_takeover_of_a_lost_router_disturbs_no_attempt() -> None:
    """Router 1 is lost, router 2 takes the request over and is lost, router 3 takes it over; then router 2's takeover
    arrives."""
    mesh = Mesh(random.Random(3), frontends=1, routers=3, prefills=1, decodes=1)
    mesh.connect()
    mesh.travel()
    client = mesh.submit()
    while client.request.spec.max_output_tokens < 40:
        client = mesh.submit()
    request = client.request
    for _ in range(200):
        go(mesh)
        if len(client.ids) > 4:
            break
    assert 4 < len(client.ids) < 30, request
    stream_to(mesh, "frontend-0", request).cut(mesh.now_s)
    second = stream_to(mesh, "frontend-0", request)
    second.write_up(mesh.now_s)
    second.arrive_up(mesh.now_s)
    late = next(one for one in mesh.streams if (one.caller, one.name) == (second.name, "decode-0"))
    late.frozen = True
    second.cut(mesh.now_s, server_knows=False)
    late.write_up(mesh.now_s)
    assert late.up, "the takeover is on its way"
    for _ in range(4):
        mesh.travel()
    assert (request.state.value, request.takeovers) == ("attached", 1)
    late.frozen = False
    go(mesh)
    second.notice(mesh.now_s)
    for _ in range(400):
        go(mesh)
    assert client.ids == mesh.oracle(client.spec)
    assert (len(request.attempts), request.takeovers) == (1, 1)
    mesh.advance(DETACHED_S)
    mesh.assert_consistent()


def go(mesh: Mesh) -> None:
    """Let everything travel, every engine make a step, every client read."""
    mesh.travel()
    for engine in mesh.engines.values():
        engine.step(mesh.now_s)
    for client in mesh.clients:
        client.read(mesh.now_s)
    mesh.advance(0.01)


def stream_to(mesh: Mesh, caller: str, request: LiveRequest) -> Stream:
    """Return the stream through which `request` is served, or asks to be."""
    peer = request.upstream.peer
    assert peer is not None, request
    return next(one for one in mesh.streams if (one.caller, one.name) == (caller, peer.name))
