"""Answers of a prefill replica, case by case."""

from __future__ import annotations

import pytest

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.queue_order import fifo
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import EngineBusy, EngineError, InvalidRequest
from kvmesh.triton.port import EngineLoad, FirstAnswer
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.prefill.records import CallRecord
from services.prefill.slot import PrefillSlot
from tests.unit.triton.fake_engine import FOREIGN, VOCABULARY, FakeEngine, facts, next_token
from tests.unit.triton.reader import HELLO, Reader, SlotView, submit

CONTEXT = pb.PHASE_CONTEXT_ONLY
PROMPT = [3, 1, 4, 1, 5, 9]
LIMITS = PrefillLimits(queue_max_requests=3, engine_concurrency=1, handoff_timeout_s=10.0, detached_s=3.0)


class Replica:
    """A prefill core with one router and an engine that moves by hand."""

    def __init__(
        self,
        limits: PrefillLimits = LIMITS,
        model: ModelFacts | None = None,
        *,
        hides_end_token: bool = False,
    ) -> None:
        self.now_s = 50.0
        self.records: list[CallRecord] = []
        self.core = PrefillCore("prefill-0", model or facts(), limits, self.records.append)
        self.engine = FakeEngine(self.core.sink, hides_end_token=hides_end_token)
        self.core.connect(self.engine)
        self.engine.report(self.now_s)
        self.session, self.reader = self.attach()

    def attach(self) -> tuple[CallerSession[PrefillSlot], Reader]:
        """Open another stream."""
        outbox = DownwardOutbox()
        return self.core.open_session(HELLO, outbox, self.now_s), Reader(outbox)

    def submit(self, slot: int, prompt: list[int] | None = None, **changes: object) -> SlotView:
        """Submit and read the answer."""
        message = submit(slot, prompt or PROMPT, CONTEXT, **changes)  # type: ignore[arg-type]  # fields by name
        view = self.reader.open(slot, message.start_position)
        self.send(submits=[message])
        return view

    def cancel(self, slot: int, reason: pb.Cancel.Reason.ValueType = pb.Cancel.REASON_CLIENT) -> None:
        """Cancel a slot."""
        self.send(cancels=[pb.Cancel(slot=slot, reason=reason)])

    def send(self, **parts: object) -> None:
        """Send one message and read the answer."""
        self.session.on_request(pb.AttachRequest(**parts), self.now_s)  # type: ignore[arg-type]  # fields by name
        self.read()

    def step(self) -> None:
        """Let the engine finish its calls."""
        self.now_s += 0.5
        self.engine.step(self.now_s)
        self.read()

    def pass_time(self, seconds: float) -> None:
        """Move the clock, with its timers, and read."""
        end_s = self.now_s + seconds
        while (at_s := self.core.next_wake_s()) is not None and at_s <= end_s:
            self.now_s = max(self.now_s, at_s)
            self.core.on_timer(self.now_s)
        self.now_s = end_s
        self.read()

    def read(self) -> None:
        """Read the stream and check the counts."""
        self.reader.read(self.now_s)
        self.core.assert_consistent()

    def is_empty(self) -> bool:
        """True if neither the core nor the engine holds anything."""
        return not self.core.slot_table.slots and not self.engine.live and not self.engine.held


def test_first_token_comes_with_its_handoff_and_the_hit() -> None:
    """The slot is accepted, started and answered. The handoff is held until decode has pulled it."""
    replica = Replica()
    view = replica.submit(1, PROMPT * 2)
    assert view.is_accepted and view.is_started
    replica.step()
    assert view.ids == [next_token(PROMPT * 2)] and view.first is not None
    assert view.first.context_phase_params in replica.engine.held
    assert (view.first.cached_token_count, view.first.computed_token_count) == (4, 8)
    assert view.first.prefill_us == 500_000
    assert replica.core.slot_table.blocks_reserved == 3
    del replica.engine.held[view.first.context_phase_params]  # decode pulled
    replica.cancel(1, pb.Cancel.REASON_TRANSFERRED)
    assert replica.is_empty() and not replica.engine.released and not replica.core.slot_table.blocks_reserved
    assert [record.outcome for record in replica.records] == ["first_token"]


