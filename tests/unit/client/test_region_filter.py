"""Refusals of whole regions: each region is asked once, a pinned tenant is final, all regions share one retry budget."""

from __future__ import annotations

import random

import grpc
import pytest

from kvmesh.client.call_state import CallState
from kvmesh.client.errors import MeshUnavailable, RequestRefused
from kvmesh.client.region_filter import RegionFilter, RegionStep
from kvmesh.client.retries import GiveUp, Retry
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb

REGIONS = ("eu", "us", "ap")


def details(reason: str, pinned_to: str | None = None, code: str = "UNAVAILABLE") -> ErrorDetails:
    """Return the details of a region's refusal."""
    metadata = {} if pinned_to is None else {"regions": pinned_to}
    return ErrorDetails(grpc.StatusCode[code], "why", reason, metadata, 1.0, {})


TOKEN_INVALID = details("RESUME_TOKEN_INVALID", code="INVALID_ARGUMENT")


def works(region: str) -> bool:
    """All regions work."""
    return bool(region)


class Call:
    """One request whose frontends all work, sent from region to region."""

    def __init__(self, *, regions: tuple[str, ...] = REGIONS, token: bytes = b"") -> None:
        request = pb.GenerateRequest(text="x", idempotency_key="k")
        if token:
            request.options.resume.resume_token = token
        self.regions = regions
        self.state = CallState(
            request, RetryPolicy(retry_after_max_s=30), 1000.0, has_own_key=not token, regions=regions
        )
        self.now_s = 0.0
        self.asked: list[str] = []

    @property
    def region(self) -> str:
        """The region of the next send."""
        return next(each for each in self.regions if each not in self.state.barred)

    def send(self, status: ErrorDetails | None = None) -> Retry | GiveUp | None:
        """Send the request; the region refuses it with `status`, or starts it."""
        region = self.region
        self.asked.append(region)
        self.state.outgoing(self.now_s)
        if status is None:
            started = pb.Started(request_id="r", seed=7, resume_token=region.encode())
            self.state.on_message(pb.GenerateResponse(started=started))
            return None
        step = self.state.region_step(region, status, works)
        found = self.state.on_error(status, has_other=True, now_s=self.now_s, jitter=0, step=step)
        self.now_s += found.after_s if isinstance(found, Retry) else 0
        return found

    def tokens(self, count: int) -> None:
        """Receive `count` tokens."""
        have = len(self.state.ids)
        tokens = pb.Tokens(ids=range(have, have + count), text="x" * count, position=have)
        self.state.on_message(pb.GenerateResponse(tokens=tokens))


def test_a_region_that_cannot_serve_sends_the_request_to_each_other_region_at_once() -> None:
    """Then the request waits for the Retry-After, and may be sent to all regions again."""
    call, unavailable = Call(), details("REGION_UNAVAILABLE")
    assert [call.send(unavailable) for _ in range(2)] == [Retry(0.0), Retry(0.0)]
    step = call.send(unavailable)
    assert isinstance(step, Retry) and step.after_s >= 1.0
    assert call.asked == ["eu", "us", "ap"] and call.region == "eu"


def test_the_refusal_of_a_pinned_tenant_is_final() -> None:
    """Only the regions of the tenant are asked, each once."""
    call = Call()
    step = call.send(details("REGION_UNAVAILABLE", "eu"))
    assert isinstance(step, GiveUp) and isinstance(step.error, MeshUnavailable)
    assert (step.error.reason, step.error.code) == ("REGION_UNAVAILABLE", "UNAVAILABLE")
    call = Call()
    assert call.send(details("REGION_UNAVAILABLE", "eu,ap")) == Retry(0.0)
    assert isinstance(call.send(details("REGION_UNAVAILABLE", "eu,ap")), GiveUp)
    assert call.asked == ["eu", "ap"]


