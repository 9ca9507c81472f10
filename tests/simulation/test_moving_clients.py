"""Clients that go from frontend to frontend under random schedules: killed, frozen and thawing ones, late news."""

from __future__ import annotations

import dataclasses

from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.resume_token import ATTEMPT_STRIDE
from services.frontend.requests.takeover import AttemptLocation
from tests.simulation.mesh import Client
from tests.simulation.test_mesh import WHOLE, Schedule


class Reader(Client):
    """One call of a client that has tokens already."""

    def __init__(self, core: FrontendCore, spec: RequestSpec, now_s: float) -> None:
        super().__init__(core, spec, now_s)
        self.location: AttemptLocation | None = spec.execution.location
        """Location of the running attempt, as reported last."""

    @property
    def whole(self) -> list[int]:
        """The client's tokens of the whole answer."""
        return [*self.spec.execution.received_ids, *self.ids]

    def read(self, now_s: float) -> None:
        """Take the waiting tokens, and their origin."""
        tokens = self.request.output.take()
        if tokens is None:
            return
        assert tokens.position == len(self.whole), f"{self.request}: a gap or a repeat"
        self.ids += tokens.ids
        self.location = self.request.location or self.location
        self.core.deliver(self.request, self.request.output.taken, now_s)


@dataclasses.dataclass
class CallState:
    """One request of a client: the call it reads, and those it left."""

    reader: Reader
    left: list[Reader] = dataclasses.field(default_factory=list)
    moves: int = 0


class Moving(Schedule):
    """The random schedule of the mesh, and clients that leave their frontend for another one."""

    def __init__(self, seed: int, fault_share: float, redis_share: float) -> None:
        super().__init__(seed, fault_share)
        self.calls: list[CallState] = []
        self.epochs: dict[str, int] = {}
        self.news: list[tuple[str, str, int]] = []
        """(frontend, request, epoch) on its way."""
        self.redis_share = redis_share
        """Share of cases in which Redis returns the number and the news arrive."""

    def step(self) -> None:
        """Do one thing more."""
        super().step()
        mesh, draw = self.mesh, self.draw
        known = {id(one) for call in self.calls for one in (call.reader, *call.left)}
        for at, client in enumerate(mesh.clients):
            if id(client) not in known and not isinstance(client, Reader):
                client.__class__ = Reader
                reader = mesh.clients[at]
                assert isinstance(reader, Reader)
                reader.location = None
                self.calls.append(CallState(reader))
        if self.news and draw.random() < 0.3:
            self.tell(self.news.pop(draw.randrange(len(self.news))))
        if self.calls and draw.random() < 0.02:
            running = [each for each in self.calls if each.reader.ids and not each.reader.is_done]
            self.move(draw.choice(running if running and draw.random() < 0.8 else self.calls))

    def move(self, call: CallState) -> None:
        """Move the client to another frontend. Its own is killed, frozen, or only cut off from it."""
        mesh, draw, old = self.mesh, self.draw, call.reader
        if old.is_done or old.has_left or old.request.outcome is not None:
            return
        request_id = old.spec.request_id
        home = (
            next(name for name in mesh.frontend_names if mesh.cores[name] is old.core)
            if self.lives(old)
            else ""
        )
        fate = draw.choice((0, 1, 2, 2, 3, 3))
        if fate == 0 and home:
            self.kill(home)
        elif fate == 1 and home:
            old.core.leave(old.request, mesh.now_s)
        elif fate == 2:
            for stream in mesh.streams:
                if stream.caller == home:
                    stream.frozen = True
        elif fate == 3 and home:
            old.core.hand_over([old.request], mesh.now_s)
        if draw.random() < self.redis_share:
            epoch = self.epochs[request_id] = (
                max(self.epochs.get(request_id, 0), old.spec.execution.epoch) + 1
            )
            self.news += [(name, request_id, epoch) for name in mesh.frontend_names]
            is_fenced = True
        else:
            epoch, is_fenced = old.spec.execution.epoch + 1, False
        spec = dataclasses.replace(
            old.spec,
            execution=dataclasses.replace(
                old.spec.execution,
                attempt_base=epoch * ATTEMPT_STRIDE,
                is_resumed=True,
                is_fenced=is_fenced,
                received_ids=tuple(old.whole),
                location=old.location,
            ),
        )
        old.has_left = True
        call.left.append(old)
        call.moves += 1
        call.reader = Reader(mesh.cores[draw.choice(mesh.frontend_names)], spec, mesh.now_s)
        mesh.clients.append(call.reader)

    def lives(self, client: Client) -> bool:
        """Return True if the frontend of `client` was not killed."""
        return any(core is client.core for core in self.mesh.cores.values())

    def kill(self, name: str) -> None:
        """kill -9 of a frontend: its calls end, and their clients go to another frontend or give up."""
        mesh, core = self.mesh, self.mesh.cores[name]
        mesh.kill(name)
        mesh.clients[:] = [each for each in mesh.clients if each.core is not core]
        for call in self.calls:
            if call.reader.core is core:
                call.reader.has_left = True

    def tell(self, news: tuple[str, str, int]) -> None:
        """Deliver the news of an execution to a frontend."""
        name, request_id, epoch = news
        self.mesh.cores[name].supersede(request_id, epoch, self.mesh.now_s)

    def run(self, steps: int) -> None:
        """Take random steps. At rest, the end of every left call has been noticed."""
        for _ in range(steps):
            self.step()
            self.mesh.settle()
            self.mesh.assert_consistent()
        for news in self.news:
            self.tell(news)
        for call in self.calls:
            for old in call.left:
                if self.lives(old):
                    old.core.leave(old.request, self.mesh.now_s)
        super().run(0)


def test_a_client_that_moves_gets_every_token_once() -> None:
    """After any faults of frontends, the tokens of the last call, behind the earlier ones, are the oracle's."""
    moves = takeovers = whole = superseded = 0
    for fault_share in (0.0, 0.02, 0.08):
        for redis_share in (1.0, 0.5):
            for seed in range(8):
                schedule = Moving(seed, fault_share, redis_share)
                try:
                    schedule.run(600)
                    mesh = schedule.mesh
                    for call in schedule.calls:
                        reader = call.reader
                        wanted, end = mesh.oracle(reader.spec), reader.request.outcome
                        for each in (reader, *call.left):
                            assert each.whole == wanted[: len(each.whole)], f"{each.request}: wrong tokens"
                        moves += call.moves
                        takeovers += sum(
                            each.request.takeovers
                            for each in (reader, *call.left)
                            if each.spec.execution.location
                        )
                        if end is None or reader.has_left:
                            continue
                        if end.finish_reason in WHOLE:
                            assert reader.whole == wanted, f"{reader.request} ended early as {end.name}"
                            whole += 1
                        if end.name == "SUPERSEDED":
                            superseded += 1
                            assert redis_share < 1, f"{reader.request}: the last execution was superseded"
                    assert not mesh.held(), "\n".join(mesh.held())
                except Exception as error:
                    raise AssertionError(
                        f"seed={seed} fault_share={fault_share} redis_share={redis_share}: {error}"
                    ) from error
    assert moves > 120 and takeovers > 10 and whole > 400, (moves, takeovers, whole, superseded)
