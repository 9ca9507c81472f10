"""Replicas that refuse valid requests, or generate unknown token ids, on a virtual clock with real cores."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvmesh.attach.frames import pack_ids, unpack_ids
from kvmesh.attach.v1.attach_pb2 import Submit
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.tenants.caller import Caller
from kvmesh.triton.port import EngineCall
from services.frontend.requests.request_spec import NOBODY
from services.frontend.requests.retry_budget import RetryBudget
from services.router.forwarding.core import ForwardingCore
from tests.simulation.mesh import Client, Mesh
from tests.simulation.test_mesh import Schedule
from tests.unit.triton.fake_engine import FOREIGN, INVALID, VOCABULARY

WHOLE = (pb.FINISH_REASON_END_TOKEN, pb.FINISH_REASON_LENGTH)

CROWD = 30
"""Requests at once: more than twice what the spare half of the retry budget pays for."""

POISON = pack_ids((VOCABULARY - 1,) * 3)
"""Beginning of a prompt that every engine refuses."""

LIES = {
    "decode, first token": ("decode-0", FOREIGN, 0),
    "decode, in the middle": ("decode-0", FOREIGN, 5),
    "decode refuses": ("decode-0", INVALID, 0),
    "decode refuses in the middle": ("decode-0", INVALID, 5),
    "prefill": ("prefill-0", FOREIGN, 0),
    "prefill refuses": ("prefill-0", INVALID, 0),
}


class Pool(Mesh):
    """A mesh with the default retry budget. Lying engines record the calls with a lie."""

    def __init__(self, seed: int, *, routers: int = 1, replicas: int = 2) -> None:
        super().__init__(
            random.Random(seed), frontends=1, routers=routers, prefills=replicas, decodes=replicas
        )
        self.lied: list[tuple[str, str]] = []
        """(replica, request) of each call with a lie."""
        self.frontend = self.cores["frontend-0"]
        self.frontend.retries = RetryBudget(0.1, 3.0, self.now_s)
        self.connect()
        self.travel()

    def spoil(self, name: str, lie: str, at: int) -> None:
        """Let the engine of `name` lie about every call."""

        def told(call: EngineCall) -> tuple[str, int]:
            if at < call.max_output_tokens:
                self.lied.append((name, call.request_id.partition("-")[0]))
            return lie, at

        self.engines[name].lie = told

    def request(self, begin: bytes = b"") -> Client:
        """Send a request with a prompt for a prefill replica, and with an output that no end token cuts short."""
        prompt = [self.draw.randrange(1, VOCABULARY) for _ in range(self.draw.choice((9, 20, 40)))]
        return self.send([*unpack_ids(begin), *prompt], 20, end_token_id=-1)

    def serve(self, clients: Sequence[Client]) -> None:
        """Go on until all of `clients` are done."""
        for _ in range(2000):
            self.travel()
            for engine in self.engines.values():
                engine.step(self.now_s)
            self.travel()
            for client in clients:
                client.read(self.now_s)
            if all(client.is_done for client in clients):
                return
            self.advance(0.005)
        raise AssertionError([client.request for client in clients if not client.is_done])

    def router_cores(self) -> list[ForwardingCore]:
        return [self.cores[name] for name in self.router_names]

    def is_ejected(self, name: str) -> bool:
        """Return whether all routers have ejected `name`."""
        return all(router_core.replicas[name].ejection.is_ejected for router_core in self.router_cores())

    def ejections(self) -> int:
        return sum(router_core.ejection_total for router_core in self.router_cores())

    def check(self, clients: Sequence[Client]) -> None:
        """Every request ended well, with the tokens that it has on one engine alone."""
        for client in clients:
            end = client.request.outcome
            assert end is not None and end.finish_reason in WHOLE, f"{client.request}: {end}"
            assert client.ids == self.oracle(client.spec), client.request
        self.assert_consistent()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("routers", [1, 2])
def test_a_contradicted_replica_is_ejected_and_no_request_fails(lie: str, routers: int) -> None:
    """One request at a time: the third failure ejects the replica; every request has its tokens."""
    name, kind, at = LIES[lie]
    for seed in range(2):
        pool = Pool(seed, routers=routers)
        pool.spoil(name, kind, at)
        for _ in range(60):
            pool.serve([pool.request()])
            if pool.is_ejected(name):
                break
        pool.travel()
        pool.check(pool.clients)
        assert pool.is_ejected(name) and len({one for _, one in pool.lied}) == 3, (seed, pool.lied)
        assert pool.ejections() == routers, "only the liar is ejected"


@pytest.mark.parametrize("lie", LIES)
def test_a_crowd_that_meets_a_liar_at_once_is_served(lie: str) -> None:
    """Far more requests than the retry budget pays for: the first contradiction frees the waiting requests."""
    name, kind, at = LIES[lie]
    for seed in range(2):
        pool = Pool(seed)
        pool.spoil(name, kind, at)
        for _ in range(4):
            pool.serve([pool.request() for _ in range(CROWD)])
            pool.advance(0.3)
        pool.check(pool.clients)
        assert pool.ejections() >= 1, seed


@pytest.mark.parametrize("kinds", [(FOREIGN, INVALID), (INVALID, INVALID)])
def test_liars_of_both_roles_fail_no_request(kinds: tuple[str, str]) -> None:
    """A verdict of a prefill replica and one of a decode replica do not confirm each other: both are tested."""
    for seed in range(2):
        pool = Pool(seed)
        pool.spoil("prefill-0", kinds[0], 0)
        pool.spoil("decode-0", kinds[1], 5)
        for _ in range(8):
            pool.serve([pool.request() for _ in range(4)])
        pool.travel()
        pool.check(pool.clients)
        assert pool.is_ejected("prefill-0") and pool.is_ejected("decode-0"), seed


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("kind", [INVALID, FOREIGN])
def test_requests_that_every_engine_refuses_eject_nothing(role: str, kind: str) -> None:
    """1,000 requests that all engines refuse end with the error, and cost at most the retry budget more."""
    pool = Pool(1, replicas=3)
    for name in pool.prefill_names if role == "prefill" else pool.decode_names:
        pool.spoil(name, kind, 0)
    began_s = pool.now_s
    for _ in range(100):
        pool.serve([pool.request() for _ in range(10)])
        pool.advance(0.05)
    reason = {INVALID: "ENGINE_REFUSED", FOREIGN: "ENGINE_ERROR"}[kind]
    assert {client.request.outcome.name for client in pool.clients if client.request.outcome} == {reason}
    assert pool.ejections() == 0
    assert not any(replica.ejection.failures for replica in pool.router_cores()[0].replicas.values())
    executions = sum(len(client.request.attempts) for client in pool.clients)
    assert 1000 < executions <= 1000 + 30 + 0.1 * 1000 + 3.0 * (pool.now_s - began_s), executions
    assert pool.frontend.retries.level >= 10, "the lower half is left to requests that no engine took"


@pytest.mark.parametrize("liar", ["", "decode-0", "prefill-0"])
def test_crafted_requests_eject_nothing_and_hide_no_liar(liar: str) -> None:
    """Every engine refuses half of all requests. The others are served, and only a liar is ejected."""
    for seed in range(2):
        pool = Pool(seed)

        def told(call: EngineCall, name: str) -> tuple[str, int]:
            return (INVALID, 0) if call.token_ids.startswith(POISON) else (FOREIGN * (name == liar), 0)

        for name, engine in pool.engines.items():
            engine.lie = functools.partial(told, name=name)
        served: list[Client] = []
        for _ in range(5):
            crowd = [pool.request(POISON if index % 2 else b"") for index in range(CROWD)]
            pool.serve(crowd)
            pool.advance(0.3)
            served += crowd[::2]
            assert all(one.request.outcome and one.request.outcome.error for one in crowd[1::2])
        pool.check(served)
        router_core = pool.router_cores()[0]
        assert bool(router_core.ejection_total) == bool(liar)
        failed = {name for name, replica in router_core.replicas.items() if replica.ejection.failures}
        assert failed <= {liar}, (seed, failed)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_verdict_of_a_replica_without_a_peer_is_final(role: str) -> None:
    """One replica of the role: each refused request is computed once, and nothing is ejected."""
    pool = Pool(1, replicas=1)
    pool.spoil(f"{role}-0", INVALID, 0)
    for _ in range(20):
        pool.serve([pool.request()])
    assert all(len(client.request.attempts) == 1 for client in pool.clients)
    assert len(pool.lied) == 20 and pool.ejections() == 0


def roomy(permille: int) -> Caller:
    """Return a caller with a class that keeps `permille` of a replica's KV cache free as headroom."""
    return replace(NOBODY, service_class=replace(NOBODY.service_class, kv_headroom=permille / 1000))