def test_a_pinned_tenant_goes_back_to_its_region_from_a_foreign_one() -> None:
    """The client went elsewhere because home was lost, and learns there that only home may serve."""
    call = Call(regions=("us", "eu"))
    assert isinstance(call.send(details("REGION_UNAVAILABLE", "eu")), Retry)
    assert call.region == "eu"
    call.send()
    assert call.state.barred == {"us"}, "a tenant stays pinned"


def test_a_client_without_regions_retries_a_refusal_unless_the_tenant_is_pinned() -> None:
    """It is an UNAVAILABLE with a RetryInfo like others."""
    step = Call(regions=("",)).send(details("REGION_UNAVAILABLE"))
    assert isinstance(step, Retry) and step.after_s >= 1.0
    assert isinstance(Call(regions=("",)).send(details("REGION_UNAVAILABLE", "eu")), GiveUp)


def test_a_token_that_one_region_refuses_is_tried_once_elsewhere() -> None:
    """Two refusals are final; a region that reads the token continues the stream."""
    call = Call(regions=("eu", "us"))
    call.send()
    call.tokens(3)
    assert call.send(TOKEN_INVALID) == Retry(0.0) and call.region == "us"
    last = call.send(TOKEN_INVALID)
    assert isinstance(last, GiveUp) and isinstance(last.error, RequestRefused)
    assert call.state.with_output(last.error).ids == [0, 1, 2]
    assert call.asked == ["eu", "eu", "us"]


def test_an_older_token_is_tried_in_the_same_region_first() -> None:
    """A frontend of an older release may read the older token of the same region."""
    call = Call(regions=("eu", "us"))
    call.send()
    placed = pb.Tokens(ids=[0], text="x", position=0, resume_token=b"placed")
    call.state.on_message(pb.GenerateResponse(tokens=placed))
    assert isinstance(call.send(TOKEN_INVALID), Retry) and call.region == "eu"
    assert isinstance(call.send(TOKEN_INVALID), Retry) and call.region == "us"
    assert isinstance(call.send(TOKEN_INVALID), GiveUp)
    assert call.asked == ["eu", "eu", "eu", "us"]


def test_a_callers_token_of_another_region_is_tried_there() -> None:
    """The token may come from a stream that another process read in the other region."""
    call = Call(regions=("eu", "us"), token=b"of us")
    assert call.send(TOKEN_INVALID) == Retry(0.0)
    assert call.send() is None and call.asked == ["eu", "us"]
    assert isinstance(Call(regions=("eu",), token=b"garbage").send(TOKEN_INVALID), GiveUp)


def test_a_version_that_one_region_lacks_is_looked_for_in_the_others() -> None:
    """With tokens out the request never begins anew: it ends with STALE_SNAPSHOT and its tokens."""
    call, stale = Call(regions=("eu", "us")), details("STALE_SNAPSHOT")
    call.send()
    call.tokens(3)
    step = call.send(stale)
    assert step == Retry(0.0) and call.region == "us"
    while isinstance(step, Retry):
        step = call.send(stale)
        assert call.state.outgoing(call.now_s).options.HasField("resume")
    assert isinstance(step, GiveUp)
    error = call.state.with_output(step.error)
    assert (error.reason, error.ids) == ("STALE_SNAPSHOT", [0, 1, 2]) and error.resume is not None


def test_without_tokens_a_request_begins_anew_in_the_same_region() -> None:
    """The region that answers has a version of its own for it."""
    call = Call(regions=("eu", "us"))
    call.send()
    assert call.send(details("STALE_SNAPSHOT")) == Retry(0.0)
    assert call.region == "eu" and not call.state.outgoing(call.now_s).options.HasField("resume")


