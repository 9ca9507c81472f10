"""Times prefills and decode steps of the network. Imports PyTorch only when it runs, and no module of the mesh."""
# mypy: allow-untyped-calls

from __future__ import annotations

import datetime as dt
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final

from bench.gpu.recording import Prefill, Recording, Step
from bench.gpu.shape import LLAMA_8B, Shape

TILE: Final = 128
UNCACHED: Final = (1, 16, 64, 128, 192, 256, 257, 384, 512, 768, 1024, 2048, 4096, 8192, 16_384, 32_768)
FAR_MAX: Final = 0.05
"""Largest relative difference between the logits of a prefill in two parts and those of a whole one.

In bf16 the difference was below 0.02 (measured once, by hand).
"""


class NoDeviceError(Exception):
    """PyTorch or a GPU is missing, or attention behind a cache is computed wrongly. The text states which."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes to time."""

    uncached: tuple[int, ...] = UNCACHED
    cached: tuple[int, ...] = (0, 1024, 4096, 16_384, 32_768, 65_536)
    tokens_max: int = 65_536
    repeats: int = 5
    sequence: int = 300
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (128, 1024, 2048, 4096, 8192, 16_384, 32_768)
    step_tokens_max: int = 262_144
    """Tokens of all streams of a step. The cache of an 8B model takes 128 KiB per token."""

    def grid(self) -> list[tuple[int, int]]:
        """Return cached and uncached tokens of every case."""
        return [
            (cached, uncached)
            for cached in self.cached
            for uncached in self.uncached
            if cached + uncached <= self.tokens_max
        ]

    def drawn(self, seed: int = 1) -> list[tuple[int, int]]:
        """Return the prompts of the sequence: log-uniform sizes, half of them with cached tokens in whole tiles."""
        chance = random.Random(seed)
        prompts = []
        for _ in range(self.sequence):
            uncached = round(exp(chance.uniform(log(16), log(self.tokens_max / 2))))
            cached = chance.choice((0, 1)) * chance.randrange(0, self.tokens_max - uncached, TILE)
            prompts.append((cached, uncached))
        return prompts


def on_gpu() -> Recording:
    """Time an 8B model on the GPU; takes some minutes. Raises NoDeviceError without PyTorch or a GPU."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise NoDeviceError("measuring needs PyTorch: pip install torch") from error
    if not torch.cuda.is_available():
        raise NoDeviceError(f"measuring needs a GPU: PyTorch {torch.__version__} finds no CUDA device")
    about = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name(),
        "software": f"PyTorch {torch.__version__}, eager, bf16",
    }
    return record(LLAMA_8B, Plan(), "cuda", torch.bfloat16, about)


def record(shape: Shape, plan: Plan, device: str, dtype: Any, about: dict[str, str]) -> Recording:
    """Time the plan on `device`. Repeats are the outer loop, each in another order."""
    from bench.gpu.network import Network

    network = Network(shape, device, dtype)
    cache = network.cache(1, plan.tokens_max)
    timer = Timer(device)
    about = {**about, "split": f"{_checked(network, plan):.4f} from one prefill to the same in two parts"}
    tokens = network.tokens(1, plan.tokens_max)

    def prefill_s(cached: int, uncached: int) -> float:
        return timer.seconds(lambda: network.logits(tokens[:, :uncached], cache, cached))

    chance = random.Random(0)
    for case in plan.grid():  # every size once, so kernels are chosen and loaded before the timing
        prefill_s(*case)
    times: dict[tuple[int, int], list[float]] = {case: [] for case in plan.grid()}
    for _ in range(plan.repeats):
        for case in chance.sample(plan.grid(), len(times)):
            times[case].append(prefill_s(*case))
    sequence = tuple(Prefill(*case, (prefill_s(*case),)) for case in plan.drawn())
    steps = tuple(step for batch in plan.batches for step in _steps_of(network, plan, timer, batch))
    return Recording(
        name=about.get("gpu", device),
        about=about,
        prefills=tuple(Prefill(*case, tuple(found)) for case, found in times.items()),
        sequence=sequence,
        steps=steps,
    )


class Timer:
    """Seconds of work on a device, by the host's clock from idle to idle."""

    def __init__(self, device: str) -> None:
        import torch

        self._wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(self, work: Callable[[], object]) -> float:
        """Run `work` and return its seconds."""
        self._wait()
        started_s = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started_s


def _checked(network: Any, plan: Plan) -> float:
    """Return the difference that FAR_MAX bounds. Raises NoDeviceError above FAR_MAX."""
    count = min(512, plan.tokens_max)
    tokens = network.tokens(1, count)
    whole = network.logits(tokens, network.cache(1, count), 0).float()
    cache = network.cache(1, count)
    for start, end in ((0, count // 3), (count // 3, count)):
        parted = network.logits(tokens[:, start:end], cache, start).float()
    far = float((parted - whole).norm() / whole.norm())
    if not far <= FAR_MAX:
        raise NoDeviceError(
            f"attention behind a cache is wrong here: {far:.3f} off, at most {FAR_MAX} is rounding"
        )
    return far


def _steps_of(network: Any, plan: Plan, timer: Timer, batch: int) -> list[Step]:
    """Time steps of `batch` streams. Their cache, up to 34 GB, is freed before the next number of streams."""
    contexts = [context for context in plan.contexts if batch * context <= plan.step_tokens_max]
    cache, tokens = network.cache(batch, max(contexts) + 1), network.tokens(batch, 1)

    def step_s(context: int) -> float:
        return timer.seconds(lambda: network.logits(tokens, cache, context))

    times: dict[int, list[float]] = {context: [] for context in contexts}
    for repeat in range(plan.repeats + 1):
        for context, seconds in times.items():
            taken_s = step_s(context)
            if repeat:  # the first warms up
                seconds.append(taken_s)
    return [Step(batch, context, tuple(seconds)) for context, seconds in times.items()]
