"""Golden requests of a frontend that starts: one for each pool, each ends once, and the core knows of none."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh.attach import frames
from kvmesh.attach.outbox import UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from services.frontend.golden_requests import OUTPUT_TOKENS, PROMPT_TOKENS, GoldenRequests, Target
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.router_peers import Peers

TARGETS = [Target("stable", "v1", [5, 6, 7], 100), Target("canary", "v2", [9], 100)]


class Link:
    """A link without a stream; the test takes its messages."""

    def __init__(self, name: str) -> None:
        self.name, self.is_up, self.outbox = name, True, UpwardOutbox()


class Routers:
    """Two routers of each pool, and the golden requests of one frontend."""

    def __init__(self) -> None:
        self.peers: Peers[LiveRequest] = Peers()
        self.links: dict[str, Link] = {}
        for target in TARGETS:
            for number in range(2):
                link = self.links[f"{target.pool}-{number}"] = Link(f"{target.pool}-{number}")
                self.peers.add(link, target.pool, target.model_version)
        ids = iter(range(1 << 20))
        self.golden = GoldenRequests(self.peers, 32, lambda: f"{next(ids):032x}")

    def submits(self, now_s: float) -> list[tuple[str, pb.Submit]]:
        found = []
        for name, link in self.links.items():
            if (message := link.outbox.take(now_s)) is not None:
                found += [(name, submit) for submit in message.submits]
        return found


def whole(slot: int) -> pb.AttachResponse:
    """Return a whole answer in one message."""
    count = OUTPUT_TOKENS - 1
    return pb.AttachResponse(
        first_tokens=[pb.FirstToken(slot=slot, token_id=3)],
        frame=pb.StepFrame(
            slots=[slot], positions=[1], counts=[count], token_ids=frames.pack_ids([4] * count)
        ),
        finishes=[pb.Finish(slot=slot, end_position=OUTPUT_TOKENS, reason=pb.Finish.REASON_LENGTH)],
    )


def test_a_golden_request_is_small_unimportant_and_of_no_tenant() -> None:
    """Its purpose tells each hop that no user waits; it is shed first."""
    routers = Routers()
    routers.golden.send(TARGETS, 10.0)
    submits = routers.submits(10.0)
    assert sorted(submit.model_version for _, submit in submits) == ["v1", "v2"]
    for _, submit in submits:
        budget = submit.budget
        assert budget.purpose == budget_pb2.PURPOSE_WARM_UP
        assert (budget.tenant, budget.reservation_id, budget.service_class) == ("", "", "")
        assert (budget.band, budget.priority, budget.sheddable) == (0, -100, True)
        assert budget.max_output_tokens == OUTPUT_TOKENS <= submit.credit_position
        assert len(frames.unpack_ids(submit.token_ids)) == PROMPT_TOKENS and not submit.traceparent
        assert 0 < budget.remaining_ms <= 2000


def test_a_pool_that_cannot_place_gets_no_golden_request() -> None:
    """Neither does a pool without a router that is up. It may get one later."""
    routers = Routers()
    for peer in routers.peers:
        peer.can_place = peer.pool != "stable"
        routers.links[peer.name].is_up = peer.pool == "stable"
    routers.golden.send(TARGETS, 10.0)
    assert not routers.golden.all and not routers.submits(10.0)
    for peer in routers.peers:
        peer.can_place = True
    routers.golden.send(TARGETS, 10.1)
    assert [each.pool for each in routers.golden.all] == ["stable"]


def test_a_whole_answer_completes_it() -> None:
    """Its time to the first token and its outcome are kept."""
    routers = Routers()
    routers.golden.send(TARGETS[:1], 10.0)
    ((name, submit),) = routers.submits(10.0)
    routers.golden.on_response(name, whole(submit.slot), 10.25)
    (golden,) = routers.golden.all
    assert golden.outcome == "completed" and golden.ids == [3, 4]
    assert golden.first_token_s == golden.seconds == pytest.approx(0.25) and not len(routers.golden)


@pytest.mark.parametrize("seed", range(200))
def test_random_answers_end_each_request_once(seed: int) -> None:
    """Answers of wrong slots, repeated and missing tokens, lost routers and the give-up, in any order."""
    draw, routers = random.Random(seed), Routers()
    golden = routers.golden
    sent: list[tuple[str, int]] = []
    for step in range(60):
        now_s = 10.0 + step * 0.02
        golden.send(TARGETS, now_s)
        sent += [(name, submit.slot) for name, submit in routers.submits(now_s)]
        name, slot = draw.choice([*sent, ("stable-0", 99)])
        match draw.randrange(8):
            case 0:
                token = pb.FirstToken(slot=slot, position=draw.randrange(3), token_id=3)
                golden.on_response(name, pb.AttachResponse(first_tokens=[token]), now_s)
            case 1:
                finish = pb.Finish(slot=slot, end_position=draw.randrange(3), reason=pb.Finish.REASON_LENGTH)
                golden.on_response(name, pb.AttachResponse(finishes=[finish]), now_s)
            case 2 if draw.random() < 0.3:
                refusal = pb.Refusal(slot=slot, reason=pb.Refusal.REASON_NO_REPLICA)
                golden.on_response(name, pb.AttachResponse(refusals=[refusal]), now_s)
            case 3 if draw.random() < 0.3:
                failure = pb.Failure(slot=slot, code=pb.Failure.CODE_ENGINE_LOST)
                golden.on_response(name, pb.AttachResponse(failures=[failure]), now_s)
            case 4 if draw.random() < 0.3:
                routers.links[name].is_up = False
                golden.on_lost(name, now_s)
            case 5:
                golden.on_response(name, whole(slot), now_s)
            case _:
                golden.on_response(name, pb.AttachResponse(), now_s)
        assert len(golden) == sum(not each.outcome for each in golden.all)
        assert golden.ended == Counter(each.outcome for each in golden.all if each.outcome)
        assert not any(peer.slots for peer in routers.peers), "the core got a slot"
        for each in golden.all:
            assert each.outcome != "completed" or len(each.ids) in (1, OUTPUT_TOKENS)
    golden.give_up(20.0)
    assert len(golden) == 0 and len(golden.all) == len(sent) == len({each.pool for each in golden.all})
    assert all(each.outcome for each in golden.all)


def test_giving_up_cancels_at_the_router() -> None:
    """A request that no replica answers takes nothing from the users that come now."""
    routers = Routers()
    routers.golden.send(TARGETS[:1], 10.0)
    ((name, submit),) = routers.submits(10.0)
    routers.golden.give_up(12.0)
    message = routers.links[name].outbox.take(12.0)
    assert message is not None and [each.slot for each in message.cancels] == [submit.slot]
    assert routers.golden.ended == {"timeout": 1}
