"""The relay step by step: what each message makes it send, in every phase of a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import FrameError, pack_ids
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.admission import RelayLimits
from services.router.mirror import PrefixMirror
from services.router.placement import KappaPolicy
from services.router.policy import Placement, PlacementRequest, PoolView, Wait
from services.router.relay import Relay
from services.router.relayed import Relayed
from services.router.replicas import Replica
from services.router.rows import US_MAX, as_us

A, B = "a" * 32, "b" * 32
HANDOFF = b"handoff"


class Link:
    """A link without a wire: the test takes what the relay wrote, and answers."""

    def __init__(self) -> None:
        self.outbox = UpwardOutbox()


class Desk:
    """One relay, one prefill and two decode replicas, one frontend."""

    def __init__(
        self, *, prefills: int = 1, queue: int = 8, max_wait_s: float = 60.0, local: int = 0
    ) -> None:
        self.now_s = 50.0
        self.ended: list[str] = []
        self.policy = KappaPolicy(
            "router-0",
            PrefixMirror(),
            random.Random(5),
            block_tokens=4,
            dispatch_ahead_s=0.001,
            local_prefill_tokens_max=local,
        )
        self.relay = Relay(
            "router-0",
            "m",
            4,
            self.policy,
            RelayLimits(queue, max_wait_s, 3.0),
            record=lambda item, outcome, now_s: self.ended.append(outcome),
        )
        self.links: dict[str, tuple[Replica, Link]] = {}
        for index in range(prefills):
            self.add(f"prefill-{index}", "prefill")
        for index in range(2):
            self.add(f"decode-{index}", "decode")
        self.outbox = DownwardOutbox()
        self.session = self.relay.open_session(pb.Hello(process_id="f"), self.outbox, self.now_s)
        self.slot = 0

    def add(self, name: str, role: Any) -> None:
        replica, link = self.relay.add_replica(name, role, kv_address=f"{name}:9"), Link()
        replica.connect(link)
        self.policy.mirror.add(name)
        self.links[name] = (replica, link)
        replica.on_attached(link, pb.Hello(), self.now_s)

    def ask(self, **fields: Any) -> None:
        self.session.on_request(pb.AttachRequest(**fields), self.now_s)
        self.relay.after_event()
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
        wake_s = self.relay.next_wake_s()
        if wake_s is not None and wake_s <= self.now_s:
            self.relay.on_timer(self.now_s)
        self.check()

    def check(self) -> None:
        self.relay.assert_consistent()
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
        for name in ("band", "tenant", "weight", "sheddable", "shadow", "kv_head_room_permille"):
            if name in changes:
                setattr(submit.budget, name, changes.pop(name))
        if "ttft_ms" in changes:
            submit.budget.ttft_remaining_ms = changes.pop("ttft_ms")
        for name, value in changes.items():
            setattr(submit, name, value)
        self.ask(submits=[submit])
        return self.slot

    def placed(self) -> tuple[str, pb.Submit]:
        """Return the decode replica that was asked, and what it got."""
        for name in ("decode-0", "decode-1"):
            if submits := self.up(name).submits:
                assert len(submits) == 1
                return name, submits[0]
        raise AssertionError("nobody was asked")

    def reserved(self, **changes: Any) -> tuple[str, int, int]:
        """Bring a request to PREFILLING; return the decode replica, its slot, prefill's slot."""
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
        assert not self.relay.holdings.items
        assert not self.relay.holdings.live
        assert not any(replica.slots for replica, _ in self.links.values())
        assert not any(replica.state.block_reserved for replica, _ in self.links.values())
        assert not len(self.policy.backlog)
        assert self.policy.mirror.expected_block_count == 0


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


def test_a_request_goes_its_way() -> None:
    """Accepted, placed, started, first token without the handoff, transferred, tokens, finished."""
    desk = Desk()
    slot = desk.submit(explain=True, credit_position=3)
    told = desk.told()
    assert [row.slot for row in told.acceptances] == [slot]
    (placement,) = told.placements
    assert placement.prefill_replica == "prefill-0" and placement.prompt_block_count == 5
    assert [one.replica for one in placement.candidates] == ["prefill-0"]
    decode, submit = desk.placed()
    assert placement.decode_replica == decode and submit.credit_position == 3
    assert 99_000 < submit.budget.remaining_ms < 100_000
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    (asked,) = desk.up("prefill-0").submits
    desk.down(
        "prefill-0",
        acceptances=[pb.Acceptance(slot=asked.slot)],
        starts=[pb.Start(slot=asked.slot, queue_us=7)],
    )
    assert [(row.slot, row.queue_us) for row in desk.told().starts] == [(slot, 7)]
    desk.down("prefill-0", first_tokens=[first(asked.slot)])
    told = desk.told()
    assert [(row.slot, row.token_id, row.context_phase_params) for row in told.first_tokens] == [
        (slot, 1, b"")
    ]
    assert desk.policy.mirror.blocks_of("prefill-0") == 5
    desk.down(
        decode, starts=[pb.Start(slot=submit.slot)], transfers=[pb.Transfer(slot=submit.slot, transfer_us=4)]
    )
    assert desk.cancels("prefill-0") == [(asked.slot, pb.Cancel.REASON_TRANSFERRED)]
    told = desk.told()
    assert [row.transfer_us for row in told.transfers] == [4] and not told.starts
    desk.down(decode, frame=frame(submit.slot, 1, 2))
    desk.down(decode, frame=frame(submit.slot, 1, 3))
    rows = desk.told().frame
    assert (list(rows.positions), list(rows.counts)) == ([1, 3], [2, 1]), "what is known is not sent again"
    desk.ask(credit_slots=[slot], credit_positions=[9])
    sent = desk.up(decode)
    assert (list(sent.credit_slots), list(sent.credit_positions)) == ([submit.slot], [9])
    desk.down(
        decode,
        frame=frame(submit.slot, 4, 6),
        finishes=[pb.Finish(slot=submit.slot, end_position=10, reason=pb.Finish.REASON_LENGTH)],
    )
    told = desk.told()
    assert list(told.frame.counts) == [6]
    assert [(row.slot, row.end_position, row.reason) for row in told.finishes] == [
        (slot, 10, pb.Finish.REASON_LENGTH)
    ]
    desk.assert_empty()
    assert desk.ended == ["REASON_LENGTH"]