@pytest.mark.parametrize("seed", range(100))
def test_all_regions_draw_on_one_retry_budget(seed: int) -> None:
    """Whatever the regions answer, a request without a new token is sent at most `sends_max` times."""
    draw, call = random.Random(seed), Call()
    call.send()
    call.tokens(1)
    step: Retry | GiveUp | None = None
    while not isinstance(step, GiveUp):
        match draw.randrange(4):
            case 0:
                call.state.outgoing(call.now_s)
                step = call.state.on_lost("lost", has_other=True, now_s=call.now_s, jitter=draw.random())
            case 1:
                step = call.send(details("REGION_UNAVAILABLE", draw.choice((None, None, "eu,us"))))
            case 2:
                step = call.send(details("STALE_SNAPSHOT"))
            case _:
                call.send()  # the region starts the stream, and is lost before a token
                step = call.state.on_lost("lost", has_other=True, now_s=call.now_s, jitter=draw.random())
        assert call.state.sends <= 1 + RetryPolicy().sends_max
        assert set(call.state.barred) < set(REGIONS)


@pytest.mark.parametrize("seed", range(100))
def test_a_region_is_always_left_and_a_refused_one_is_left_out(seed: int) -> None:
    """The filter never bars all regions, never a pinned tenant's last one, and MOVE never leads back to the refuser."""
    draw, one = random.Random(seed), RegionFilter(REGIONS)
    for _ in range(200):
        region = draw.choice([each for each in REGIONS if each not in one.barred])
        reason = draw.choice(("REGION_UNAVAILABLE", "RESUME_TOKEN_INVALID", "STALE_SNAPSHOT", "QUEUE_FULL"))
        pinned_to = draw.choice((None, None, None, "eu", "eu,us,mars"))
        step = one.on_status(region, details(reason, pinned_to), lambda _: draw.random() < 0.7)
        assert set(one.barred) < set(REGIONS)
        assert (step is RegionStep.MOVE) <= (region in one.barred)
        if reason == "QUEUE_FULL":
            assert step is RegionStep.STAY
        if draw.random() < 0.1:
            one.on_started()


def test_a_pinned_tenant_whose_regions_are_lost_gets_the_refusal() -> None:
    """A foreign region tells it to come later: once for a restart. A stream with tokens waits for one of its regions."""
    one, refusal = RegionFilter(REGIONS), details("REGION_UNAVAILABLE", "eu")
    assert one.on_status("us", refusal, lambda name: name != "eu") is RegionStep.STAY
    assert one.on_status("us", refusal, lambda name: name != "eu") is RegionStep.FINAL
    back = RegionFilter(REGIONS)
    assert back.on_status("us", refusal, lambda name: name != "eu") is RegionStep.STAY
    assert back.on_status("us", refusal, works) is RegionStep.MOVE and "us" in back.barred
    assert RegionFilter(REGIONS).on_status("us", refusal, works) is RegionStep.MOVE
    step = RegionFilter(REGIONS).on_status("us", refusal, lambda name: name != "eu", has_tokens=True)
    assert step is RegionStep.MOVE


def test_a_region_that_works_is_asked_again_while_all_others_are_lost() -> None:
    """A moment of REGION_UNAVAILABLE sends no request back to a dead region."""
    one = RegionFilter(REGIONS)
    assert one.on_status("us", details("REGION_UNAVAILABLE"), lambda name: name == "us") is RegionStep.STAY
    assert not one.barred
    assert one.on_status("us", details("REGION_UNAVAILABLE"), works) is RegionStep.MOVE


@pytest.mark.parametrize("regions", [("",), ("eu",), ("eu", "us")])
def test_a_stream_of_a_pinned_tenant_waits_for_its_region_which_lost_its_routers(
    regions: tuple[str, ...],
) -> None:
    """The region refuses it for a moment, as it refuses the streams of all others. A new request is final there."""
    refusal = details("REGION_UNAVAILABLE", "eu")
    call = Call(regions=regions)
    call.send()
    call.tokens(3)
    for _ in range(2):
        assert isinstance(call.send(refusal), Retry) and call.region == regions[0]
    call = Call(regions=regions)
    assert isinstance(call.send(refusal), GiveUp)