@pytest.mark.parametrize("liar", ["", "prefill-0", "decode-0"])
def test_no_request_gets_around_the_headroom_of_its_class(liar: str) -> None:
    """A request too large beside its headroom runs nowhere and ejects nothing, also where an engine lies about others."""
    for seed in range(2):
        pool = Pool(seed)
        if liar:
            pool.spoil(liar, INVALID, 0)
        large: list[Client] = []
        for _ in range(10):
            prompt = [pool.draw.randrange(1, VOCABULARY) for _ in range(40)]
            large.append(pool.send(prompt, 20, end_token_id=-1, caller=roomy(800)))
            pool.serve([large[-1], pool.request()])
        assert {one.request.outcome.name for one in large if one.request.outcome} == {"ENGINE_REFUSED"}
        assert all(len(one.request.attempts) == 1 and not one.ids for one in large)
        replicas = pool.router_cores()[0].replicas
        blamed = {name for name in replicas if replicas[name].ejection.failures or pool.is_ejected(name)}
        assert blamed <= {liar}, (seed, blamed)


@pytest.mark.parametrize("lie", LIES)
def test_only_requests_with_tokens_are_resumed(lie: str) -> None:
    """The attempt that tests a verdict has the limits of a new one, until a token of the request was made."""
    name, kind, at = LIES[lie]
    pool = Pool(3)
    pool.spoil(name, kind, at)
    submits: list[Submit] = []
    for core in (*pool.decode_names, *pool.prefill_names):
        pool.cores[core].submit = functools.partial(_listen, submits, pool.cores[core].submit)
    for _ in range(8):
        pool.serve([pool.request(), pool.request()])
    pool.check(pool.clients)
    again = [submit for submit in submits if submit.contested_replicas]
    assert again and all(submit.resumed == (submit.start_position > 0) for submit in submits)