@pytest.mark.parametrize(("token_id", "output", "reason"), [(7, 10, "END_TOKEN"), (1, 1, "LENGTH")])
def test_a_first_token_that_ends_the_request_needs_no_decode(token_id: int, output: int, reason: str) -> None:
    """Both sides are released without a generation, and the finish follows the token."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.reserved(output=output)
    desk.down("prefill-0", first_tokens=[first(prefill_slot, token_id)])
    told = desk.told()
    assert len(told.first_tokens) == 1
    assert [(row.end_position, row.reason) for row in told.finishes] == [
        (1, pb.Finish.Reason.Value(f"REASON_{reason}"))
    ]
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_COMPLETE)]
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_COMPLETE)]
    desk.assert_empty()


def test_without_prefill_decode_runs_the_prompt() -> None:
    """A local decode: one submit, its start and first token go up, no handoff anywhere."""
    desk = Desk(prefills=0)
    slot = desk.submit()
    decode, submit = desk.placed()
    assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)], starts=[pb.Start(slot=submit.slot)])
    desk.down(
        decode, first_tokens=[pb.FirstToken(slot=submit.slot, token_id=1)], frame=frame(submit.slot, 1, 9)
    )
    told = desk.told()
    assert told.placements[0].prefill_replica == ""
    assert len(told.starts) == len(told.first_tokens) == 1 and list(told.frame.positions) == [1]
    assert told.first_tokens[0].slot == slot
    desk.down(decode, finishes=[pb.Finish(slot=submit.slot, end_position=10, reason=pb.Finish.REASON_LENGTH)])
    desk.assert_empty()


def test_a_refused_reservation_is_tried_once_elsewhere_and_then_waits() -> None:
    """The other decode replica is asked at once; when it refuses, too, the request waits a little at its band's head."""
    desk = Desk()
    desk.submit()
    asked = []
    for _ in range(2):
        decode, submit = desk.placed()
        asked.append(decode)
        desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    assert sorted(asked) == ["decode-0", "decode-1"]
    assert len(desk.relay.queue) == 1
    desk.wait(0.04)
    assert not desk.up("decode-0").submits and not desk.up("decode-1").submits
    desk.wait(0.02)
    desk.placed()
    told = desk.told()
    assert [bool(row.decode_replica) for row in told.placements] == [True, False, True, False, True]
    assert not told.refusals and len(told.acceptances) == 1


def with_room(desk: Desk) -> None:
    """Let both decode replicas report that they are empty."""
    for name in ("decode-0", "decode-1"):
        desk.down(
            name, load_report=pb.LoadReport(engine_ready=True, block_total_count=1000, block_free_count=1000)
        )


def test_prefill_does_not_wait_for_a_decode_that_has_ample_room() -> None:
    """Both get the attempt at once; the first token may come before decode's acceptance, the handoff follows the submit."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    assert [row.slot for row in desk.up(decode).handoffs] == [submit.slot]
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    assert not desk.up("prefill-0").submits, "submitted twice"


def test_a_decode_that_refuses_beside_a_running_prefill_costs_the_prefill() -> None:
    """The prefill is cancelled, and the attempt is placed on the other decode replica."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    again, _ = desk.placed()
    assert again != decode
    told = desk.up("prefill-0")
    assert [row.slot for row in told.cancels] == [prefill.slot] and len(told.submits) == 1
    assert not desk.told().refusals