def test_an_answer_that_is_only_its_end_token_ends_well_without_a_token() -> None:
    """TensorRT's kernels never output the end token. So a final answer without tokens is complete and empty."""
    replica = Replica(hides_end_token=True)
    view = replica.submit(1, end_token_id=next_token(PROMPT))
    replica.step()
    assert view.failure is None and view.ids == []
    assert view.finish == pb.Finish(slot=1, end_position=0, reason=pb.Finish.REASON_END_TOKEN)
    assert replica.is_empty() and not replica.core.slot_table.blocks_reserved
    assert [record.outcome for record in replica.records] == ["end_token"]


@pytest.mark.parametrize(
    ("end_token_id", "output", "is_fine"), [(next_token(PROMPT), 8, True), (-1, 1, True), (-1, 8, False)]
)
def test_only_an_answer_that_continues_needs_a_handoff(end_token_id: int, output: int, is_fine: bool) -> None:
    """A first token that ends the answer is sent without a handoff. The slot is not held then."""
    replica = Replica()
    view = replica.submit(1, end_token_id=end_token_id, output=output)
    (call_id,) = replica.engine.live
    replica.engine.cancel(call_id)
    sink = replica.core.sink
    sink.on_first(call_id, FirstAnswer(), replica.now_s)
    sink.on_tokens(call_id, (next_token(PROMPT),), (), replica.now_s)
    sink.on_end(call_id, replica.now_s)
    replica.read()
    assert view.ids == ([next_token(PROMPT)] if is_fine else [])
    assert (view.failure is None) == is_fine
    assert replica.is_empty()


def test_first_token_has_the_position_of_a_resumed_request() -> None:
    """A resumed request continues at its position, and the engine does its sampling."""
    replica = Replica()
    view = replica.submit(1, start=4)
    replica.step()
    assert view.first is not None and view.first.position == 4


@pytest.mark.parametrize("phase", ["queued", "running", "held"])
def test_cancel_frees_everything_in_every_phase(phase: str) -> None:
    """Only a held handoff needs a release. No more rows follow for the slot."""
    replica = Replica()
    if phase == "queued":
        replica.submit(1)
    replica.submit(2)
    if phase == "held":
        replica.step()
    replica.cancel(2)
    replica.cancel(1)
    assert replica.is_empty() and len(replica.engine.released) == (phase == "held")


def test_a_lost_stream_cancels_work_but_keeps_handoffs_for_some_time() -> None:
    """Decode may be pulling. So a handoff is released only some time after its stream was lost."""
    replica = Replica()
    view = replica.submit(1)
    replica.step()
    replica.submit(2)
    replica.submit(3)
    replica.session.on_closed(replica.now_s)
    assert len(replica.core.slot_table.slots) == 1 and not replica.engine.live
    replica.pass_time(2.9)
    assert view.first is not None and view.first.context_phase_params in replica.engine.held
    replica.pass_time(0.2)
    assert replica.is_empty()


def test_an_abandoned_handoff_is_released_and_reported() -> None:
    """After its timeout it is released, and the router gets its loss."""
    replica = Replica()
    view = replica.submit(1)
    replica.step()
    replica.pass_time(10.1)
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert replica.is_empty()


def test_the_queue_is_bounded_and_states_a_retry_delay() -> None:
    """One prompt runs, three wait, and the fifth is refused."""
    replica = Replica()
    for slot in range(1, 5):
        replica.submit(slot)
    view = replica.submit(5)
    assert view.refusal is not None and view.refusal.reason == pb.Refusal.REASON_QUEUE_FULL
    assert view.refusal.message == "prefill queue full: 3/3" and view.refusal.retry_after_ms > 0


