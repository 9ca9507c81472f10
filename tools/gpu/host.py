"""What the host offers, and the plan that fits it: the shape of the model, sizes of caches, prompts and loads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any, Final

ASK_S_MAX: Final = 120.0
ASK: Final = """
import json
try:
    import torch
except ImportError as error:
    print(json.dumps({"torch": "", "reason": str(error)}))
else:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = [torch.cuda.mem_get_info(at)[0] for at in range(count)]
    names = [torch.cuda.get_device_name(at) for at in range(count)]
    print(json.dumps({"torch": torch.__version__, "gpus": names, "free": free}))
"""
GB: Final = 10**9
WORK_BYTES: Final = 6 * GB
"""Memory of an engine beside weights and KV cache: activations, copies of keys and values, CUDA itself."""


class CannotRun(Exception):
    """The host lacks something. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Host:
    """PyTorch and the GPUs of the host. Without PyTorch `torch` is empty."""

    torch: str
    gpus: tuple[str, ...] = ()
    free_bytes: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Sizes are in tokens."""

    arithmetic: str
    """torch or hashed."""
    shape: str
    device: str
    vocabulary: int
    """That of the tokenizer in front, which must not be below the engine's."""
    gpus: tuple[str, str]
    """CUDA_VISIBLE_DEVICES of the prefill and of the decode engine; empty: all."""
    weight_bytes: int
    block_bytes: int
    prefill_blocks: int
    decode_blocks: int
    step_tokens: int
    sequence_tokens: int
    prompts: tuple[tuple[int, int], ...]
    """(cached, uncached) of each timed prefill."""
    transfers: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    """Prompt of each stream of a timed step."""
    repeats: int
    pairs: int
    streams: int
    stream_tokens: int
    window_s: float
    cancels: int
    """Random cancels of the conformance checks."""

    @property
    def engine_bytes(self) -> tuple[int, int]:
        """Memory of the prefill engine and of the decode engine."""
        each = self.weight_bytes + WORK_BYTES
        return each + self.block_bytes * self.prefill_blocks, each + self.block_bytes * self.decode_blocks


SMALL: Final = Plan(
    arithmetic="torch",
    shape="test",
    device="cpu",
    vocabulary=4096,
    gpus=("", ""),
    weight_bytes=0,
    block_bytes=16_384,
    prefill_blocks=512,
    decode_blocks=4096,
    step_tokens=1024,
    sequence_tokens=4096,
    prompts=((0, 64), (0, 256), (0, 512), (0, 768), (0, 1024), (512, 512)),
    transfers=(256, 1024),
    batches=(1, 16, 64),
    context=64,
    repeats=2,
    pairs=10,
    streams=64,
    stream_tokens=1600,
    window_s=2.0,
    cancels=50,
)
"""A rehearsal on a CPU."""
HASHED: Final = replace(
    SMALL,
    arithmetic="hashed",
    shape="",
    block_bytes=256,
    prompts=((0, 64), (0, 512), (0, 768), (0, 1024), (512, 512)),
    transfers=(256,),
    batches=(1, 16),
    repeats=1,
    pairs=3,
    window_s=0.6,
)
"""A rehearsal without PyTorch: the hashed arithmetic, whose times are simulated."""
HALF: Final = replace(
    SMALL,
    shape="0.5B",
    device="cuda",
    vocabulary=151_936,
    weight_bytes=1 * GB,
    block_bytes=393_216,
    prefill_blocks=4096,
    decode_blocks=6144,
    step_tokens=8192,
    sequence_tokens=10_240,
    prompts=(
        *((0, size) for size in (16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)),
        *((cached, 512) for cached in (1024, 4096, 8192)),
        *((cached, 2048) for cached in (1024, 4096)),
    ),
    transfers=(256, 1024, 4096, 8192),
    batches=(1, 8, 32, 64),
    context=512,
    repeats=5,
    pairs=60,
    stream_tokens=2000,
    window_s=4.0,
    cancels=1000,
)
EIGHT: Final = replace(
    HALF,
    shape="8B",
    vocabulary=128_256,
    weight_bytes=16_100_000_000,
    block_bytes=4 << 20,
    prefill_blocks=1024,
    decode_blocks=3072,
    stream_tokens=1000,
)


def ask_host(python: str = sys.executable) -> Host:
    """Return what the host offers. Another process asks: this one must not take memory of the GPU."""
    try:
        done = subprocess.run(
            [python, "-c", ASK], capture_output=True, text=True, check=True, timeout=ASK_S_MAX
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return Host("", reason=said[-1] if said else type(error).__name__)
    return _host(found)


def _host(found: dict[str, Any]) -> Host:
    return Host(
        found["torch"],
        tuple(found.get("gpus", ())),
        tuple(found.get("free", ())),
        found.get("reason", ""),
    )


def plan_for(host: Host, *, is_cpu: bool = False, arithmetic: str = "torch") -> Plan:
    """Return the largest plan that fits. `is_cpu`: a rehearsal. Raises CannotRun."""
    if arithmetic == "hashed":
        return HASHED
    if not host.torch:
        raise CannotRun(
            f"this Python has no PyTorch ({host.reason}): set PYTHON to one that has, or rehearse with --cpu "
            "--arithmetic hashed"
        )
    if is_cpu:
        return SMALL
    if not host.gpus:
        raise CannotRun(f"PyTorch {host.torch} finds no CUDA device: rehearse on the CPU with --cpu")
    for plan in (EIGHT, HALF):
        if len(host.gpus) > 1 and all(
            free >= needed for free, needed in zip(host.free_bytes, plan.engine_bytes, strict=False)
        ):
            return replace(plan, gpus=("0", "1"))
        if host.free_bytes[0] >= sum(plan.engine_bytes):
            return replace(plan, gpus=("0", "0"))
    raise CannotRun(
        f"{host.gpus[0]} has {host.free_bytes[0] / GB:.1f} GB free, and two engines of the shape {HALF.shape} take "
        f"{sum(HALF.engine_bytes) / GB:.1f} GB"
    )
