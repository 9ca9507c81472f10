"""One forwarding core between a scripted frontend and scripted replicas.

A test sends each message by hand and checks the messages that follow.
"""

from __future__ import annotations

import random
from typing import Any

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.queue_order import OrderKey, shortest
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.dispatcher import Released
from services.router.forwarding.replicas import Replica
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.regions.callers import Callers

A, B = "a" * 32, "b" * 32
HANDOFF = b"handoff"


class Link:
    """A link without a wire: the test takes the messages of the forwarding core, and answers."""

    def __init__(self) -> None:
        self.outbox = UpwardOutbox()


class Desk:
    """One forwarding core, one prefill and two decode replicas, one frontend."""

    def __init__(
        self,
        *,
        prefills: int = 1,
        queue: int = 8,
        max_wait_s: float = 60.0,
        local: int = 0,
        order_key: OrderKey = shortest,
        on_release: Released | None = None,
        callers: Callers | None = None,
        region: str = "",
    ) -> None:
        """`callers`: of a mesh with regions. `region`: that of the frontend."""
        self.now_s = 50.0
        self.ended: list[str] = []
        self.policy = CostPolicy(
            "router-0",
            LocalPrefixIndex(),
            random.Random(5),
            block_tokens=4,
            dispatch_ahead_s=0.001,
            local_prefill_tokens_max=local,
            order_key=order_key,
        )
        self.core = ForwardingCore(
            "router-0",
            "m",
            4,
            self.policy,
            ForwardingLimits(queue, max_wait_s, 3.0, order_key=order_key),
            record=lambda item, outcome, now_s: self.ended.append(outcome),
            on_release=on_release,
            callers=callers,
        )
        self.links: dict[str, tuple[Replica[Attempt], Link]] = {}
        for index in range(prefills):
            self.add(f"prefill-{index}", "prefill")
        for index in range(2):
            self.add(f"decode-{index}", "decode")
        self.outbox = DownwardOutbox()
        self.session = self.core.open_session(
            pb.Hello(process_id="f", region=region), self.outbox, self.now_s
        )
        self.slot = 0

    def add(self, name: str, role: Any) -> None:
        replica, link = self.core.add_replica(name, role, kv_address=f"{name}:9"), Link()
        replica.connect(link)
        self.policy.local_index.add(name)
        self.links[name] = (replica, link)
        replica.on_attached(link, pb.Hello(), self.now_s)

    def ask(self, **fields: Any) -> None:
        self.session.on_request(pb.AttachRequest(**fields), self.now_s)
        self.core.after_event()
        self.check()

    def told(self) -> pb.AttachResponse:
        return self.outbox.take(self.now_s) or pb.AttachResponse()

    def up(self, name: str) -> pb.AttachRequest:
        return self.links[name][1].outbox.take(self.now_s) or pb.AttachRequest()

    def down(self, name: str, **fields: Any) -> None:
        replica, link = self.links[name]
        replica.on_response(link, pb.AttachResponse(**fields), self.now_s)
        self.check()

    def lose(self, name: str) -> None:
        replica, link = self.links[name]
        link.outbox = UpwardOutbox()
        replica.on_lost(link, "cut", self.now_s)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        wake_s = self.core.next_wake_s()
        if wake_s is not None and wake_s <= self.now_s:
            self.core.on_timer(self.now_s)
        self.check()

    def check(self) -> None:
        self.core.assert_consistent()
        self.policy.assert_consistent()

    def submit(self, request_id: str = A, tokens: int = 20, **changes: Any) -> int:
        self.slot += 1
        ids = pack_ids(range(tokens))
        submit = pb.Submit(
            slot=self.slot,
            request_id=request_id,
            attempt=1,
            token_ids=ids,
            block_hashes=blocks.pack(blocks.chain(ids, 4, "m")),
            block_tokens=4,
            model_version="m",
            credit_position=100,
            end_token_id=7,
        )
        submit.sampling.temperature = 1.0
        submit.budget.remaining_ms = changes.pop("remaining_ms", 100_000)
        submit.budget.max_output_tokens = changes.pop("output", 10)
        submit.budget.priority = changes.pop("priority", 0)
        budget_fields = {"priority_class": "band"}
        names = (
            "priority_class",
            "tenant",
            "weight",
            "sheddable",
            "shadow",
            "kv_head_room_permille",
            "purpose",
            "region",
        )
        for name in names:
            if name in changes:
                setattr(submit.budget, budget_fields.get(name, name), changes.pop(name))
        submit.contested_replicas.extend(changes.pop("contested_replicas", ()))
        if "ttft_ms" in changes:
            submit.budget.ttft_remaining_ms = changes.pop("ttft_ms")
        for name, value in changes.items():
            setattr(submit, name, value)
        self.ask(submits=[submit])
        return self.slot

    def placed(self) -> tuple[str, pb.Submit]:
        """Return the decode replica that got the request, and the request it got."""
        for name in ("decode-0", "decode-1"):
            if submits := self.up(name).submits:
                assert len(submits) == 1
                return name, submits[0]
        raise AssertionError("no decode replica got the request")

    def reserved(self, **changes: Any) -> tuple[str, int, int]:
        """Bring a request to PREFILLING; return the decode replica, its slot, and prefill's slot."""
        self.submit(**changes)
        decode, submit = self.placed()
        assert submit.phase == pb.PHASE_GENERATION_ONLY
        assert not self.up("prefill-0").submits, "prefill starts only when decode holds KV"
        self.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        (asked,) = self.up("prefill-0").submits
        assert asked.phase == pb.PHASE_CONTEXT_ONLY and asked.prefill_estimate_us > 0
        return decode, submit.slot, asked.slot

    def handed_over(self, **changes: Any) -> tuple[str, int, int]:
        """Bring a request to TRANSFERRING."""
        decode, decode_slot, prefill_slot = self.reserved(**changes)
        self.down("prefill-0", starts=[pb.Start(slot=prefill_slot)])
        self.down("prefill-0", first_tokens=[first(prefill_slot)])
        (handoff,) = self.up(decode).handoffs
        assert handoff == pb.Handoff(
            slot=decode_slot, context_phase_params=HANDOFF, first_token_count=1, kv_address="prefill-0:9"
        )
        return decode, decode_slot, prefill_slot

    def generating(self, **changes: Any) -> tuple[str, int]:
        """Bring a request to GENERATING."""
        decode, decode_slot, prefill_slot = self.handed_over(**changes)
        self.down(decode, transfers=[pb.Transfer(slot=decode_slot)])
        assert self.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_TRANSFERRED)]
        return decode, decode_slot

    def cancels(self, name: str) -> list[tuple[int, int]]:
        return [(cancel.slot, cancel.reason) for cancel in self.up(name).cancels]

    def assert_empty(self) -> None:
        assert not self.core.attempts.open
        assert not self.core.attempts.latest
        assert not any(replica.slots for replica, _ in self.links.values())
        assert not any(replica.load.state.block_reserved for replica, _ in self.links.values())
        assert not len(self.policy.backlog)
        assert self.policy.local_index.in_flight_block_count == 0


