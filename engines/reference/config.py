"""The engine's configuration: one frozen, strict dataclass, passed from the launcher to the model as JSON."""

from dataclasses import dataclass, field

import msgspec

from engines.reference.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one engine needs to know. Unknown keys and impossible values refuse to start."""

    arithmetic: str  # "transformer" or "hashed"
    host: str = "127.0.0.1"
    kv_port: int = 0  # of the KV listener; 0 takes any free one (tests only: nobody can be told)
    kv_advertise: str = ""  # "host:port" that other engines dial for KV blocks; empty: host and kv_port
    kv_blocks: int = 2048
    block_tokens: int = 32
    step_tokens_max: int = 512  # rows one step computes, prompts and outputs together
    running_max: int = 64
    queue_max: int = 256
    prefix_reuse: bool = True
    salt: str = ""  # of block hashes and, with the hashed arithmetic, of the model version
    model_dir: str = ""  # of the transformer's weights
    vocab_size: int = 4096  # hashed only
    max_sequence_tokens: int = 4096  # hashed only; the transformer brings its own
    end_token: int = 2  # hashed only
    end_probability: float = 0.0  # hashed only, per position
    hide_end_token: bool = False  # answers lack it, as from TensorRT-LLM's C++ backend
    model_version: str = "1"
    handoff_timeout_s: float = 30.0
    pull_timeout_s: float = 10.0  # whole pull of one handoff, connecting included
    cancellation_check_s: float = 0.05
    lie: str = ""  # for tests: "tokens" says ids outside the vocabulary, "refuse" fails requests as invalid
    lie_after: int = 0  # true output tokens of each request before the lie
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        checks = {
            "arithmetic": (self.arithmetic in ("transformer", "hashed"), "transformer or hashed"),
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
            "cancellation_check_s": (self.cancellation_check_s > 0.0, "> 0"),
        }
        for name, (is_fine, allowed) in checks.items():
            if not is_fine:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)}")

    @property
    def kv_address(self) -> str:
        """Where other engines pull KV blocks from, "host:port"."""
        return self.kv_advertise or f"{self.host}:{self.kv_port}"

    def to_json(self) -> str:
        """The form `from_json` reads."""
        return msgspec.json.encode(self).decode()


def from_json(text: str) -> EngineConfig:
    """Read a configuration; ValueError names what is wrong."""
    raw = msgspec.json.decode(text)
    known = set(EngineConfig.__dataclass_fields__)
    if not isinstance(raw, dict) or set(raw) - known:
        raise ValueError(f"unknown configuration keys: {sorted(set(raw) - known)}")
    return msgspec.convert(raw, EngineConfig)