def test_a_decode_that_refuses_behind_the_first_token_fails_the_attempt() -> None:
    """A token is out: the frontend resumes behind it, and the handoff is released."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    (failure,) = desk.told().failures
    assert failure.code == pb.Failure.CODE_HANDOFF_LOST and not failure.untouched
    assert [row.slot for row in desk.up("prefill-0").cancels] == [prefill.slot]


def test_other_refusals_go_up_and_free_the_other_side() -> None:
    """Decode's INVALID and prefill's QUEUE_FULL end the attempt with their numbers."""
    desk = Desk()
    slot = desk.submit()
    decode, submit = desk.placed()
    refusal = pb.Refusal(
        slot=submit.slot, reason=pb.Refusal.REASON_INVALID, message="too long", field="token_ids"
    )
    desk.down(decode, refusals=[refusal])
    (told,) = desk.told().refusals
    assert (told.slot, told.reason, told.field) == (slot, pb.Refusal.REASON_INVALID, "token_ids")
    decode, decode_slot, prefill_slot = desk.reserved(request_id=B)
    refusal = pb.Refusal(slot=prefill_slot, reason=pb.Refusal.REASON_QUEUE_FULL, retry_after_ms=70)
    desk.down("prefill-0", refusals=[refusal])
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_SUPERSEDED)]
    assert [row.retry_after_ms for row in desk.told().refusals] == [70]
    desk.assert_empty()


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_cancel_ends_it_everywhere_in_every_phase(phase: str) -> None:
    """The reason reaches whoever has a part of it, and nothing is said to the frontend."""
    desk = Desk()
    getattr(desk, phase)()
    asked = {name for name in desk.links if desk.links[name][0].slots}
    desk.told()
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    for name in ("prefill-0", "decode-0", "decode-1"):
        request = desk.up(name)
        if phase == "submit":
            assert not request.submits and not request.cancels, "an unsent submit is taken back"
        elif name in asked:
            assert [cancel.reason for cancel in request.cancels] == [pb.Cancel.REASON_CLIENT]
    assert desk.told() == pb.AttachResponse()
    desk.assert_empty()


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_lost_frontend_orphans_what_runs_and_cancels_the_rest(phase: str) -> None:
    """Queued work and prefills end at once; a running decode lives for the orphan time, then it is cancelled."""
    desk = Desk()
    getattr(desk, phase)()
    for name in desk.links:
        desk.up(name)
    desk.session.on_closed(desk.now_s)
    desk.check()
    if phase in ("submit", "reserved"):
        desk.assert_empty()
        return
    assert desk.relay.holdings.orphan_count == 1
    (decode,) = [name for name in ("decode-0", "decode-1") if desk.links[name][0].slots]
    desk.down(decode, frame=frame(1, 1, 3))
    desk.wait(2.9)
    assert not desk.cancels(decode)
    desk.wait(0.2)
    assert desk.cancels(decode) == [(1, pb.Cancel.REASON_ABANDONED)]
    assert bool(desk.cancels("prefill-0")) == (phase == "handed_over")
    desk.assert_empty()


def test_an_adoption_takes_over_an_orphan_of_this_router() -> None:
    """The adopt goes down, the old slot's finish ends the orphan, tokens go on at the new one."""
    desk = Desk()
    decode, old_slot = desk.generating()
    desk.session.on_closed(desk.now_s)
    desk.outbox = DownwardOutbox()
    desk.session = desk.relay.open_session(pb.Hello(process_id="f"), desk.outbox, desk.now_s)
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, position=2, credit_position=9, decode_replica=decode)
    desk.ask(adopts=[adopt])
    (sent,) = desk.up(decode).adopts
    assert (sent.position, sent.credit_position, sent.attempt) == (2, 9, 1) and sent.slot > old_slot
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        frame=frame(sent.slot, 2, 3),
        finishes=[pb.Finish(slot=old_slot, end_position=4, reason=pb.Finish.REASON_ADOPTED)],
    )
    told = desk.told()
    assert [row.slot for row in told.acceptances] == [1] and list(told.frame.positions) == [2]
    assert desk.relay.holdings.orphan_count == 0
    desk.down(decode, finishes=[pb.Finish(slot=sent.slot, end_position=5, reason=pb.Finish.REASON_LENGTH)])
    assert [row.end_position for row in desk.told().finishes] == [5]
    desk.assert_empty()


def test_an_adoption_while_the_blocks_move_keeps_the_handoff() -> None:
    """The prefill's slot moves to the adopter and is released when decode says that it has the blocks."""
    desk = Desk()
    decode, old_slot, prefill_slot = desk.handed_over()
    desk.slot += 1
    desk.ask(adopts=[pb.Adopt(slot=desk.slot, request_id=A, attempt=1, position=1, decode_replica=decode)])
    (sent,) = desk.up(decode).adopts
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        finishes=[pb.Finish(slot=old_slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)],
    )
    assert [row.reason for row in desk.told().finishes] == [pb.Finish.REASON_ADOPTED]
    assert not desk.cancels("prefill-0")
    desk.down(decode, transfers=[pb.Transfer(slot=sent.slot)])
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_TRANSFERRED)]


def test_an_adoption_that_overtakes_the_transfer_releases_the_old_handoff() -> None:
    """When the adopter hears of the transfer before the old slot's end, prefill is told of it all the same."""
    desk = Desk()
    decode, old_slot, prefill_slot = desk.handed_over()
    desk.slot += 1
    desk.ask(adopts=[pb.Adopt(slot=desk.slot, request_id=A, attempt=1, position=1, decode_replica=decode)])
    (sent,) = desk.up(decode).adopts
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        transfers=[pb.Transfer(slot=sent.slot)],
        finishes=[pb.Finish(slot=old_slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)],
    )
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_TRANSFERRED)]


