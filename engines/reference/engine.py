"""The engine's threads: the engine thread runs steps, a thread per KV transfer pulls blocks, the KV listener serves them.

All public methods but `start` and `close` are thread-safe: they append a command to a queue, and the engine thread
runs the commands between steps. At most `queue_max` new requests wait in the command queue; further requests are
rejected. The other commands are bounded by the number of open requests.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from engines.contract import errors
from engines.contract.errors import TransferError
from engines.contract.guide_text import GuideText
from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.publisher import Publisher, Subscriber
from engines.contract.request import EngineRequest, EventCursor
from engines.reference.arithmetic import Arithmetic
from engines.reference.blocks import Blocks
from engines.reference.config import EngineConfig
from engines.reference.core import EngineCore, KvPull
from engines.reference.cost_model import Pacer
from engines.reference.fault_injector import POLL_S, FaultInjector
from engines.reference.handoff import Handoff, decode
from engines.reference.kv_transfer import KvListener, KvPuller, KvSource
from engines.reference.scheduler import ScheduledChunk
from engines.reference.sequence import Guide, ReferenceRequest, Sequence

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReferenceEngine:
    """Runs requests on `arithmetic`; outputs go to `output_queue`, KV events and load reports to `publisher`.

    `digest` identifies the arithmetic, so that KV of another model is rejected. `start` once, `close` once.
    Without `faults` nothing is injected.
    """

    config: EngineConfig
    arithmetic: Arithmetic
    digest: str
    output_queue: OutputQueue
    faults: FaultInjector | None = None
    compile_guide: Callable[[GuideText], Guide] | None = None
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    core: EngineCore = field(init=False)
    publisher: Publisher = field(init=False)
    listener: KvListener = field(init=False)
    _store: Any = field(init=False)
    _blocks: Blocks = field(init=False)
    _sequences: dict[int, Sequence] = field(default_factory=dict)  # engine thread only
    _pullers: dict[int, KvPuller] = field(default_factory=dict)  # engine thread only
    _commands: deque[Callable[[], None]] = field(default_factory=deque)
    _queued_requests: int = 0  # new requests among the commands
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _step_pacer: Pacer = field(default_factory=Pacer)
    _link_pacer: Pacer = field(default_factory=Pacer)
    _was_idle: bool = True
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Allocate the store, open the KV listener, start the engine thread.

        Raises OSError if the KV port is taken, ValueError if the store does not fit.
        """
        config = self.config
        self._store = self.arithmetic.new_store(config.kv_blocks, config.block_tokens)
        self._blocks = self.arithmetic.blocks(self._store)
        core = EngineCore(
            config, self.boot_id, self.digest, "", self._blocks.block_bytes, compile_guide=self.compile_guide
        )
        source = KvSource(
            self.boot_id, self.digest, self._blocks, core.handoffs.begin_send, self._handoff_sent
        )
        self.listener = KvListener(source, config.host, config.kv_port)
        self.listener.start()
        core.address = config.kv_advertise or f"{config.host}:{self.listener.port}"
        self.core = core
        self.publisher = Publisher(self.boot_id)
        self.publisher.start()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the engine thread; open requests end with an error, held handoffs are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.listener.close()
        self.publisher.close()

    def submit(self, request: EngineRequest) -> None:
        """See contract.engine. A full queue, and a handoff of another engine, arrive as the final output."""
        accepted = ReferenceRequest(
            **{each.name: getattr(request, each.name) for each in fields(EngineRequest)},
            handoff=decode(request.context_phase_params) if request.context_phase_params else None,
            # Refuses a guide that cannot be met before it takes a slot.
            compiled_guide=self._compiled(request.guide),
        )
        with self._changed:
            is_accepted = self._queued_requests < self.config.queue_max and not self._is_closed
            if is_accepted:
                self._queued_requests += 1
                self._commands.append(partial(self._on_submit, accepted))
                self._changed.notify()
        if not is_accepted:
            text = errors.QUEUE_FULL.format(limit=self.config.queue_max)
            self.output_queue.put([(request.key, RequestOutput(error=text, is_final=True))])

    def cancel(self, key: int) -> None:
        """End the request or subscription with this key, after its client has cancelled. Unknown keys are ignored."""
        self._enqueue(partial(self._on_cancel, key))

    def stop(self, request_id: str) -> None:
        """Cancel all open requests with this Triton id and release their handoffs. Unknown ids are ignored."""
        self._enqueue(partial(self._on_stop, request_id))

    def release_handoff(self, context_phase_params: bytes, on_released: Callable[[], None]) -> None:
        """See contract.engine. `on_released` is called on the engine thread."""
        self._enqueue(partial(self._on_release, decode(context_phase_params), on_released))

    def subscribe_events(self, key: int, subscriber: Subscriber, cursor: EventCursor | None = None) -> None:
        """Send all later KV events to `subscriber`.

        The subscription starts after `cursor` if the replay buffer still has all events since. Otherwise a snapshot of
        the prefix table comes first.
        """
        self._enqueue(partial(self._on_subscribe_events, key, subscriber, cursor))

    def subscribe_load(self, key: int, subscriber: Subscriber) -> None:
        """Send load reports to `subscriber`."""
        self._enqueue(partial(self.publisher.subscribe_load, key, subscriber))

    def _compiled(self, guide: GuideText | None) -> Guide | None:
        return None if guide is None or self.compile_guide is None else self.compile_guide(guide)

    # All methods below run on the engine thread, except _enqueue, _pull and _handoff_sent.

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        while not self._is_closed:
            if self.faults is not None:
                self.core.set_faults(self.faults.active(time.monotonic()))
            self._run_commands()
            self.core.expire(time.monotonic())
            plan = self.core.plan(time.monotonic_ns())
            self._start_pulls()
            if plan:
                self._step(plan)
            self._was_idle = not plan
            self._flush()
            if not plan:
                self._wait()
        for sequence in list(self._sequences.values()):
            self.core.fail(sequence, errors.SHUTTING_DOWN)
        self._flush()

    def _wait(self) -> None:
        expiry_s = self.core.handoffs.next_expiry_s()
        timeout_s = None if expiry_s is None else max(0.0, expiry_s - time.monotonic())
        if self.faults is not None and self.faults.polls:
            timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._is_closed, timeout=timeout_s)

    def _run_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, deque()
            self._queued_requests = 0
        for command in commands:
            try:
                command()
            except Exception:  # noqa: BLE001  # a bug in one command must not end the engine
                _log.exception("engine command failed; the engine continues")

    def _step(self, plan: list[ScheduledChunk]) -> None:
        core, began_s = self.core, time.monotonic()
        cost_s = core.cost_s(plan, self.config.costs) * core.faults.slow
        end_s = self._step_pacer.book(began_s, cost_s, was_idle=self._was_idle)
        try:
            logits = self.arithmetic.forward(core.chunk_inputs(plan), self._store)
            pause_s = end_s - time.monotonic()
            if pause_s > 0.0:
                time.sleep(pause_s)
            core.commit(plan, logits, time.monotonic_ns(), time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001  # a bug ends the requests of this step only
            _log.exception("step failed; the requests of this step end with an error")
            for chunk in plan:
                core.fail(chunk.sequence, errors.ENGINE_FAULT.format(reason=type(error).__name__))

    def _flush(self) -> None:
        core = self.core
        outputs, core.outputs = core.outputs, []
        for key, output in outputs:
            if output.is_final:
                self._sequences.pop(key, None)
        for key in core.pulls_to_abort:
            puller = self._pullers.pop(key, None)  # None if the pull ended in the same iteration
            if puller is not None:
                puller.abort()
        core.pulls_to_abort.clear()
        if self.faults is not None and core.faults.leak_bytes:
            self.faults.leak(core.faults.leak_bytes, sum(output.is_final for _, output in outputs))
        if outputs:
            self.output_queue.put(outputs)
        self.publisher.publish(core.pool.drain_events(), core.load())

    def _on_submit(self, request: ReferenceRequest) -> None:
        if self.faults is not None and self.core.faults.kills(request.prompt):
            self.faults.kill()
        sequence = self.core.submit(request)
        if sequence is not None:
            self._sequences[request.key] = sequence

    def _on_cancel(self, key: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self.core.cancel(sequence)
        self.publisher.unsubscribe(key)

    def _on_stop(self, request_id: str) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.request.request_id == request_id:
                self.core.cancel(sequence)
        self.core.release_handoffs_of(request_id)

    def _on_release(self, handoff: Handoff, on_released: Callable[[], None]) -> None:
        self.core.release_handoff(handoff)
        on_released()

    def _on_subscribe_events(self, key: int, subscriber: Subscriber, cursor: EventCursor | None) -> None:
        # The snapshot contains events that are not published yet. Publishing them first keeps ids and content in step.
        self.publisher.publish(self.core.pool.drain_events(), self.core.load())
        is_known = cursor is not None and cursor.boot_id == self.boot_id
        if (
            cursor is None
            or not is_known
            or not self.publisher.resume_events(key, subscriber, cursor.event_id)
        ):
            self.publisher.subscribe_events(key, subscriber, self.core.pool.snapshot())

    def _start_pulls(self) -> None:
        core = self.core
        for pull in core.pulls_to_start:
            puller = KvPuller(pull.handoff, pull.first_block, len(pull.block_ids), self.config.pull_timeout_s)
            self._pullers[pull.key] = puller
            now_s = time.monotonic()
            cost_s = len(pull.block_ids) * self.config.costs.block_transfer_s
            ready_s = self._link_pacer.book(now_s, cost_s, was_idle=self._link_pacer.is_over(now_s))
            threading.Thread(
                target=self._pull, args=(pull, puller, ready_s), name="kv-pull", daemon=True
            ).start()
        core.pulls_to_start.clear()

    def _pull(self, pull: KvPull, puller: KvPuller, ready_s: float) -> None:
        staged: list[Any] = []

        def take(data: bytearray) -> None:
            staged.append(self._blocks.stage(data) if pull.block_ids else None)

        try:
            puller.pull(take)
        except TransferError as error:
            self._enqueue(partial(self._on_pull_failed, pull, str(error)))
            return
        except Exception as error:  # noqa: BLE001  # a device without memory must not leave the request waiting
            _log.exception("pulled blocks could not be staged; the request ends with an error")
            reason = errors.TRANSFER_FAILED.format(reason=type(error).__name__)
            self._enqueue(partial(self._on_pull_failed, pull, reason))
            return
        time.sleep(max(0.0, ready_s - time.monotonic()))
        self._enqueue(partial(self._on_pulled, pull, staged[0]))

    def _on_pulled(self, pull: KvPull, staged: Any) -> None:
        sequence = self._sequences.get(pull.key)
        self._pullers.pop(pull.key, None)
        if sequence is None or pull.key not in self.core.scheduler.running:
            return  # cancelled during the pull: another sequence may hold these blocks now
        if pull.block_ids:
            self._blocks.write(pull.block_ids, staged)
        self.core.pulled(sequence, time.monotonic_ns())

    def _on_pull_failed(self, pull: KvPull, reason: str) -> None:
        sequence = self._sequences.get(pull.key)
        if self._pullers.pop(pull.key, None) is not None and sequence is not None:
            sequence.is_pulling = False
            self.core.pull_failed(sequence, reason)

    def _handoff_sent(self, handoff_id: int, is_acknowledged: bool) -> None:
        self._enqueue(partial(self.core.handoff_sent, handoff_id, is_acknowledged=is_acknowledged))