def first(slot: int, token_id: int = 1, position: int = 0) -> pb.FirstToken:
    return pb.FirstToken(
        slot=slot,
        position=position,
        token_id=token_id,
        context_phase_params=HANDOFF,
        cached_token_count=8,
        computed_token_count=12,
        prefill_us=900,
    )


def frame(slot: int, position: int, count: int) -> pb.StepFrame:
    return pb.StepFrame(
        slots=[slot],
        positions=[position],
        counts=[count],
        token_ids=pack_ids(range(position, position + count)),
    )


def with_room(desk: Desk) -> None:
    """Let both decode replicas report that they are empty."""
    for name in ("decode-0", "decode-1"):
        desk.down(
            name, load_report=pb.LoadReport(engine_ready=True, block_total_count=1000, block_free_count=1000)
        )


def other(desk: Desk, not_: str) -> tuple[str, pb.Submit]:
    """Return the other decode replica, if it got the request, and the request it got."""
    decode, submit = desk.placed()
    assert decode != not_
    return decode, submit


def asked_prefill(desk: Desk) -> tuple[str, int]:
    """Return the prefill replica that got the request, and its slot."""
    for name in ("prefill-0", "prefill-1"):
        if submits := desk.up(name).submits:
            return name, submits[0].slot
    raise AssertionError("no prefill replica got the request")