def test_an_adopt_that_was_not_sent_when_its_frontend_is_lost_is_never_sent() -> None:
    """It would take the slot from whoever adopts through another router. One on its way is not cancelled."""
    desk = Desk()
    adopts = [
        pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0", adoption=3),
        pb.Adopt(slot=2, request_id=B, attempt=1, decode_replica="decode-1"),
    ]
    desk.ask(adopts=adopts)
    (sent,) = desk.up("decode-0").adopts
    assert sent.adoption == 3
    desk.session.on_closed(desk.now_s)
    assert desk.up("decode-0") == desk.up("decode-1") == pb.AttachRequest()
    refusal = pb.Refusal(slot=sent.slot, reason=pb.Refusal.REASON_SUPERSEDED)
    desk.down("decode-0", refusals=[refusal])
    desk.assert_empty()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_adoption_of_a_lower_attempt_does_not_hide_a_higher_one(is_late: bool) -> None:
    """Whether the higher attempt came before the adopt or before decode's answer: it stays the known one."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        desk.links[name][0].is_draining = is_late
    if is_late:
        desk.slot = 1
        desk.ask(adopts=[pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")])
        (sent,) = desk.up("decode-0").adopts
        desk.links["decode-0"][0].is_draining = False
        desk.submit(attempt=257)
        desk.up("decode-0")
        desk.down("decode-0", acceptances=[pb.Acceptance(slot=sent.slot)])
        assert desk.cancels("decode-0") == [(sent.slot, pb.Cancel.REASON_SUPERSEDED)]
    else:
        desk.submit(attempt=257)
        desk.slot += 1
        desk.ask(adopts=[pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="decode-0")])
        assert not desk.up("decode-0").adopts and not desk.up("decode-1").adopts
    assert desk.relay.holdings.live[A].attempt == 257
    assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_SUPERSEDED]


def test_an_adoption_nobody_knows_is_refused() -> None:
    """By the router for an unknown or unreachable replica, by decode for an unknown request."""
    desk = Desk()
    unknown = pb.Refusal.REASON_UNKNOWN_REQUEST
    adopts = [
        pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-9"),
        pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="prefill-0"),
        pb.Adopt(slot=3, request_id=A, attempt=1, decode_replica="decode-0"),
        pb.Adopt(slot=4, request_id=B, attempt=1, decode_replica="decode-1"),
    ]
    desk.ask(adopts=adopts)
    # A router that just started knows nobody yet: its frontend asks again, where decode's own answer would end the matter.
    no_replica = pb.Refusal.REASON_NO_REPLICA
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(1, no_replica), (2, no_replica)]
    (sent,) = desk.up("decode-0").adopts
    desk.down("decode-0", refusals=[pb.Refusal(slot=sent.slot, reason=unknown)])
    desk.lose("decode-1")
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(3, unknown), (4, unknown)]
    desk.assert_empty()


@pytest.mark.parametrize("phase", ["handed_over", "generating"])
def test_a_lost_decode_fails_what_it_had(phase: str) -> None:
    """The frontend is told whether an engine had it; prefill is freed, at once or when nobody can adopt any more."""
    desk = Desk()
    reached: Callable[[], tuple[Any, ...]] = getattr(desk, phase)
    decode = reached()[0]
    desk.up("prefill-0")
    desk.lose(decode)
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica) == (pb.Failure.CODE_REPLICA_LOST, decode)
    assert not failure.untouched
    if phase == "handed_over":
        assert not desk.cancels("prefill-0"), "an orphan may be pulling the blocks"
        desk.wait(3.1)
    assert [reason for _, reason in desk.cancels("prefill-0")] == {
        "handed_over": [pb.Cancel.REASON_COMPLETE],
        "generating": [],
    }[phase]
    desk.assert_empty()


def test_a_lost_prefill_fails_what_it_had_not_handed_over() -> None:
    """Before the first token the attempt fails; afterwards decode goes on and will say if it misses the blocks."""
    desk = Desk()
    decode, decode_slot, _ = desk.handed_over()
    desk.told()
    desk.lose("prefill-0")
    assert not desk.told().failures
    desk.down(decode, failures=[pb.Failure(slot=decode_slot, code=pb.Failure.CODE_HANDOFF_LOST)])
    (failure,) = desk.told().failures
    assert failure.code == pb.Failure.CODE_HANDOFF_LOST and not failure.untouched
    desk.links["prefill-0"][0].on_attached(desk.links["prefill-0"][1], pb.Hello(), desk.now_s)
    decode, decode_slot, prefill_slot = desk.reserved(request_id=B)
    desk.down("prefill-0", starts=[pb.Start(slot=prefill_slot)])
    desk.lose("prefill-0")
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica, failure.untouched) == (
        pb.Failure.CODE_REPLICA_LOST,
        "prefill-0",
        False,
    )
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_SUPERSEDED)]
    desk.assert_empty()


@pytest.mark.parametrize("part", ["finishes", "failures", "refusals"])
def test_a_number_of_a_newer_replica_ends_the_attempt_and_not_the_stream(part: str) -> None:
    """An unknown finish, failure or refusal goes up as it came; the attempt is over and nothing of it is left."""
    desk = Desk()
    decode, slot = desk.generating()
    rows = {
        "finishes": pb.Finish(slot=slot, end_position=1, reason=99),  # type: ignore[arg-type]
        "failures": pb.Failure(slot=slot, code=99),  # type: ignore[arg-type]
        "refusals": pb.Refusal(slot=slot, reason=99),  # type: ignore[arg-type]
    }
    desk.told()
    desk.down(decode, **{part: [rows[part]]})
    told = desk.told()
    numbers: list[int] = [row.reason for row in told.finishes]
    numbers += [row.reason for row in told.refusals]
    numbers += [row.code for row in told.failures]
    assert numbers == [99]
    assert desk.ended == ["UNKNOWN"]
    desk.assert_empty()


@pytest.mark.parametrize("microseconds", [10**12, 2**64 - 1])
def test_a_prefill_that_lies_about_its_time_teaches_nothing_impossible(microseconds: int) -> None:
    """A first token's counts and time are cut to what can be, for the cost model and for the frontend alike."""
    desk = Desk()
    _, _, prefill_slot = desk.reserved()
    desk.wait(0.5)
    desk.told()
    liar = first(prefill_slot)
    liar.prefill_us, liar.cached_token_count, liar.computed_token_count = microseconds, 2**32 - 1, 2**32 - 1
    desk.down("prefill-0", first_tokens=[liar])
    (row,) = desk.told().first_tokens
    assert (row.cached_token_count, row.computed_token_count) == (20, 0) and row.prefill_us <= 500_000
    assert desk.policy.measured_total_s <= 0.5
    assert desk.policy.cold_prefill_s(20) < 1.0
    desk.reserved(request_id=B)


