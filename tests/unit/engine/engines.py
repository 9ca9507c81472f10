"""Engines without Triton, and a stream that collects their outputs."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.request import EngineRequest, RequestKind, SamplingParams
from engines.reference.config import EngineConfig
from engines.reference.engine import ReferenceEngine
from engines.reference.fault_injector import FaultInjector
from engines.reference.loading import load_arithmetic
from tests.patience import Patience

CONFIG = EngineConfig(
    "hashed", kv_blocks=64, block_tokens=8, step_tokens_max=48, running_max=16, queue_max=64
)
_KEYS = itertools.count(1)


@dataclass
class Answer:
    """Collects the outputs of one request."""

    key: int
    is_streaming: bool = True
    output: RequestOutput = field(default_factory=RequestOutput)
    messages: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def send(self, output: RequestOutput) -> None:
        self.messages += 1
        self.output.merge(output)
        if output.is_final:
            self.done.set()

    def is_cancelled(self) -> bool:
        return False

    def wait(self) -> RequestOutput:
        assert self.done.wait(20.0), f"request {self.key} did not end"
        return self.output


@dataclass
class EngineHarness:
    """One engine and its output queue."""

    engine: ReferenceEngine
    output_queue: OutputQueue
    deaths: list[str] = field(default_factory=list)  # an injected death of the process, instead of it

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        output: int,
        kind: RequestKind = RequestKind.CONTEXT_AND_GENERATION,
        *,
        handoff: bytes | None = None,
        kv_peer: str | None = None,
        sampling: SamplingParams | None = None,
        request_id: str = "r",
        is_streaming: bool = True,
    ) -> Answer:
        answer = Answer(next(_KEYS), is_streaming)
        self.output_queue.open(answer.key, answer)
        self.engine.submit(
            EngineRequest(
                key=answer.key,
                request_id=request_id,
                kind=kind,
                prompt=prompt,
                output_tokens_max=output,
                sampling=sampling or SamplingParams(),
                context_phase_params=handoff or b"",
                kv_peer=kv_peer,
                arrival_ns=time.monotonic_ns(),
            )
        )
        return answer

    def run(
        self,
        prompt: npt.NDArray[np.int32],
        output: int,
        kind: RequestKind = RequestKind.CONTEXT_AND_GENERATION,
        **options: object,
    ) -> RequestOutput:
        return self.submit(prompt, output, kind, **options).wait()  # type: ignore[arg-type]

    def is_empty(self) -> bool:
        """Return whether no sequence and no handoff is left, and all blocks are free or evictable."""
        load = self.engine.core.load()
        busy = load.sequences_running + load.sequences_waiting + load.handoffs_held
        return busy == 0 and load.blocks_free == load.blocks_total


@contextmanager
def running(config: EngineConfig = CONFIG, **changes: object) -> Iterator[EngineHarness]:
    """Yield a started engine; close it and check its consistency afterwards."""
    config = replace(config, **changes)  # type: ignore[arg-type]
    arithmetic, digest = load_arithmetic(config)
    output_queue = OutputQueue()
    output_queue.start()
    deaths: list[str] = []
    faults = FaultInjector(config.faults, lambda: deaths.append("died")) if config.faults else None
    engine = ReferenceEngine(config, arithmetic, digest, output_queue, faults)
    engine.start()
    try:
        yield EngineHarness(engine, output_queue, deaths)
    finally:
        engine.close()
        output_queue.close()
        engine.core.scheduler.assert_consistent()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Poll a condition every few milliseconds until it is true; fail after `timeout_s` of a quiet machine."""
    bound = Patience(timeout_s)
    while not condition():
        assert not bound.is_over, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)
