"""Every path settles a reservation once, with the output not yet charged to another execution."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.inference.v1 import inference_pb2
from kvmesh.redis_link import RedisUnavailable
from kvmesh.redis_script import Call, Script
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts import bill
from services.frontend.accounts.accounting import NEVER, Accounting, Hold
from services.frontend.accounts.settlement import Settlements
from services.frontend.requests.charge import Reach
from services.frontend.requests.faults import given_up
from services.frontend.requests.outcome import Outcome
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.takeover import AttemptLocation
from tests.unit.frontend.fake_mesh import changed, spec

CALLER = Caller(
    tenant=Tenant(name="t"),
    service_class=ServiceClass(name="c", runtime_max_s=60, default_deadline_s=60, max_output_tokens=1000),
    account=Account("t", (Scope("tenant:t", Limit(concurrency=5)),)),
)

PLACE = AttemptLocation(1, "decode-0")

WELL = Outcome(finish_reason=inference_pb2.FINISH_REASON_LENGTH)


@dataclass
class Reserved:
    """Stub of a Reservation."""

    id: str
    progress_at: int = 5
    remaining: None = None


@dataclass
class Budgets:
    """Stub of services.frontend.accounts.budgets.Budgets that records its calls."""

    settled: dict[str, tuple[int, int, int, bool]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    told: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    lowered: dict[str, int] = field(default_factory=dict)
    waits: int = 0

    def try_reserve(self, caller: Caller, rid: str, *asked: Any) -> Reserved | None:
        self.forced.append(asked[-1])
        if self.waits:
            return None
        self.open.add(rid)
        return Reserved(rid)

    async def reserve(self, caller: Caller, rid: str, *_: Any) -> Reserved:
        for _each in range(self.waits):
            await asyncio.sleep(0)
        self.open.add(rid)
        return Reserved(rid)

    def progress(self, reservation: Reserved, position: int) -> None:
        self.told.append(position)
        reservation.progress_at = position + 10

    def lower(self, caller: Caller, rid: str, tokens: int) -> None:
        self.lowered[rid] = tokens

    def ended(self, reservation: Reserved) -> None:
        assert reservation.id in self.open

    def settle(
        self, reservation: Reserved, prompt: int, cached: int, output: int, *, refund_request: bool
    ) -> None:
        self.open.remove(reservation.id)  # a second settlement is a KeyError
        self.settled[reservation.id] = prompt, cached, output, refund_request


class Redis:
    """Model of the settlement script: charges the part above the highest position settled for a request.

    Unavailable on demand. The first other execution pays the amount that the first successor leaves.
    tests/integration/frontend tests the full rule.
    """

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, int]] = {}
        self.left: dict[str, tuple[int, int]] = {}
        self.is_unavailable = self.is_full = False

    async def scripts(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        await asyncio.sleep(0)
        if self.is_unavailable or self.is_full:
            raise RedisUnavailable("gone", is_transient=self.is_unavailable)
        return [self._settle(*each) for each in calls]

    def _settle(self, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        (request,), (prompt, output) = keys, arguments[2:4]
        had = self.known.get(request, (0, 0))
        more = max(0, prompt - had[0]), max(0, output - had[1])
        inherited = arguments[6]
        self.known[request] = had[0] + more[0], had[1] + more[1]
        if inherited and not had[0]:
            self.left[request] = more[0], min(inherited, more[1])
            return [b"SETTLED", *more, 0, more[1] - min(inherited, more[1])]
        left = self.left.pop(request, (0, 0)) if not inherited else (0, 0)
        return [b"SETTLED", *more, more[0] + left[0], more[1] + left[1]]


class Progress:
    def __init__(self, ids: int, delivered: int) -> None:
        self.ids, self.delivered = [5] * ids, delivered
        self.reach = Reach(handed=delivered, produced=ids, computed=ids)
        self.cached_tokens, self.recomputed_tokens = 3, 0


class Request:
    """Stub of a live request that ended."""

    def __init__(self, of: RequestSpec, ids: int, delivered: int, outcome: Outcome | None) -> None:
        self.spec, self.progress, self.outcome = of, Progress(ids, delivered), outcome
        self.attempts: list[Any] = []


def made(redis: Redis) -> tuple[Accounting, Budgets, Settlements]:
    budgets = Budgets()
    settlements = Settlements(redis, "m", 60.0, lambda _: None)  # type: ignore[arg-type]
    return Accounting(settlements, budgets), budgets, settlements  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
async def test_every_reservation_is_settled_once_under_faults_of_redis(seed: int) -> None:
    """Every reservation is settled once, and no execution pays twice, while Redis comes and goes.

    Random executions of few requests, complete or not. No reservation is left open.
    """
    draw, redis = random.Random(seed), Redis()
    accounting, budgets, settlements = made(redis)
    settling = asyncio.create_task(settlements.run())
    total: dict[int, int] = {}
    charged: dict[int, int] = {}
    owners: dict[str, int] = {}
    for at in range(150):
        redis.is_unavailable, redis.is_full = draw.random() < 0.2, draw.random() < 0.1
        number, epoch = draw.randrange(40), draw.choice((0, 0, 1, 2))
        budgets.waits = draw.choice((0, 0, 1))
        received = draw.choice((0, 4)) if epoch else 0
        asked = spec(
            number,
            caller=CALLER,
            owner=f"o{at}",
            attempt_base=256 * epoch,
            is_fenced=draw.random() < 0.9,
            is_keyed=draw.random() < 0.5 or number in owners.values(),  # else its id is its own
            is_resumed=epoch > 0,
            received_ids=(5,) * received,
            location=draw.choice((None, PLACE)) if received else None,
            max_output_tokens=50,
        )
        owners[asked.rid] = number
        hold = Hold()
        asked = await accounting.reserve(hold, asked)
        assert asked.reservation_id == asked.rid
        if draw.random() < 0.1:
            accounting.release(hold)
            accounting.release(hold)
            continue
        ids = received + draw.randrange(8)
        delivered = draw.randint(received, ids)
        end = None if draw.random() < 0.1 else Outcome(error=given_up("NO_REPLICA", 1, delivered))
        if draw.random() < 0.5:
            end, delivered = WELL, ids
        accounting.close(hold, Request(asked, ids, delivered, end))  # type: ignore[arg-type]
        if end is not None:
            own = 0 if asked.goes_ahead else asked.prompt_tokens
            total[number] = total.get(number, 0) + own + ids
        if draw.random() < 0.3:
            await asyncio.sleep(0.001)
    redis.is_unavailable = redis.is_full = False
    assert await settlements.flush(5)
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
    assert not budgets.open and len(budgets.settled) == 150
    for owner, (prompt, cached, output, refunded) in budgets.settled.items():
        number = owners[owner]
        charged[number] = charged.get(number, 0) + prompt + output
        assert cached <= prompt
        assert not (refunded and prompt + output)
    assert all(tokens <= total.get(number, 0) for number, tokens in charged.items()), (
        "charged more than was generated"
    )


@pytest.mark.parametrize("steps", range(4))
async def test_a_cancelled_reserve_holds_nothing(steps: int) -> None:
    """A reservation is held exactly if `reserve` returned it before the cancellation."""
    accounting, budgets, _ = made(Redis())
    budgets.waits = 2
    hold = Hold()
    asking = asyncio.create_task(accounting.reserve(hold, spec(1, caller=CALLER, owner="o", is_keyed=True)))
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (hold.reservation is not None) == ("o" in budgets.open)
    accounting.release(hold)
    assert not budgets.open


async def test_output_that_a_client_received_before_is_not_paid_again() -> None:
    """A resumed execution pays only for its own output, also when Redis lost the earlier settlements."""
    accounting, budgets, _ = made(Redis())
    hold = Hold()
    asked = await accounting.reserve(
        hold, spec(1, caller=CALLER, owner="o", received_ids=(5,) * 7, is_resumed=True, location=PLACE)
    )
    assert hold.progress_at == 7 + 5
    assert accounting.progress(hold, 13) == 7 + 16 and budgets.told == [6]
    accounting.release(hold)
    hold = Hold()
    await accounting.reserve(hold, asked)
    request = Request(asked, 10, 10, WELL)
    accounting._pay(hold.reservation, bill.of(request), hold.received, None)  # type: ignore[arg-type]
    assert budgets.settled["o"] == (0, 0, 3, False)


async def test_a_resume_is_never_refused_and_no_way_around_the_limits() -> None:
    """The first few resumes that prove where their output was made are admitted by force.

    All other requests are admitted under the limits.
    """
    accounting, budgets, _ = made(Redis())
    for epoch, received, location in (
        *((0, 0, None), (1, 0, None), (1, 0, PLACE), (1, 3, PLACE)),
        *((8, 3, PLACE), (9, 3, PLACE), (1, 3, None)),
    ):
        asked = spec(1, caller=CALLER, owner=f"o{epoch}-{received}-{location}", received_ids=(5,) * received)
        await accounting.reserve(Hold(), changed(asked, attempt_base=256 * epoch, location=location))
    assert budgets.forced == [False, False, False, True, True, False, False]


def test_a_stream_goes_ahead_wherever_its_output_was_made() -> None:
    """The region of its attempt may be known to be dead. Then no router takes it over, and the proof still counts."""
    asked = changed(spec(1, caller=CALLER, received_ids=(5,) * 3), attempt_base=256)
    assert not asked.goes_ahead
    assert changed(asked, is_proven=True).goes_ahead and changed(asked, location=PLACE).goes_ahead
    assert not changed(asked, is_proven=True, attempt_base=256 * 9).goes_ahead
    assert not changed(asked, is_proven=True, received_ids=()).goes_ahead


@pytest.mark.parametrize("was_told", [True, False])
@pytest.mark.parametrize("location", [PLACE, None])
async def test_output_that_a_client_made_up_is_paid(was_told: bool, location: AttemptLocation | None) -> None:
    """A prompt sent as received output is charged, and so is the prompt of a request that never ran.

    The client's claim counts only without a record of earlier output. Then the frontend died and its estimate
    was charged. In this case the resume token must prove earlier output.
    """
    accounting, budgets, settlements = made(Redis())
    settling = asyncio.create_task(settlements.run())
    if was_told:
        first = await accounting.reserve(
            hold := Hold(), spec(1, caller=CALLER, owner="first", is_fenced=True)
        )
        accounting.close(hold, Request(first, 1, 1, WELL))  # type: ignore[arg-type]
        assert await settlements.flush(5)
    asked = spec(1, caller=CALLER, owner="o", received_ids=(5,) * 40, attempt_base=256, location=location)
    asked = await accounting.reserve(hold := Hold(), changed(asked, is_resumed=True))
    accounting.close(hold, Request(asked, 43, 43, WELL))  # type: ignore[arg-type]
    assert await settlements.flush(5)
    settling.cancel()
    prompt, _, output, _ = budgets.settled["o"]
    if was_told:
        assert (prompt, output) == (0, 42)
    else:
        assert (prompt, output) == ((0, 3) if location else (asked.prompt_tokens, 43))


async def test_without_limits_the_budgets_are_not_asked() -> None:
    """Without limits, no reservation is made and the budgets are not called; the request spec is unchanged."""
    accounting, budgets, settlements = made(Redis())
    hold, asked = Hold(), spec(1, owner="o")
    assert await accounting.reserve(hold, asked) is asked
    assert (hold.reservation, hold.progress_at, hold.trailers()) == (None, NEVER, {})
    accounting.close(hold, Request(asked, 3, 3, WELL))  # type: ignore[arg-type]
    assert len(settlements) == 1 and not budgets.settled