def test_times_beyond_the_wire_are_cut() -> None:
    """What a replica claims to have waited is bounded, and so is an estimate beyond all measure."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.reserved()
    desk.told()
    desk.down("prefill-0", starts=[pb.Start(slot=prefill_slot, queue_us=2**64 - 1)])
    desk.down("prefill-0", first_tokens=[first(prefill_slot)])
    desk.down(decode, transfers=[pb.Transfer(slot=decode_slot, transfer_us=2**64 - 1)])
    told = desk.told()
    assert [told.starts[0].queue_us, told.transfers[0].transfer_us] == [US_MAX, US_MAX]
    for seconds, microseconds in ((1e30, US_MAX), (float("inf"), US_MAX), (-1.0, 0), (float("nan"), 0)):
        assert as_us(seconds) == microseconds


def test_a_bug_with_one_attempt_fails_that_attempt_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the choice or the release raises: it fails with INTERNAL, is logged, and its neighbours are placed."""
    desk = Desk()
    desk.links["decode-1"][0].is_draining = True
    real_place, real_submit = desk.policy.place, desk.relay.releases._submit

    def place(request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        if request.request_id == A:
            raise ZeroDivisionError
        return real_place(request, view, now_s)

    def submit(item: Relayed, slot: int, phase: pb.Phase.ValueType) -> pb.Submit:
        if item.request_id == B:
            raise ValueError
        return real_submit(item, slot, phase)

    desk.policy.place = place  # type: ignore[method-assign]
    desk.relay.releases._submit = submit  # type: ignore[method-assign]
    desk.submit(A)
    desk.submit(B)
    desk.submit("c" * 32)
    told = desk.told()
    assert [(row.slot, row.code, row.untouched) for row in told.failures] == [
        (1, pb.Failure.CODE_INTERNAL, True),
        (2, pb.Failure.CODE_INTERNAL, True),
    ]
    assert len(caplog.records) == 2
    (submitted,) = desk.up("decode-0").submits
    assert submitted.request_id == "c" * 32


def test_a_gap_in_the_log_fails_the_attempt() -> None:
    """Tokens that are missing, in a frame or at the finish, are never papered over."""
    for rows in (
        {"frame": frame(1, 2, 1)},
        {"finishes": [pb.Finish(slot=1, end_position=5, reason=pb.Finish.REASON_LENGTH)]},
    ):
        desk = Desk()
        decode, decode_slot = desk.generating()
        assert decode_slot == 1
        desk.down(decode, **rows)
        (failure,) = desk.told().failures
        assert (failure.code, failure.replica) == (pb.Failure.CODE_GAP, decode)
        assert desk.cancels(decode) == [(1, pb.Cancel.REASON_SUPERSEDED)]
        desk.assert_empty()


def test_a_malformed_frame_ends_the_stream() -> None:
    """Columns that disagree raise before anything is passed on."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.told()
    with pytest.raises(FrameError):
        desk.down(
            decode, frame=pb.StepFrame(slots=[decode_slot], positions=[1], counts=[2], token_ids=b"1234")
        )
    assert desk.told() == pb.AttachResponse()


def test_a_higher_attempt_takes_the_place_of_a_lower_one() -> None:
    """The lower one ends with SUPERSEDED wherever it is; equal and lower ones are refused."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.told()
    desk.submit(attempt=2, start_position=1)
    told = desk.told()
    assert [row.reason for row in told.finishes] == [pb.Finish.REASON_SUPERSEDED]
    assert desk.up(decode).cancels[0] == pb.Cancel(slot=decode_slot, reason=pb.Cancel.REASON_SUPERSEDED)
    for attempt in (1, 2):
        desk.submit(attempt=attempt)
        assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_SUPERSEDED]


def test_what_cannot_be_served_is_refused_before_anything_is_held() -> None:
    """Deadline, version, blocks, output, replicas, drain: each has its reason, and no replica hears of it."""
    reasons = pb.Refusal
    desk = Desk()
    for changes, reason, field in (
        ({"remaining_ms": 0}, reasons.REASON_DEADLINE, ""),
        ({"ttft_ms": 0}, reasons.REASON_DEADLINE, ""),
        ({"model_version": "old"}, reasons.REASON_STALE_SNAPSHOT, ""),
        ({"block_tokens": 5, "block_hashes": b"x" * 32}, reasons.REASON_INVALID, "block_tokens"),
        ({"output": 0}, reasons.REASON_INVALID, "budget.max_output_tokens"),
    ):
        desk.submit(**changes)
        (refusal,) = desk.told().refusals
        assert (refusal.reason, refusal.field) == (reason, field), changes
    for name in ("decode-0", "decode-1"):
        desk.links[name][0].is_listed = False
    desk.submit()
    assert [row.reason for row in desk.told().refusals] == [reasons.REASON_NO_REPLICA]
    desk.relay.drain()
    desk.submit()
    assert [row.reason for row in desk.told().refusals] == [reasons.REASON_DRAINING]
    assert all(desk.up(name) == pb.AttachRequest() for name in desk.links)
    desk.assert_empty()


def test_waiting_ends_by_deadline_or_by_the_queues_patience() -> None:
    """What is not placed in time is refused; a full queue refuses at once and says when to come again."""
    desk = Desk(queue=3, max_wait_s=1.0)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    for request, changes in (("1", {}), ("2", {"remaining_ms": 500}), ("3", {"ttft_ms": 300}), ("4", {})):
        desk.submit(request_id=request * 32, **changes)
    (refusal,) = desk.told().refusals
    assert (refusal.slot, refusal.reason) == (4, pb.Refusal.REASON_QUEUE_FULL) and refusal.retry_after_ms > 0
    seen = []
    for _ in range(12):
        desk.wait(0.1)
        seen += [(row.slot, row.reason) for row in desk.told().refusals]
    assert seen == [
        (3, pb.Refusal.REASON_DEADLINE),
        (2, pb.Refusal.REASON_DEADLINE),
        (1, pb.Refusal.REASON_QUEUE_TIMEOUT),
    ]
    desk.assert_empty()


def test_higher_bands_go_first_and_a_resumed_one_at_the_head_of_its_band() -> None:
    """With one request's room at prefill, the order of release is bands, then first come, resumed ones before."""
    desk = Desk()
    desk.reserved(request_id="0" * 32)
    for name, changes in (("1", {}), ("2", {"band": 6}), ("3", {"resumed": True, "attempt": 2})):
        desk.submit(request_id=name * 32, **changes)
    order = []
    for _ in range(3):
        current = max(desk.links["prefill-0"][0].slots)
        desk.down("prefill-0", starts=[pb.Start(slot=current)])
        desk.wait(0.01)
        decode, submit = desk.placed()
        order.append(submit.request_id[0])
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        desk.up("prefill-0")
    assert order == ["2", "3", "1"]


