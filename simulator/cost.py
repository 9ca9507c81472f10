"""Cost model of simulated prefills: c0 + u (a + b (T - u / 2)) seconds for u uncached of T tokens. Pure.

The form is that of exact causal attention; the FLOP count is Mooncake's (FAST'25). MFU and c0 of the named models are
assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
H100_FLOPS: Final = 989e12
"""Dense bf16, NVIDIA's data sheet."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients of one model on one replica."""

    name: str
    c0_s: float
    a_s: float
    """Seconds per uncached token."""
    b_s: float
    """Seconds per pair of an uncached token and a token before it, cached or not."""
    slo_floor_s: float = 0.5
    """A first token within this is in time, whatever the prompt."""
    kv_bytes: int = 131_072
    """Bytes of KV cache per token."""

    def seconds(self, uncached: int, total: int) -> float:
        """Return the seconds for `uncached` of `total` tokens. At least one token is computed."""
        uncached = max(1, uncached)
        return self.c0_s + uncached * (self.a_s + self.b_s * (total - uncached / 2))

    def slo_s(self, total: int) -> float:
        """Return the longest good time to first token: twice the cold prefill on an idle replica, at least the floor."""
        return max(2 * self.seconds(total, total), self.slo_floor_s)

    def gib(self, blocks: float, block_tokens: int) -> float:
        """Return the GiB of `blocks`."""
        return blocks * block_tokens * self.kv_bytes / GIB


def _dense(
    name: str,
    c0_s: float,
    params: float,
    gpus: int,
    mfu: float,
    layers: int,
    hidden: int,
    kv: int,
    slo: float,
) -> Cost:
    speed = gpus * H100_FLOPS * mfu
    return Cost(name, c0_s, 2 * params / speed, 4 * layers * hidden / speed, slo, kv)


COSTS: Final = {
    "8b": _dense("8b", 0.010, 8.03e9, 1, 0.5, 32, 4096, 131_072, 0.5),
    "70b": _dense("70b", 0.020, 70.6e9, 4, 0.45, 80, 8192, 327_680, 1.0),
}
"""8B on one H100, 70B on four (tensor parallel)."""