def test_the_longest_wait_grows_while_the_engine_stands_still() -> None:
    """It is 0 without a queue. The control plane holds no replica back while users wait for a second."""
    replica = Replica()

    def wait_s() -> float:
        return replica.core.longest_wait_us(replica.now_s) / 1e6

    replica.submit(1)
    replica.pass_time(0.5)
    assert wait_s() == 0.0, "a prompt in the engine does not wait"
    for slot in range(2, 5):
        replica.submit(slot)
    replica.pass_time(1.5)
    assert wait_s() == pytest.approx(1.5)
    while not replica.core.is_idle():
        replica.step()
        replica.pass_time(10.1)
    assert wait_s() == 0.0


def test_queue_waits_for_blocks_of_held_handoffs() -> None:
    """The core starts no more prompts than the engine has blocks for. A transfer frees blocks at once."""
    replica = Replica(model=facts(kv_blocks=20))
    first, second = replica.submit(1, PROMPT * 8), replica.submit(2, PROMPT * 8)
    replica.step()
    assert first.first is not None and not second.is_started
    del replica.engine.held[first.first.context_phase_params]
    replica.cancel(1, pb.Cancel.REASON_TRANSFERRED)
    assert second.is_started


def test_deadlines_refuse_waiting_prompts_and_finish_running_ones() -> None:
    """A waiting prompt is refused. A running one is cancelled in the engine, and finished with the reason."""
    replica = Replica()
    running = replica.submit(1, remaining_ms=2000, ttft_ms=1000)
    waiting = replica.submit(2, remaining_ms=1000)
    replica.pass_time(1.0)
    assert running.finish == pb.Finish(slot=1, end_position=0, reason=pb.Finish.REASON_DEADLINE)
    assert waiting.refusal is not None and waiting.refusal.reason == pb.Refusal.REASON_DEADLINE
    assert not waiting.is_started and replica.is_empty()


def test_a_first_token_in_time_ends_the_deadline_here() -> None:
    """A held handoff is bounded by its own timeout, not by the first token's deadline."""
    replica = Replica()
    view = replica.submit(1, ttft_ms=1000)
    replica.step()
    replica.pass_time(5.0)
    assert view.first is not None and not view.is_over()


def test_higher_attempt_ends_a_lower_one_in_every_phase() -> None:
    """The handoff of the lower attempt is released. Equal and lower attempts are refused (fencing)."""
    replica = Replica()
    first = replica.submit(1, request_id="a" * 32, attempt=1)
    replica.step()
    second = replica.submit(2, request_id="a" * 32, attempt=2)
    assert first.finish is not None and first.finish.reason == pb.Finish.REASON_SUPERSEDED
    assert len(replica.engine.released) == 1 and second.is_started
    for slot, attempt in ((3, 1), (4, 2)):
        view = replica.submit(slot, request_id="a" * 32, attempt=attempt)
        assert view.refusal is not None and view.refusal.reason == pb.Refusal.REASON_SUPERSEDED


def test_engine_faults_fail_the_slot_and_the_queue_continues() -> None:
    """An error has its code. A busy engine has not touched the request."""
    replica = Replica()
    views = [replica.submit(slot) for slot in range(1, 4)]
    for error in (EngineError("x"), EngineBusy("x"), InvalidRequest("x")):
        replica.engine.fail(next(iter(replica.engine.live)), error, replica.now_s)
        replica.read()
    failures = [(view.failure.code, view.failure.untouched) for view in views if view.failure]
    assert failures == [
        (pb.Failure.CODE_ENGINE_ERROR, False),
        (pb.Failure.CODE_ENGINE_ERROR, True),
        (pb.Failure.CODE_INVALID, False),
    ]
    assert replica.is_empty()


