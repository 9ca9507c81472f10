"""The configuration of one engine: a frozen, strict dataclass that the launcher passes to the model as JSON."""

from dataclasses import dataclass, field

import msgspec

from engines.reference.cost_model import CostModel
from engines.reference.faults import check_option

ARITHMETICS = ("transformer", "hashed", "torch")
SHAPES = ("test", "0.5B", "8B")
"""Shapes of `torch` whose weights are drawn (llama/shape.py)."""
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bfloat16", "float32")
COLD_MAX_S = 60
COLD_RUNS_MAX = 100


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine. Unknown keys and values out of range raise ValueError, so the engine does not start."""

    arithmetic: str  # one of ARITHMETICS
    host: str = "127.0.0.1"
    kv_port: int = 0  # of the KV listener; 0 takes any free port (tests only: kv_address would say 0)
    kv_advertise: str = ""  # "host:port" that other engines dial for KV blocks; empty: host and kv_port
    kv_blocks: int = 2048
    block_tokens: int = 32
    step_tokens_max: int = 512  # rows that one step computes, prefill and decode together
    running_max: int = 64  # sequences in the running batch
    queue_max: int = 256  # requests that wait for admission
    prefix_reuse: bool = True
    salt: str = ""  # of block hashes and, with the hashed arithmetic, of the model version
    model_dir: str = ""  # of the weights of transformer and torch
    torch_shape: str = (
        ""  # torch only: one of SHAPES, whose weights are drawn; empty: a Hugging Face folder, model_dir
    )
    torch_seed: int = 0  # torch only, of drawn weights
    device: str = "auto"  # torch only: one of DEVICES; auto takes a GPU if there is one
    dtype: str = "bfloat16"  # torch only, of weights and KV: one of DTYPES
    vocab_size: int = 4096  # hashed only
    max_sequence_tokens: int = (
        4096  # hashed, and torch up to its model's; the transformer has its own in config.json
    )
    end_token: int = 2  # hashed only
    end_probability: float = 0.0  # hashed only, per position
    hide_end_token: bool = False  # outputs omit the end token, as TensorRT-LLM's C++ backend does
    seeded_resume: bool = True  # tell that a resumed request continues with the same tokens, where it does
    step_frames: bool = True  # offer the outputs of all requests of a client in step frames
    model_version: str = "1"
    handoff_timeout_s: float = 30.0
    pull_timeout_s: float = 10.0  # deadline of one KV transfer, connection setup included
    cancellation_check_s: float = 0.05  # period of the cancellation poll
    lie: str = (
        ""  # fault injection: "tokens" emits ids outside the vocabulary, "refuse" fails requests as invalid
    )
    lie_after: int = 0  # correct output tokens of each request before the injected fault
    faults: str = ""  # hashed only; fault injection: the text of faults.py, or @PATH of a file with it
    costs: CostModel = field(default_factory=CostModel)
    cold_s: float = 0.0  # hashed only; extra seconds of a step with a cold shape (cold_shapes.py)
    cold_runs: int = 2  # runs of each shape after boot that are cold

    def __post_init__(self) -> None:
        checks = {
            "arithmetic": (self.arithmetic in ARITHMETICS, _either(ARITHMETICS)),
            "torch_shape": (self.torch_shape in ("", *SHAPES), f"empty, {_either(SHAPES)}"),
            "torch_seed": (0 <= self.torch_seed < 1 << 63, "0..2^63-1"),
            "device": (self.device in DEVICES, _either(DEVICES)),
            "dtype": (self.dtype in DTYPES, _either(DTYPES)),
            "kv_port": (0 <= self.kv_port <= 65535, "0..65535"),
            "kv_blocks": (self.kv_blocks >= 1, ">= 1"),
            "block_tokens": (1 <= self.block_tokens <= 1024, "1..1024"),
            "running_max": (
                1 <= self.running_max <= self.step_tokens_max,
                f"1..step_tokens_max ({self.step_tokens_max})",
            ),
            "queue_max": (self.queue_max >= 1, ">= 1"),
            "end_probability": (0.0 <= self.end_probability <= 1.0, "0..1"),
            "handoff_timeout_s": (self.handoff_timeout_s > 0.0, "> 0"),
            "pull_timeout_s": (self.pull_timeout_s > 0.0, "> 0"),
            "lie": (self.lie in ("", "tokens", "refuse"), "empty, tokens or refuse"),
            "lie_after": (self.lie_after >= 0, ">= 0"),
            "faults": (not self.faults or self.arithmetic == "hashed", "empty unless arithmetic is hashed"),
            "cold_s": (
                0.0 <= self.cold_s <= COLD_MAX_S if self.arithmetic == "hashed" else self.cold_s == 0.0,
                f"0..{COLD_MAX_S}" if self.arithmetic == "hashed" else "0 unless arithmetic is hashed",
            ),
            "cold_runs": (0 <= self.cold_runs <= COLD_RUNS_MAX, f"0..{COLD_RUNS_MAX}"),
            "cancellation_check_s": (self.cancellation_check_s > 0.0, "> 0"),
        }
        for name, (is_fine, allowed) in checks.items():
            if not is_fine:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)}")
        check_option(self.faults)

    @property
    def offers_seeded_resume(self) -> bool:
        """True if the model tells `seeded_resume`. The tokens of torch depend on the batch, too."""
        return self.seeded_resume and self.arithmetic != "torch"

    @property
    def has_guides(self) -> bool:
        """True if the model has a tokenizer, without which no guide can be compiled."""
        return self.arithmetic == "transformer"

    @property
    def kv_address(self) -> str:
        """The "host:port" that other engines dial to pull KV blocks."""
        return self.kv_advertise or f"{self.host}:{self.kv_port}"

    def to_json(self) -> str:
        """Return the JSON that `from_json` reads."""
        return msgspec.json.encode(self).decode()


def _either(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def from_json(text: str) -> EngineConfig:
    """Parse a configuration; raises ValueError with the unknown key or the bad value."""
    raw = msgspec.json.decode(text)
    known = set(EngineConfig.__dataclass_fields__)
    if not isinstance(raw, dict) or set(raw) - known:
        raise ValueError(f"unknown configuration keys: {sorted(set(raw) - known)}")
    return msgspec.convert(raw, EngineConfig)