def test_resumed_attempts_wait_in_their_order_and_are_bounded_too() -> None:
    """They go ahead of new ones, first come first served; beyond the queue's places they are refused as all others."""
    desk = Desk(queue=2)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    for number in range(8):
        desk.submit(request_id=f"{number:032x}", resumed=number % 2 == 1, attempt=2)
    assert [item.slot for item in desk.relay.queue] == [2, 4, 1, 3]
    refusals = desk.told().refusals
    assert [row.slot for row in refusals] == [5, 6, 7, 8]
    assert all(row.reason == pb.Refusal.REASON_QUEUE_FULL and row.retry_after_ms for row in refusals)


def test_a_masked_replica_keeps_its_streams() -> None:
    """A lost lease keeps new requests away and cuts nothing."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.links[decode][0].is_listed = False
    other = "decode-1" if decode == "decode-0" else "decode-0"
    for index in range(4):
        desk.submit(request_id=f"{index:032x}")
        desk.wait(0.01)
    assert not desk.up(decode).submits and desk.up(other).submits
    desk.down(decode, frame=frame(decode_slot, 1, 2))
    assert list(desk.told().frame.counts) == [2]


def test_a_replica_with_a_new_boot_takes_the_name_and_the_old_one_ends_what_it_has() -> None:
    """Two processes of one name for a moment: new requests go to the new one."""
    desk = Desk(prefills=1)
    decode, decode_slot = desk.generating()
    old, old_link = desk.links[decode]
    desk.relay.retire_replica(old)
    desk.add(decode, "decode")
    old.on_response(old_link, pb.AttachResponse(frame=frame(decode_slot, 1, 2)), desk.now_s)
    assert list(desk.told().frame.counts) == [2]
    old.on_lost(old_link, "gone", desk.now_s)
    assert [row.code for row in desk.told().failures] == [pb.Failure.CODE_REPLICA_LOST]
    desk.relay.remove_replica(old, desk.now_s)
    assert desk.relay.replicas[decode] is desk.links[decode][0]
    desk.assert_empty()


def test_slots_must_ascend_within_a_stream() -> None:
    """A repeated slot, or one for two purposes, is a broken protocol."""
    desk = Desk()
    desk.submit()
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")
    with pytest.raises(FrameError):
        desk.ask(adopts=[adopt])
    with pytest.raises(FrameError):
        desk.ask(credit_slots=[1], credit_positions=[])


def other(desk: Desk, not_: str) -> tuple[str, pb.Submit]:
    """Return the decode replica that was asked instead, and what it got."""
    decode, submit = desk.placed()
    assert decode != not_
    return decode, submit


@pytest.mark.parametrize("how", ["lost", "draining", "untouched", "silent"])
@pytest.mark.parametrize("by", ["decode", "prefill"])
def test_what_no_engine_had_goes_elsewhere_without_a_word_to_its_frontend(how: str, by: str) -> None:
    """Given back, lost on the way or never answered: placed on the other replicas at once, and nothing stays behind."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    prefill, prefill_slot = "", 0
    if by == "prefill":
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        prefill, prefill_slot = asked_prefill(desk)
    name, slot = (decode, submit.slot) if by == "decode" else (prefill, prefill_slot)
    desk.told()
    if how == "lost":
        desk.lose(name)
    elif how == "draining":
        desk.down(name, refusals=[pb.Refusal(slot=slot, reason=pb.Refusal.REASON_DRAINING)])
    elif how == "untouched":
        failure = pb.Failure(slot=slot, code=pb.Failure.CODE_ENGINE_LOST, untouched=True)
        desk.down(name, failures=[failure])
    else:
        desk.wait(2.9)
        assert not desk.up(name).cancels
        desk.wait(0.2 if by == "decode" else 60.0)
        assert [row.slot for row in desk.up(name).cancels] == [slot]
    if by == "decode":
        _, submit = other(desk, name)
    else:
        decode, submit = desk.placed()
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        assert asked_prefill(desk)[0] != name
    assert submit.attempt == 1
    told = desk.told()
    assert [bool(row.decode_replica) for row in told.placements] == [False, True], (
        "back in the queue, and out"
    )
    assert not told.failures and not told.refusals
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    desk.assert_empty()


def asked_prefill(desk: Desk) -> tuple[str, int]:
    """Return the prefill replica that was asked, and its slot."""
    for name in ("prefill-0", "prefill-1"):
        if submits := desk.up(name).submits:
            return name, submits[0].slot
    raise AssertionError("no prefill was asked")


def test_a_replica_that_still_holds_what_was_taken_from_it_costs_an_attempt_and_not_the_request() -> None:
    """Placed again where it had been: the old slot is not given up yet. The frontend hears of a loss, not of a rival."""
    desk = Desk()
    desk.submit()
    decode, _ = desk.placed()
    desk.lose(decode)
    again, submit = other(desk, decode)
    desk.down(again, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_SUPERSEDED)])
    told = desk.told()
    assert not told.refusals
    assert [(row.code, row.untouched) for row in told.failures] == [(pb.Failure.CODE_REPLICA_LOST, True)]
    desk.assert_empty()


def test_placing_again_ends() -> None:
    """A mesh that gives everything back is told on: the frontend decides."""
    desk = Desk(prefills=2)
    slot = desk.submit()
    for _ in range(4):
        decode, submit = desk.placed()
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        name, prefill_slot = asked_prefill(desk)
        refusal = pb.Refusal(slot=prefill_slot, reason=pb.Refusal.REASON_DRAINING)
        desk.down(name, refusals=[refusal])
    (told,) = desk.told().refusals
    assert (told.slot, told.reason) == (slot, pb.Refusal.REASON_DRAINING)
    desk.assert_empty()


