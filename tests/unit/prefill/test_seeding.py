"""KV seeding at a prefill replica, and its other calls for the control plane."""

from __future__ import annotations

import pytest

from kvmesh.attach.frames import FrameError
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.metrics import Metrics
from kvmesh.replica.control_lane import LIGHT_MAX, LIGHT_S
from kvmesh.telemetry import Tracing
from kvmesh.triton.capabilities import Capabilities
from kvmesh.triton.errors import EngineLost
from kvmesh.triton.port import CallKind
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.prefill.slot import PrefillState
from services.prefill.telemetry import CallTelemetry
from tests.unit.prefill.test_core import PROMPT, Replica
from tests.unit.triton.fake_engine import FakeEngine, facts, next_token
from tests.unit.triton.reader import SlotView, submit

WARM_UP, PROBE = budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE
LIMITS = PrefillLimits(queue_max_requests=8, engine_concurrency=4, handoff_timeout_s=10.0, detached_s=3.0)


class Target(Replica):
    """A prefill replica that may pull from `kv:1`, where `source` holds handoffs."""

    def __init__(self, limits: PrefillLimits = LIMITS, kv_blocks: int = 64) -> None:
        super().__init__(limits)
        model = facts(kv_blocks=kv_blocks)
        self.core = PrefillCore(
            "prefill-0", model, limits, self.records.append, is_source=lambda address, _: address == "kv:1"
        )
        self.source = FakeEngine(self.core.sink)
        self.engine = FakeEngine(self.core.sink, peer=self.source)
        self.core.connect(self.engine)
        self.engine.report(self.now_s)
        self.session, self.reader = self.attach()
        self.read()

    def seed(self, slot: int, *, with_handoff: bool = False, **changes: object) -> SlotView:
        """Submit a seed."""
        fields: dict[str, object] = {"purpose": WARM_UP, **changes}
        prompt = fields.pop("prompt", PROMPT)
        message = submit(slot, prompt, pb.PHASE_SEED, **fields)  # type: ignore[arg-type]  # fields by name
        view = self.reader.open(slot, message.start_position + 1)
        self.send(submits=[message], handoffs=[self.row(slot)] if with_handoff else [])
        return view

    def row(self, slot: int, address: str = "kv:1", count: int = 1) -> pb.Handoff:
        """Return a handoff that the source holds."""
        handoff = f"h{slot}".encode()
        self.source.held[handoff] = next_token(PROMPT)
        return pb.Handoff(
            slot=slot, context_phase_params=handoff, first_token_count=count, kv_address=address
        )

    def states(self) -> dict[int, PrefillState]:
        """Return the state of each slot of the stream."""
        return {number: slot.state for number, slot in self.session.slots.items()}


def started(*views: SlotView) -> list[bool]:
    """Return which slots have started."""
    return [view.is_started for view in views]


def test_a_seed_pulls_its_handoff_and_generates_nothing() -> None:
    """Its call is GENERATION_ONLY with one token. It ends with a transfer and a finish; no user's count changes."""
    target = Target()
    view = target.seed(1, start=2)
    assert view.is_accepted and not view.is_started and target.core.slot_table.blocks_reserved == 2
    target.send(handoffs=[target.row(1)])
    (run,) = target.engine.live.values()
    assert (run.call.kind, run.call.max_output_tokens, run.call.end_token_id) == (
        CallKind.GENERATION_ONLY,
        1,
        -1,
    )
    assert (run.call.context_phase_params, run.call.kv_peer) == (b"h1", "kv:1")
    load = target.core.load_report(target.now_s)
    assert (load.queued_request_count, load.queued_token_count, load.running_request_count) == (0, 0, 0)
    target.step()
    assert view.is_transferred and view.first is None and view.failure is None
    assert view.finish == pb.Finish(slot=1, end_position=3, reason=pb.Finish.REASON_LENGTH)
    assert target.is_empty() and not target.core.slot_table.blocks_reserved and not target.source.held
    (record,) = target.records
    assert (record.outcome, record.purpose) == ("seeded", "warm_up")
    prefilling = target.core.prefilling
    assert not prefilling.cached_token_total and not prefilling.computed_token_total
    assert not prefilling.prefill_rate.run_s
    metrics = Metrics("prefill")
    CallTelemetry(metrics, Tracing("prefill", "i", 1.0))(record)
    assert 'control_calls_total{outcome="seeded",purpose="warm_up"} 1.0' in metrics.text().decode()


def test_submit_and_handoff_may_share_a_message() -> None:
    """Submits are applied before handoffs."""
    target = Target()
    view = target.seed(1, with_handoff=True)
    target.step()
    assert view.finish is not None and view.finish.reason == pb.Finish.REASON_LENGTH


