"""Golden requests of a starting frontend: one small request through router, prefill and decode of each pool. Pure.

The requests travel over the frontend's own links, beside the requests of clients. They are in no table of the core: no
tenant, no budget, no retry and no count knows of them. Routers and replicas know them by their purpose.

State machine of one request: SENT -> ENDED. A frontend sends one for each pool, and never a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvmesh.attach import frames
from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.requests.request_spec import NOBODY, RequestSpec, Timing
from services.frontend.requests.router_peers import Peer, Peers
from services.frontend.requests.sampling import Sampling

PROMPT_TOKENS: Final = 4
OUTPUT_TOKENS: Final = 2
"""Two tokens, so that prefill and decode take part."""

TIMEOUT_S: Final = 2.0
"""Deadline of a golden request, counted from its submit."""

COMPLETED: Final = "completed"

PRIORITY_MIN: Final = -100

_CALLER: Final = Caller(
    tenant=Tenant(name=""),
    service_class=ServiceClass(
        name="",
        priority_class=0,
        runtime_max_s=TIMEOUT_S,
        default_deadline_s=TIMEOUT_S,
        max_output_tokens=OUTPUT_TOKENS,
        is_sheddable=True,
    ),
    account=NOBODY.account,
)
"""Lowest priority class, first to be shed, without a limit and without a tenant."""


@dataclass(frozen=True, slots=True)
class Target:
    """A pool that the frontend warms up, and the prompt for it."""

    pool: str
    model_version: str
    prompt_ids: Sequence[int]
    """The first PROMPT_TOKENS of them are sent. At least one."""
    vocabulary_size: int = 0


@dataclass(slots=True, eq=False)
class GoldenRequest:
    """One golden request. `ids`: its output so far."""

    pool: str
    router: str
    slot: int
    sent_s: float
    ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    """Seconds from the submit to the first token; 0: none came."""
    seconds: float = 0.0
    """Seconds from the submit to the end."""
    outcome: str = ""
    """COMPLETED, or the reason of its end. Empty: it runs."""


class GoldenRequests:
    """All golden requests of one start. `request_id` returns a new request id of 32 lower-case hexadecimal digits."""

    def __init__(self, peers: Peers[Any], block_tokens: int, request_id: Callable[[], str]) -> None:
        self.ended: Counter[str] = Counter()
        """Requests that ended, by outcome."""
        self._peers = peers
        self._block_tokens = block_tokens
        self._request_id = request_id
        self._of_pool: dict[str, GoldenRequest] = {}
        self._open: dict[tuple[str, int], GoldenRequest] = {}
        """By router and slot."""

    def __len__(self) -> int:
        """Return the number of requests that run."""
        return len(self._open)

    @property
    def all(self) -> list[GoldenRequest]:
        """All requests, in the order of their submits."""
        return list(self._of_pool.values())

    def send(self, targets: Iterable[Target], now_s: float) -> None:
        """Submit a request to each pool that has had none, if a router of it is up and can place."""
        for target in targets:
            if target.pool in self._of_pool or not self._peers.can_place(target.pool, target.model_version):
                continue
            peer = self._peers.choose(target.pool, "", model_version=target.model_version)
            if peer is not None and peer.takes_new:
                self._submit(peer, target, now_s)

    def on_response(self, router: str, message: pb.AttachResponse, now_s: float) -> None:
        """Take the rows of one message that belong to golden requests."""
        for row in message.first_tokens:
            self._on_token(router, row.slot, row.position, [row.token_id], now_s)
        for each in frames.rows(message.frame):
            self._on_token(router, each.slot, each.position, frames.unpack_ids(each.token_ids), now_s)
        for finish in message.finishes:
            self._on_finish(router, finish, now_s)
        for failure in message.failures:
            self._end((router, failure.slot), f"failure {name_of(pb.Failure.Code, failure.code)}", now_s)
        for refusal in message.refusals:
            self._end((router, refusal.slot), f"refusal {name_of(pb.Refusal.Reason, refusal.reason)}", now_s)

    def on_lost(self, router: str, now_s: float) -> None:
        """End the requests at a router that was lost."""
        for key in [key for key in self._open if key[0] == router]:
            self._end(key, "router lost", now_s)

    def give_up(self, now_s: float) -> None:
        """Cancel the requests that still run: the frontend serves without them."""
        for name, slot in list(self._open):
            peer = self._peers.get(name)
            if peer is not None and peer.link.is_up:
                peer.link.outbox.cancel(slot, pb.Cancel.REASON_DEADLINE)
            self._end((name, slot), "timeout", now_s)

    def _submit(self, peer: Peer[Any], target: Target, now_s: float) -> None:
        ids = (list(target.prompt_ids) * PROMPT_TOKENS)[:PROMPT_TOKENS]
        deadline_s = now_s + TIMEOUT_S
        spec = RequestSpec(
            caller=_CALLER,
            request_id=self._request_id(),
            prompt_ids=frames.pack_ids(ids),
            sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
            max_output_tokens=OUTPUT_TOKENS,
            pool=target.pool,
            model_version=target.model_version,
            end_token_ids=frozenset(),
            priority=PRIORITY_MIN,
            timing=Timing(arrived_s=now_s, deadline_s=deadline_s),
        )
        slot = peer.link.outbox.new_slot()
        row = spec.submission(
            slot,
            1,
            1,
            (),
            block_tokens=self._block_tokens,
            credit_position=OUTPUT_TOKENS,
            resumed=False,
            vocabulary_size=target.vocabulary_size,
        )
        row.budget.purpose = budget_pb2.PURPOSE_WARM_UP
        peer.link.outbox.submit(row, deadline_s)
        golden = GoldenRequest(target.pool, peer.name, slot, now_s)
        self._of_pool[target.pool] = self._open[peer.name, slot] = golden

    def _on_token(self, router: str, slot: int, position: int, ids: Sequence[int], now_s: float) -> None:
        golden = self._open.get((router, slot))
        if golden is None or position > len(golden.ids):
            return
        golden.ids[position:] = ids
        golden.first_token_s = golden.first_token_s or now_s - golden.sent_s

    def _on_finish(self, router: str, finish: pb.Finish, now_s: float) -> None:
        golden = self._open.get((router, finish.slot))
        if golden is None:
            return
        is_whole = bool(golden.ids) and len(golden.ids) == finish.end_position
        is_good = is_whole and finish.reason in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN)
        outcome = COMPLETED if is_good else f"finish {name_of(pb.Finish.Reason, finish.reason)}"
        self._end((router, finish.slot), outcome, now_s)

    def _end(self, key: tuple[str, int], outcome: str, now_s: float) -> None:
        golden = self._open.pop(key, None)
        if golden is not None:
            golden.outcome, golden.seconds = outcome, now_s - golden.sent_s
            self.ended[outcome] += 1