def test_a_silent_decode_behind_the_first_token_fails_the_attempt() -> None:
    """It never said that it took the attempt; a token is out: the frontend resumes behind it."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, _ = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    desk.told()
    desk.wait(3.1)
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica, failure.untouched) == (pb.Failure.CODE_STALLED, decode, False)
    desk.assert_empty()


def fail_on(desk: Desk, name: str) -> None:
    """Let one request fail at decode replica `name`, by its own doing; wherever else it is placed it is taken back."""
    for _ in range(40):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, submit = desk.placed()
        if decode == name:
            failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR)
            desk.down(decode, failures=[failure])
            return
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(decode)
    raise AssertionError(f"{name} is never chosen")


def places(desk: Desk, count: int = 30) -> set[str]:
    """Return where requests go now."""
    chosen = set()
    for _ in range(count):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, _ = desk.placed()
        chosen.add(decode)
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(decode)
    return chosen


def test_a_replica_that_fails_in_a_row_is_left_alone_tried_and_readmitted() -> None:
    """One of two is ejected for a second; then one request tries it, and its good end readmits it."""
    desk = Desk(prefills=0)
    for _ in range(3):
        fail_on(desk, "decode-0")
    assert desk.links["decode-0"][0].ejection.is_ejected and desk.relay.ejection_total == 1
    assert places(desk) == {"decode-1"}
    desk.wait(1.05)
    for _ in range(40):
        desk.submit(request_id=f"{desk.slot + 1:032x}")
        decode, submit = desk.placed()
        if decode == "decode-0":
            break
    else:
        raise AssertionError("no trial")
    assert places(desk) == {"decode-1"}, "one trial at a time"
    finish = pb.Finish(slot=submit.slot, end_position=0, reason=pb.Finish.REASON_LENGTH)
    desk.down("decode-0", finishes=[finish])
    assert places(desk) == {"decode-0", "decode-1"}


def test_the_last_replica_of_a_role_is_not_ejected() -> None:
    """Both fail: both are chosen all the same; so is one whose only peer is gone."""
    desk = Desk(prefills=0)
    for _ in range(3):
        fail_on(desk, "decode-0")
    desk.links["decode-1"][0].is_listed = False
    assert places(desk) == {"decode-0"}
    desk.links["decode-1"][0].is_listed = True
    for _ in range(3):
        fail_on(desk, "decode-1")
    assert places(desk) == {"decode-0", "decode-1"}


def test_another_boot_of_the_engine_starts_clean() -> None:
    """What the old one failed says nothing of the new one."""
    desk = Desk()
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="a"))
    for _ in range(3):
        fail_on(desk, "decode-0")
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="a"))
    assert places(desk) == {"decode-1"}
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, engine_boot_id="b"))
    assert "decode-0" in places(desk)


def test_refusals_and_faults_of_clients_eject_nobody() -> None:
    """No room, another's mistake, a drain: the replica is as good as before."""
    desk = Desk()
    for number in range(12):
        desk.submit(request_id=f"{number + 1:032x}")
        decode, submit = desk.placed()
        if number % 2:
            desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_INVALID)])
        else:
            desk.down(decode, failures=[pb.Failure(slot=submit.slot, code=pb.Failure.CODE_INVALID)])
    assert not any(replica.ejection.failures for replica, _ in desk.links.values())


def test_frontends_hear_of_the_router_each_second() -> None:
    """Its load report is its heartbeat, also while nothing happens."""
    desk = Desk()
    desk.told()
    for _ in range(5):
        desk.wait(1.001)
        assert desk.told().HasField("load_report")


def test_a_replica_that_could_not_be_reached_is_not_waited_for_by_an_adopt() -> None:
    """Lost just now it may be back at once; tried in vain, it is refused, and the frontend resumes elsewhere."""
    desk = Desk()
    desk.lose("decode-0")
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")
    desk.ask(adopts=[adopt])
    assert not desk.told().refusals
    desk.lose("decode-0")
    assert [row.slot for row in desk.told().refusals] == [1]
    desk.ask(adopts=[pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="decode-0")])
    assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_UNKNOWN_REQUEST]
    desk.assert_empty()


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_draining_router_can_be_taken_over_when_everything_generates(phase: str) -> None:
    """What is adopted through another router must run at its decode replica, with its blocks there."""
    desk = Desk()
    assert desk.relay.can_be_taken_over()
    getattr(desk, phase)()
    assert desk.relay.can_be_taken_over() == (phase == "generating")