@pytest.mark.parametrize(
    ("purpose", "name"),
    [
        (budget_pb2.PURPOSE_USER, "PURPOSE_USER"),
        (budget_pb2.PURPOSE_UNSPECIFIED, "PURPOSE_UNSPECIFIED"),
        (budget_pb2.PURPOSE_SHADOW, "PURPOSE_SHADOW"),
        (PROBE, "PURPOSE_PROBE"),
        (99, "99"),
    ],
)
def test_only_a_warm_up_may_seed(purpose: int, name: str) -> None:
    """The refusal names the field and the value."""
    target = Target()
    refusal = target.seed(1, purpose=purpose).refusal
    assert refusal is not None and refusal.reason == pb.Refusal.REASON_INVALID
    assert (
        refusal.field == "budget.purpose" and name in refusal.message and "PURPOSE_WARM_UP" in refusal.message
    )
    assert target.is_empty()


def test_an_engine_without_disaggregation_takes_no_seed() -> None:
    """It cannot pull."""
    replica = Replica(model=facts(capabilities=Capabilities(kv_events=True)))
    replica.reader.open(1, 1)
    replica.send(submits=[submit(1, PROMPT, pb.PHASE_SEED, purpose=WARM_UP)])
    refusal = replica.reader.slots[1].refusal
    assert refusal is not None and refusal.field == "phase"


@pytest.mark.parametrize("address", ["kv:evil", ""])
def test_an_address_that_is_not_registered_is_refused(address: str) -> None:
    """The engine gets no call, and the blocks are free."""
    target = Target()
    view = target.seed(1)
    target.send(handoffs=[target.row(1, address)])
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert repr(address) in view.failure.message
    assert (
        target.is_empty() and not target.engine.started_total and not target.core.slot_table.blocks_reserved
    )


def test_a_handoff_of_more_tokens_ends_the_stream() -> None:
    """A seed has room for one token."""
    target = Target()
    target.seed(1)
    with pytest.raises(FrameError, match=r"first_token_count is 2; 0 to 1 is allowed"):
        target.send(handoffs=[target.row(1, count=2)])


def test_a_handoff_that_does_not_come_ends_the_seed() -> None:
    """After the handoff timeout it fails; at its deadline it is finished, if that is earlier."""
    target = Target()
    late, short = target.seed(1), target.seed(2, remaining_ms=2_000)
    target.pass_time(2.5)
    assert short.finish is not None and short.finish.reason == pb.Finish.REASON_DEADLINE
    target.pass_time(LIMITS.handoff_timeout_s)
    assert late.failure is not None and late.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert "no handoff came for the seed within 10.0 s" in late.failure.message
    assert target.is_empty() and not target.core.slot_table.blocks_reserved


@pytest.mark.parametrize("stage", ["awaits its handoff", "awaits its turn", "runs"])
@pytest.mark.parametrize(
    "end", ["cancel", "stream", "deadline", "engine lost", "engine restarted", "attempt", "drain"]
)
def test_every_end_of_a_seed_frees_everything(stage: str, end: str) -> None:
    """No block, slot or engine call is left, in whichever stage the seed is. Only a running seed survives a drain."""
    target = Target(PrefillLimits(engine_concurrency=1, handoff_timeout_s=100.0, detached_s=3.0))
    request_id, slot = "ab" * 16, LIGHT_MAX + 1
    for other in range(1, slot if stage == "awaits its turn" else 1):
        target.seed(other, with_handoff=True, prompt=PROMPT)
    view = target.seed(slot, request_id=request_id, remaining_ms=20_000)
    if stage != "awaits its handoff":
        target.send(handoffs=[target.row(slot)])
    assert view.is_started == (stage == "runs")
    if end == "cancel":
        target.cancel(slot)
    elif end == "stream":
        target.session.on_closed(target.now_s)
    elif end == "deadline":
        target.pass_time(21.0)
    elif end == "engine lost":
        while target.engine.live:  # the end of a call may start the next one
            target.engine.fail(next(iter(target.engine.live)), EngineLost("Socket closed"), target.now_s)
        target.core.sink.on_ready(False, target.now_s)
    elif end == "engine restarted":
        target.engine.crash("boot-2", target.now_s)
    elif end == "attempt":
        target.reader.open(slot + 1, 1)
        message = submit(slot + 1, PROMPT, pb.PHASE_SEED, purpose=WARM_UP, request_id=request_id, attempt=2)
        target.send(submits=[message])
        target.cancel(slot + 1)
    else:
        target.core.drain()
        target.pass_time(0.0)
    if end != "stream":
        target.read()
    is_over = end in ("cancel", "stream") or view.is_over()
    assert is_over == (stage != "runs" or end != "drain")
    for _ in range(LIGHT_MAX):
        target.step()
    target.core.assert_consistent()
    assert target.is_empty() and not target.core.slot_table.blocks_reserved and target.core.is_idle()


def test_a_restarted_engine_ends_pending_seeds_even_if_it_was_always_ready() -> None:
    """A new boot id alone is enough."""
    target = Target()
    view = target.seed(1)
    target.engine.boot_id = "boot-2"
    target.engine.report(target.now_s)
    target.read()
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert target.is_empty()