def test_a_lost_engine_fails_waiting_prompts_and_another_boot_forgets_handoffs() -> None:
    """No prompt waits for a lost engine, and no handoff for its lost KV blocks."""
    replica = Replica()
    held, running, waiting = replica.submit(1), replica.submit(2), replica.submit(3)
    replica.engine.step(replica.now_s, chosen=lambda call_id: call_id == 1)
    replica.engine.crash("boot-2", replica.now_s)
    replica.read()
    assert held.failure is not None and held.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert running.failure is not None and running.failure.code == pb.Failure.CODE_ENGINE_LOST
    assert waiting.failure is not None and waiting.failure.code == pb.Failure.CODE_ENGINE_LOST
    assert replica.is_empty()


def test_a_silent_engine_is_found() -> None:
    """The limit without an answer is 30 s and twice the estimate."""
    replica = Replica()
    view = replica.submit(1, remaining_ms=600_000)
    replica.pass_time(29.9)
    assert not view.is_over()
    replica.pass_time(0.2)
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_STALLED and replica.is_empty()


def test_refusals_name_what_is_wrong() -> None:
    """Version, phase, block size, length, deadline and drain: each has its reason."""
    replica = Replica()
    stale = replica.submit(1, model_version="v2")
    size = replica.submit(2, block_tokens=8)
    long = replica.submit(3, [1] * 125)
    late = replica.submit(4, remaining_ms=0)
    replica.core.drain()
    draining = replica.submit(5)
    found = [
        (view.refusal.reason, view.refusal.field)
        for view in (stale, size, long, late, draining)
        if view.refusal
    ]
    assert found == [
        (pb.Refusal.REASON_STALE_SNAPSHOT, ""),
        (pb.Refusal.REASON_INVALID, "block_tokens"),
        (pb.Refusal.REASON_INVALID, "budget.max_output_tokens"),
        (pb.Refusal.REASON_DEADLINE, ""),
        (pb.Refusal.REASON_DRAINING, ""),
    ]


def test_prefill_refuses_takeovers() -> None:
    """A prefill replica has no streams that can be taken over."""
    replica = Replica()
    view = replica.reader.open(1, 0)
    replica.send(adopts=[pb.Adopt(slot=1, request_id="a" * 32, attempt=1)])
    assert view.refusal is not None and view.refusal.reason == pb.Refusal.REASON_UNKNOWN_REQUEST


def test_the_budget_of_a_submit_orders_the_queue() -> None:
    """First its priority class, by default the middle one. Then its tenant's share by tokens over weight."""
    replica = Replica(PrefillLimits(engine_concurrency=1), facts(kv_blocks=4096))
    views = {"running": replica.submit(1, tenant="a")}
    for number, (name, changes) in enumerate(
        {
            "a1": {"tenant": "a", "prompt": PROMPT * 4},
            "a2": {"tenant": "a", "prompt": PROMPT * 4, "priority_class": 4},
            "a3": {"tenant": "a", "prompt": PROMPT * 4, "priority": 100},
            "b1": {"tenant": "b"},
            "b2": {"tenant": "b"},
            "heavy": {"tenant": "c", "weight": 100.0, "prompt": PROMPT * 20},
            "heavy again": {"tenant": "c", "weight": 100.0},
            "lower": {"tenant": "d", "priority_class": 3, "priority": 100},
            "higher": {"tenant": "a", "priority_class": 5, "priority": -100},
            "shadow": {"tenant": "e", "priority_class": 7, "shadow": True},
        }.items(),
        2,
    ):
        views[name] = replica.submit(number, **changes)  # type: ignore[arg-type]  # fields by name
    assert starts(replica, views) == [
        "running",
        "higher",
        "a3",
        "b1",
        "heavy",
        "heavy again",
        "b2",
        "a1",
        "a2",
        "lower",
        "shadow",
    ]


def starts(replica: Replica, views: dict[str, SlotView]) -> list[str]:
    """Let the engine work until all prompts have started, and return them in order."""
    order: list[str] = []
    while len(order) < len(views):
        order += [name for name, view in views.items() if view.is_started and name not in order]
        replica.step()
    return order


