"""The engine core without threads, stepped by hand."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engines.contract.outputs import RequestOutput
from engines.contract.request import RequestKind, SamplingParams
from engines.reference.config import EngineConfig
from engines.reference.core import EngineCore
from engines.reference.hashed import HashedArithmetic
from engines.reference.sequence import ReferenceRequest

CONFIG = EngineConfig("hashed", kv_blocks=24, block_tokens=4, step_tokens_max=16, running_max=6, queue_max=20)
ARITHMETIC = HashedArithmetic(vocab_size=64)


class Driver:
    """Steps a core and collects its outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.store = ARITHMETIC.new_store(config.kv_blocks, config.block_tokens)
        self.core = EngineCore(config, "boot", "digest", "127.0.0.1:1", int(self.store[0].nbytes))
        self.answers: dict[int, RequestOutput] = defaultdict(RequestOutput)
        self.now_ns = 0

    def step(self) -> bool:
        self.now_ns += 1_000_000
        self.core.expire(self.now_ns * 1e-9)
        plan = self.core.plan(self.now_ns)
        assert sum(work.count for work in plan) <= self.core.config.step_tokens_max
        if plan:
            logits = ARITHMETIC.forward(self.core.chunk_inputs(plan), self.store)
            self.core.commit(plan, logits, self.now_ns, 0.001)
        for key, output in self.core.outputs:
            assert not self.answers[key].is_final, "something came after the end"
            self.answers[key].merge(output)
        self.core.outputs.clear()
        self.core.scheduler.assert_consistent()
        return bool(plan)


def request_of(
    key: int,
    prompt: npt.NDArray[np.int32],
    output: int,
    kind: RequestKind = RequestKind.CONTEXT_AND_GENERATION,
) -> ReferenceRequest:
    sampling = SamplingParams(temperature=1.0 if key % 2 else 0.0, seed=key)
    return ReferenceRequest(key, f"r{key}", kind, prompt, output, sampling=sampling)


def alone(request: ReferenceRequest) -> list[int]:
    """Return the output of a fresh engine without prefix reuse and without batching, one row per step."""
    driver = Driver(replace(CONFIG, prefix_reuse=False, running_max=1, step_tokens_max=1))
    driver.core.submit(request)
    while driver.step():
        pass
    return driver.answers[request.key].tokens