def test_a_replica_that_has_gone_silent_is_not_asked_for_what_ran_there() -> None:
    """Another router lost it and this one will: its heartbeats are missing here too."""
    desk = Desk()
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True))
    desk.wait(1.9)
    desk.ask(adopts=[pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")])
    assert len(desk.up("decode-0").adopts) == 1
    desk.wait(0.2)
    desk.ask(adopts=[pb.Adopt(slot=2, request_id=B, attempt=1, decode_replica="decode-0")])
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [
        (2, pb.Refusal.REASON_UNKNOWN_REQUEST)
    ]
    assert not desk.up("decode-0").adopts


def submit_another(desk: Desk, **changes: Any) -> None:
    """Submit a request with a prompt that was never seen."""
    ids = pack_ids(range(1000 * desk.slot, 1000 * desk.slot + 20))
    hashes = blocks.pack(blocks.chain(ids, 4, "m"))
    desk.submit(request_id=f"{desk.slot + 1:032x}", token_ids=ids, block_hashes=hashes, **changes)


def pull(desk: Desk, broken: str) -> set[str]:
    """Run one request; its handoff is lost if one of its replicas is `broken`. Return its replicas."""
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    prefill, slot = asked_prefill(desk)
    desk.down(prefill, starts=[pb.Start(slot=slot)], first_tokens=[first(slot)])
    if broken in (prefill, decode):
        failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_HANDOFF_LOST)
        desk.down(decode, failures=[failure])
    else:
        finish = pb.Finish(slot=submit.slot, end_position=1, reason=pb.Finish.REASON_LENGTH)
        desk.down(decode, transfers=[pb.Transfer(slot=submit.slot)], finishes=[finish])
    for name in desk.links:
        desk.up(name)
    desk.told()
    desk.wait(0.01)
    return {prefill, decode}


@pytest.mark.parametrize("broken", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_who_cannot_hand_over_is_ejected_and_nobody_else(broken: str) -> None:
    """A first token is no good end of a prefill; of the two sides of a lost handoff the others tell which it was."""
    desk, asked = Desk(prefills=2, queue=64), 0
    for _ in range(90):
        submit_another(desk)
        asked += broken in pull(desk, broken)
        if broken.startswith("prefill"):
            decodes = [desk.links[name][0] for name in ("decode-0", "decode-1")]
            assert not any(replica.ejection.failures for replica in decodes)
        trusted = {name: not replica.ejection.is_ejected for name, (replica, _) in desk.links.items()}
        if not trusted.pop(broken):
            break
    assert desk.links[broken][0].ejection.is_ejected and asked <= 12
    if broken.startswith("prefill"):
        assert all(trusted.values())


@pytest.mark.parametrize("code", [pb.Failure.CODE_HANDOFF_LOST, pb.Failure.CODE_ENGINE_ERROR])
def test_the_next_attempt_leaves_the_replicas_of_the_failed_one(code: pb.Failure.Code.ValueType) -> None:
    """Whatever is cached there; one attempt later than the memory lasts, the cache counts again."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    prefill, slot = asked_prefill(desk)
    desk.down(prefill, starts=[pb.Start(slot=slot)], first_tokens=[first(slot)])
    if code == pb.Failure.CODE_ENGINE_ERROR:
        desk.down(decode, transfers=[pb.Transfer(slot=submit.slot)])
    desk.down(decode, failures=[pb.Failure(slot=submit.slot, code=code)])
    desk.up("prefill-0"), desk.up("prefill-1")
    desk.wait(9.0)
    desk.submit(attempt=2)
    again, submit = desk.placed()
    assert again != decode
    desk.down(again, acceptances=[pb.Acceptance(slot=submit.slot)])
    other_prefill, _ = asked_prefill(desk)
    assert (other_prefill != prefill) == (code == pb.Failure.CODE_HANDOFF_LOST)


def test_a_request_that_failed_everywhere_is_placed_all_the_same() -> None:
    """What failed is the last choice, and a choice."""
    desk = Desk(prefills=0)
    asked = []
    for attempt in range(1, 5):
        desk.submit(attempt=attempt)
        decode, submit = desk.placed()
        asked.append(decode)
        failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR)
        desk.down(decode, failures=[failure])
        desk.up(decode)
    assert sorted(asked[:2]) == ["decode-0", "decode-1"]


def test_a_decode_that_fails_prompts_of_its_own_before_their_first_token_is_ejected() -> None:
    """Nothing was streamed, so the failure is untouched; the engine had it all the same."""
    desk = Desk(queue=64, local=1000)
    for _ in range(40):
        submit_another(desk)
        decode, submit = desk.placed()
        assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
        desk.down(decode, starts=[pb.Start(slot=submit.slot)])
        if decode == "decode-0":
            failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR, untouched=True)
            desk.down(decode, failures=[failure])
        else:
            finish = pb.Finish(slot=submit.slot, end_position=0, reason=pb.Finish.REASON_LENGTH)
            desk.down(decode, finishes=[finish])
        desk.wait(0.01)
    assert desk.links["decode-0"][0].ejection.is_ejected and desk.relay.ejection_total == 1


@pytest.mark.parametrize("prefills", [1, 2, 4])
def test_prefills_that_are_busy_and_say_so_are_trusted(prefills: int) -> None:
    """Prompts wait longer than was thought, everywhere alike: nobody is ejected and no prompt is handed round."""
    desk, submits = Desk(prefills=prefills, queue=256), 0
    desk.policy._dispatch_ahead_s = 100.0
    busy = pb.LoadReport(engine_ready=True, queued_request_count=50, running_request_count=1)
    for tick in range(40):
        if tick < 5 * prefills:
            submit_another(desk)
        for name in list(desk.links):
            asked = desk.up(name).submits
            desk.down(name, acceptances=[pb.Acceptance(slot=one.slot) for one in asked])
            if name.startswith("prefill"):
                submits += len(asked)
                desk.down(name, load_report=busy)
        desk.wait(0.5)
    assert submits == 5 * prefills and desk.relay.ejection_total == 0
    assert not desk.told().failures


def test_a_prompt_that_waits_at_a_busy_prefill_goes_where_the_queue_is_shorter() -> None:
    """It is placed again without a word against the one that works."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    busy, _ = asked_prefill(desk)
    idle = "prefill-1" if busy == "prefill-0" else "prefill-0"
    for _ in range(20):
        report = pb.LoadReport(engine_ready=True, queued_request_count=3, running_request_count=1)
        desk.down(busy, load_report=report)
        desk.down(idle, load_report=pb.LoadReport(engine_ready=True))
        for name in ("decode-0", "decode-1"):
            for asked in desk.up(name).submits:
                desk.down(name, acceptances=[pb.Acceptance(slot=asked.slot)])
        desk.wait(0.5)
    assert asked_prefill(desk)[0] == idle
    assert not any(replica.ejection.failures for replica, _ in desk.links.values())


@pytest.mark.parametrize("count", range(2, 8))
def test_half_of_a_role_is_ejected_at_most(count: int) -> None:
    """Of two, one may be; where most fail, the ones whose time is over first are asked beside the trusted ones."""
    desk = Desk(prefills=0)
    names = [f"decode-{index}" for index in range(count)]
    for name in names[2:]:
        desk.add(name, "decode")
    for ejected, name in enumerate(names[:-1], start=1):
        for _ in range(3):
            desk.links[name][0].failed(desk.now_s, desk.now_s, "x")
        offered = [one.name for one in desk.relay.releases.view(desk.now_s).decode]
        assert len(offered) == max(count - ejected, count - count // 2)
        assert set(names[ejected:]) <= set(offered)
        desk.wait(0.01)