def _listen(
    submits: list[Submit], take: Callable[..., None], session: object, submit: Submit, now_s: float
) -> None:
    """Record `submit`, then take it."""
    submits.append(submit)
    take(session, submit, now_s)


class Lying(Schedule):
    """The random schedule of the mesh, faults included, with one replica that lies about a share of its calls."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, fault_share=0.02)
        self.liar = self.draw.choice((*self.mesh.prefill_names, *self.mesh.decode_names))
        self.share = self.draw.choice((0.2, 1.0))
        self.lies = 0

    def step(self) -> None:
        self.mesh.engines[self.liar].lie = self.lie  # it may have been restarted
        super().step()

    def lie(self, _: EngineCall) -> tuple[str, int]:
        if self.draw.random() >= self.share:
            return "", 0
        self.lies += 1
        return self.draw.choice((FOREIGN, INVALID)), self.draw.choice((0, 0, 1, 5))


def test_no_schedule_lets_a_lie_through_or_leaves_anything_behind() -> None:
    """Streams cut, processes killed, routers lost, and a lying engine: true tokens only, one end each, nothing held."""
    lies = contested = contradicted = 0
    for seed in range(10):
        schedule = Lying(seed)
        try:
            schedule.run(steps=400)
            mesh = schedule.mesh
            for client in mesh.clients:
                assert client.request.outcome is not None, f"{client.request} never ended"
                assert client.ids == mesh.oracle(client.spec)[: len(client.ids)], client.request
            assert not mesh.held(), mesh.held()
            known = [mesh.cores[name].verdicts for name in mesh.frontend_names]
        except BaseException as error:
            raise AssertionError(f"seed={seed}") from error
        lies += schedule.lies
        contested += sum(each.cross_checks_total for each in known)
        contradicted += sum(each.contradicted_total for each in known)
    assert lies > 30 and contested > 5 and contradicted > 3, (lies, contested, contradicted)