def test_the_shortest_goes_first_by_the_routers_estimate_or_by_a_guess() -> None:
    """Without an estimate the replica's own measure orders the queue, even if it is too rough for refusals."""
    replica = Replica(PrefillLimits(engine_concurrency=1), facts(kv_blocks=4096))
    replica.submit(1, PROMPT)  # 0.5 s for 6 tokens
    replica.step()
    views = {
        "running": replica.submit(2, estimate_s=1.0),
        "guessed long": replica.submit(3, PROMPT * 10),
        "told long": replica.submit(4, estimate_s=3.0),
        "guessed short": replica.submit(5, PROMPT * 2),
        "told short": replica.submit(6, estimate_s=0.2),
    }
    (guessed,) = [one for one in replica.core.slot_table.slots.values() if one.submitted.prompt_tokens == 60]
    assert guessed.submitted.estimate_s == 0
    assert starts(replica, views) == ["running", "told short", "guessed short", "told long", "guessed long"]


def test_first_come_first_served_if_the_configuration_says_so() -> None:
    """The length of a prompt does not count then."""
    replica = Replica(PrefillLimits(engine_concurrency=1, order_key=fifo), facts(kv_blocks=4096))
    seconds = (1.0, 3.0, 0.2, 2.0)
    views = {str(number): replica.submit(number, estimate_s=seconds[number - 1]) for number in range(1, 5)}
    assert starts(replica, views) == ["1", "2", "3", "4"]


def test_the_load_report_is_correct() -> None:
    """It has waiting, running and held prompts, in requests and tokens."""
    replica = Replica()
    for slot in range(1, 4):
        replica.submit(slot)
    replica.step()
    load = replica.core.load_report(replica.now_s)
    assert (load.queued_request_count, load.queued_token_count) == (1, 6)
    assert (load.running_request_count, load.held_handoff_count) == (1, 1)
    assert load.engine_ready and load.engine_boot_id == "boot-1" and load.engine_memory_bytes == 0
    replica.core.sink.on_load(EngineLoad("boot-1", 64, 60, resident_bytes=1 << 40), replica.now_s)
    report = replica.core.load_report(replica.now_s)
    assert report.engine_memory_bytes == 1 << 40 and not report.HasField("cold_step_total")
    for cold in (0, 3):
        replica.core.sink.on_load(EngineLoad("boot-1", 64, 60, cold_steps=cold), replica.now_s)
        report = replica.core.load_report(replica.now_s)
        assert report.HasField("cold_step_total") and report.cold_step_total == cold


@pytest.mark.parametrize("vocabulary_size", [VOCABULARY, 0])
def test_a_first_token_outside_the_vocabulary_is_a_fault_of_the_engine(vocabulary_size: int) -> None:
    """The handoff is released, and the next prompt runs. A caller without a vocabulary gets the token."""
    replica = Replica()
    replica.engine.lie = lambda _: (FOREIGN, 0)
    view = replica.submit(1, vocabulary_size=vocabulary_size)
    after = replica.submit(2)
    replica.step()
    if not vocabulary_size:
        assert view.first is not None and view.first.token_id == VOCABULARY
        return
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_INVALID_TOKEN
    assert not view.failure.untouched and len(replica.engine.released) == 1
    assert after.is_started


def test_a_cordon_and_a_drain_by_the_control_plane_end() -> None:
    """A cordon is reported and refuses nothing. A drain refuses new prompts; held ones stay until the pull."""
    replica = Replica()
    replica.core.set_cordoned(True)
    assert replica.core.load_report(replica.now_s).cordoned
    assert replica.submit(1).refusal is None
    replica.core.drain()
    refused = replica.submit(2)
    assert refused.refusal is not None and refused.refusal.reason == pb.Refusal.REASON_DRAINING
    replica.step()
    assert replica.core.live_request_count() == len(replica.core.slot_table.held) == 1
    replica.core.undrain()
    replica.core.set_cordoned(False)
    load = replica.core.load_report(replica.now_s)
    assert not load.draining and not load.cordoned
    assert replica.submit(3).refusal is None
