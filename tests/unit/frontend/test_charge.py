"""The charge of a client that leaves: all tokens that may have reached it, and at most one window more."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.failure_detector import CHECK_INTERVAL_S
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.accounts import bill
from services.frontend.requests import charge
from services.frontend.requests.charge import CLOSED_S, Reach
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.progress import FLOW_CONTROL_WINDOW
from services.frontend.requests.request_spec import RequestSpec
from tests.unit.frontend.fake_mesh import COMPUTED_STRIDE, Client, FakeMesh, spec
from tests.unit.frontend.test_schedules import Schedule, core_of

POSITIONS = st.integers(0, 1000)


@given(
    st.tuples(POSITIONS, POSITIONS, POSITIONS), st.floats(0, 60), st.booleans(), st.booleans(), st.booleans()
)
def test_the_charge_lies_between_handed_and_computed_tokens(
    positions: tuple[int, int, int], closed_s: float, is_complete: bool, is_slow_reader: bool, is_ours: bool
) -> None:
    """The charge is at least the tokens handed to the transport and at most the tokens computed.

    A request ended by a fault of the mesh costs the streamed tokens.
    """
    handed, produced, computed = sorted(positions)
    reach = Reach(handed, produced, computed, closed_s)
    tokens = charge.output_tokens(
        reach, is_complete=is_complete, is_slow_reader=is_slow_reader, is_ours=is_ours
    )
    assert handed <= tokens <= computed
    if is_ours:
        assert tokens == handed
    elif is_slow_reader or closed_s > CLOSED_S:
        assert tokens == computed
    else:
        assert tokens == (produced if is_complete else handed)


@dataclass
class Message:
    """One message in the transport."""

    size: int
    tokens: int
    left: int = 0
    """Number of bytes that left the process."""

    @property
    def tokens_left(self) -> int:
        """Tokens readable from the bytes that left; all tokens if at most the last byte is missing."""
        return self.tokens if self.left >= self.size - 1 else self.tokens * self.left // self.size


class Windowed(Client):
    """A client with a flow-control window in bytes; its transport holds one message at a time."""

    def __init__(self, core: FrontendCore, asked: RequestSpec, now_s: float) -> None:
        super().__init__(core, asked, now_s)
        self.window = 0
        self.whole_tokens = 0
        """Tokens of messages sent to the last byte."""
        self.message: Message | None = None
        self.has_left = False

    @property
    def received(self) -> int:
        """Return the number of tokens that left the process."""
        return self.whole_tokens + (self.message.tokens_left if self.message is not None else 0)

    @property
    def is_done(self) -> bool:
        return self.has_left or (super().is_done and self.message is None)

    def read(self, now_s: float) -> None:
        """Write while the window lets messages through."""
        while not self.has_left and self.write(now_s):
            pass

    def write(self, now_s: float) -> bool:
        """Do the next step of the serving task; return False if it waits."""
        progress = self.request.progress
        if self.message is None:
            tokens = self.request.output.take()
            if tokens is None:
                return False
            self.ids += tokens.ids
            self.text += tokens.text
            size = 5 + pb.GenerateResponse(tokens=tokens).ByteSize()
            self.message = Message(size, len(tokens.ids))
            progress.writing_since_s = now_s
        message = self.message
        count = min(self.window, message.size - message.left)
        self.window -= count
        message.left += count
        if message.left < message.size:
            return False
        self.whole_tokens += message.tokens
        self.message, progress.writing_since_s = None, None
        self.core.deliver(self.request, self.request.output.taken, now_s)
        return True

    def leave(self, now_s: float) -> None:
        """Reset the stream, once."""
        self.has_left = True
        self.core.leave(self.request, now_s)


class Leaving(Schedule):
    """A schedule of clients that open their windows byte by byte and leave at any point."""

    def run(self, steps: int) -> None:
        """Take random steps; then all remaining clients open their windows."""
        for _ in range(steps):
            self.step()
            self.core.assert_consistent()
        for client in self.clients:
            assert isinstance(client, Windowed)
            client.window = 1 << 30
        super().run(0)

    def _begin(self) -> None:
        asked = spec(
            len(self.clients) + 1, max_output_tokens=self.draw.randint(1, 400), end_token_ids=frozenset()
        )
        self.clients.append(Windowed(self.core, asked, self.mesh.now_s))

    def step(self) -> None:
        """Take one random step."""
        draw, now_s = self.draw, self.mesh.now_s
        readers = [client for client in self.clients if isinstance(client, Windowed) and not client.has_left]
        if readers and draw.random() < 0.3:
            client = draw.choice(readers)
            if int(client.spec.request_id, 16) % 3:  # one of three never opens its window
                client.window += draw.choice((0, 1, 7, 30, 200))
            client.write(now_s)
            if client.message is not None and draw.random() < 0.04:
                client.leave(now_s)
        elif draw.random() < 0.3:
            self.mesh.settle()
        elif draw.random() < 0.02:
            self.mesh.advance(draw.uniform(0.5, 3.0))
        else:
            super().step()


@pytest.mark.parametrize("fault_share", [0.0, 0.1])
def test_resets_anywhere_are_charged_the_received_tokens_and_at_most_a_window_more(
    fault_share: float,
) -> None:
    """After a reset, the charge is at least the received tokens and at most one window more.

    Windows open byte by byte, and clients leave at any byte. Streams behind the frontend are cut, repeated
    and resumed. The first token of an attempt needs no window, so each attempt after the first may add one
    token.
    """
    left = stalled = 0
    for seed in range(40):
        schedule = Leaving(seed, fault_share)
        schedule.run(steps=600)
        for client in schedule.clients:
            assert isinstance(client, Windowed)
            request, paid = client.request, bill.of(client.request)
            where = f"seed={seed} {request} {request.outcome}"
            assert client.received <= paid.output_tokens, where
            if request.outcome is not None and request.outcome.name == "CLIENT_GONE":
                left += 1
                if request.progress.closed_s > CLOSED_S:
                    stalled += 1
                    assert paid.output_tokens <= schedule.mesh.computed.get(client.spec.request_id, 0), where
                    continue
            most = client.whole_tokens + FLOW_CONTROL_WINDOW + max(0, len(request.attempts) - 1)
            assert paid.output_tokens <= most, where
    assert left > 40 and stalled > 5, (left, stalled)


@pytest.mark.parametrize("closed_s", [1.9, 2.1])
@pytest.mark.parametrize("dies", [False, True])
def test_a_closed_window_costs_the_computed_tokens(closed_s: float, *, dies: bool) -> None:
    """A window closed for over 2 s costs the computed tokens; a shorter closure costs one message.

    Decode's last report counts, also when decode has died since.
    """
    core = core_of(random.Random(1))
    mesh = FakeMesh(core, random.Random(1), 1)
    mesh.open(mesh.routers[0])
    client = Windowed(core, spec(3, max_output_tokens=5000, end_token_ids=frozenset()), mesh.now_s)
    while not client.request.output.has_waiting():
        mesh.settle()
    client.write(mesh.now_s)
    assert client.message is not None
    mesh.settle(100)
    computed = mesh.computed[client.spec.request_id]
    assert computed > 200 and client.received == 0
    mesh.advance(closed_s)
    if dies:
        mesh.drop(mesh.runs[0])
    client.leave(mesh.now_s)
    paid = bill.of(client.request).output_tokens
    if closed_s > CLOSED_S:
        assert computed - COMPUTED_STRIDE < paid <= computed
    else:
        assert paid == client.message.tokens


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("read_s", [0.0, 1.9])
def test_time_that_the_frontend_stood_still_closes_no_window(read_s: float, *, is_seen: bool) -> None:
    """Time in which the frontend stood still does not count as a closed window.

    The transport took the message meanwhile, and no task ran to note it. With `is_seen`, a check came before
    the end. Only observed time counts: more than CLOSED_S of it costs the computed tokens.
    """
    core = core_of(random.Random(1))
    mesh = FakeMesh(core, random.Random(1), 1)
    mesh.open(mesh.routers[0])
    clients = [
        Windowed(core, spec(number, max_output_tokens=5000, end_token_ids=frozenset()), mesh.now_s)
        for number in (3, 4)
    ]
    while not all(client.request.output.has_waiting() for client in clients):
        mesh.settle()
    for client in clients:
        client.write(mesh.now_s)
    mesh.settle(100)
    core.on_timer(mesh.now_s)
    mesh.advance(read_s)
    mesh.now_s += 60.0  # SIGSTOP
    if is_seen:
        core.on_timer(mesh.now_s)
    clients[0].leave(mesh.now_s)
    assert clients[0].message is not None
    assert bill.of(clients[0].request).output_tokens == clients[0].message.tokens
    mesh.advance(CLOSED_S + CHECK_INTERVAL_S)
    clients[1].leave(mesh.now_s)
    computed = mesh.computed[clients[1].spec.request_id]
    assert computed - COMPUTED_STRIDE < bill.of(clients[1].request).output_tokens <= computed


def test_a_standstill_behind_the_end_closes_no_window() -> None:
    """A standstill after the end of a request does not count as a closed window.

    A request that is over is watched while its handler writes to the client.
    """
    core = core_of(random.Random(1))
    mesh = FakeMesh(core, random.Random(1), 1)
    mesh.open(mesh.routers[0])
    asked = spec(3, max_output_tokens=5000, end_token_ids=frozenset(), deadline_s=mesh.now_s + 1.0)
    client = Windowed(core, asked, mesh.now_s)
    core.admitted.attend(client.request)
    while not client.request.output.has_waiting():
        mesh.settle()
    client.write(mesh.now_s)
    mesh.settle(100)
    mesh.advance(1.2)
    assert client.request.outcome is not None and client.message is not None
    mesh.now_s += 60.0
    core.on_timer(mesh.now_s)
    client.leave(mesh.now_s)
    assert bill.of(client.request).output_tokens == client.message.tokens
    core.admitted.dismiss(client.request, mesh.now_s)
    assert core.next_wake_s() is None


def test_a_deadline_behind_a_closed_window_costs_the_computed_tokens() -> None:
    """A request cut by its class's deadline behind a closed window costs the computed tokens.

    One window that the client reads at the end changes nothing.
    """
    core = core_of(random.Random(1))
    mesh = FakeMesh(core, random.Random(1), 1)
    mesh.open(mesh.routers[0])
    asked = spec(
        3,
        max_output_tokens=5000,
        end_token_ids=frozenset(),
        deadline_s=mesh.now_s + 5.0,
        is_clients_deadline=False,
    )
    client = Windowed(core, asked, mesh.now_s)
    while not client.request.output.has_waiting():
        mesh.settle()
    client.write(mesh.now_s)
    mesh.settle(100)
    computed = mesh.computed[asked.request_id]
    mesh.advance(6.0)
    client.window = 1 << 30
    client.read(mesh.now_s)
    core.leave(client.request, mesh.now_s)
    assert client.request.outcome is not None and client.request.outcome.name == "DEADLINE_CUT"
    assert client.received <= FLOW_CONTROL_WINDOW + 1
    assert computed - COMPUTED_STRIDE < bill.of(client.request).output_tokens <= computed