def test_control_calls_run_beside_a_saturated_queue_and_take_no_place_of_it() -> None:
    """Four engine calls for users and one for the control plane, whichever came first. No report counts the latter."""
    target = Target()
    users = {slot: target.submit(slot, remaining_ms=600_000) for slot in range(1, 7)}
    control = {slot: target.submit(slot, purpose=PROBE) for slot in range(7, 10)}
    assert started(*users.values()) == [True] * 4 + [False] * 2
    assert started(*control.values()) == [True, False, False]
    load = target.core.load_report(target.now_s)
    assert (load.queued_request_count, load.running_request_count) == (2, 4)
    assert load.queued_token_count == 2 * len(PROMPT)
    assert target.core.live_request_count() == 9
    target.step()
    assert started(*control.values()) == [True, True, False]
    assert all(view.is_started for view in users.values())


def test_light_calls_run_beside_users_in_greater_number_and_overtake() -> None:
    """A run of a cached prefix computes next to nothing, as the caller says by its estimate."""
    target = Target(kv_blocks=512)
    users = {slot: target.submit(slot, remaining_ms=600_000) for slot in range(1, 7)}
    heavy = [target.submit(slot, purpose=WARM_UP, estimate_s=LIGHT_S + 0.001) for slot in range(7, 9)]
    light = [target.submit(slot, purpose=WARM_UP, estimate_s=LIGHT_S) for slot in range(9, 11 + LIGHT_MAX)]
    assert started(*users.values()) == [True] * 4 + [False] * 2
    assert started(*heavy) == [True, False]
    assert started(*light) == [True] * LIGHT_MAX + [False] * 2
    target.core.assert_consistent()


def test_the_lane_has_all_engine_calls_while_no_user_is_there() -> None:
    """Users who arrive meanwhile start at once; the lane then goes back to its share."""
    target = Target()
    control = [target.submit(slot, purpose=WARM_UP) for slot in range(1, 7)]
    assert started(*control) == [True] * 4 + [False] * 2
    users = [target.submit(slot, output=5) for slot in range(7, 11)]
    assert all(view.is_started for view in users)
    target.engine.step(target.now_s, chosen=lambda call_id: call_id <= 3)
    target.read()
    assert started(control[4]) == [False], "one call still runs, which is the share beside users"
    target.step()
    assert started(*control[4:]) == [True, True]


def test_held_handoffs_of_warm_up_count_against_the_share_of_blocks() -> None:
    """A source holds at most a quarter of its blocks for the control plane. Users have the rest."""
    target = Target(kv_blocks=16)
    first, second, third = (target.submit(slot, PROMPT, purpose=WARM_UP) for slot in range(1, 4))
    target.step()
    assert first.first is not None and second.first is not None and started(third) == [False]
    assert first.first.context_phase_params in target.engine.held
    assert (first.first.cached_token_count, first.first.computed_token_count) == (4, 2)
    load = target.core.load_report(target.now_s)
    assert load.held_handoff_count == 2 and target.core.slot_table.blocks_reserved == 4
    seed = target.seed(4)
    assert seed.refusal is not None and seed.refusal.reason == pb.Refusal.REASON_KV_FULL
    user = target.submit(5, [1] * 48)
    assert user.is_started, "12 of 16 blocks are the users'"
    del target.engine.held[first.first.context_phase_params]  # the target has pulled it
    target.cancel(1, pb.Cancel.REASON_TRANSFERRED)
    assert started(third) == [True] and not target.engine.released
    target.cancel(2, pb.Cancel.REASON_SUPERSEDED)
    assert target.engine.released == [second.first.context_phase_params]
    assert not target.core.prefilling.cached_token_total and not target.core.prefilling.prefill_rate.run_s


def test_a_user_who_waits_for_blocks_comes_before_the_lane() -> None:
    """Meanwhile the lane holds the blocks of one call at most. Neither starves."""
    target = Target(kv_blocks=40)
    running, waiting = target.submit(1, [1] * 100, output=2), target.submit(2, [2] * 100, output=2)
    assert started(running, waiting) == [True, False]
    one, two = (target.submit(slot, purpose=WARM_UP) for slot in (3, 4))
    assert started(one, two) == [True, False]
    target.step()
    assert started(waiting, two) == [False, False], "the blocks of the first warm-up are still held"
    assert target.seed(5).refusal is not None
    target.cancel(1, pb.Cancel.REASON_COMPLETE)
    assert started(waiting, two) == [True, True]
    third, fourth = target.submit(6, [3] * 100, output=2), target.submit(7, purpose=WARM_UP)
    target.cancel(3)
    target.cancel(4)
    assert started(third, fourth) == [False, True], "a queue that waits for blocks does not starve the lane"


def test_cached_blocks_are_those_of_the_present_boot() -> None:
    """0 from the restart of the engine until its first events. Each change is reported."""
    target = Target()
    core = target.core
    core.set_cached_blocks("boot-1", 7)
    assert core.cached_block_count() == core.load_report(target.now_s).cached_block_count == 7
    target.pass_time(0.1)
    assert target.reader.loads[-1].cached_block_count == 7
    target.engine.crash("boot-2", target.now_s)
    assert core.cached_block_count() == 0
    core.set_cached_blocks("boot-2", 2)
    target.pass_time(0.1)
    assert core.cached_block_count() == target.reader.loads[-1].cached_block_count == 2
