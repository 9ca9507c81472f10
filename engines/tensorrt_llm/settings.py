"""The settings of the model: llm.yaml, checked and completed. Pure: mappings in, settings out.

llm.yaml has the arguments of TensorRT-LLM's `LLM(...)`, and a table `kvmesh`:

    model_version  name of the version that the mesh knows; default: the name of the model folder
    warm_up        whether Triton runs two prompts before the model is ready; default true
    loras          adapters by the number that requests name: {1: {name: legal, path: /models/legal}}
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engines.tensorrt_llm import llm_arguments

TOKENS_PER_BLOCK: Final = 32
"""Default of KvCacheConfig.tokens_per_block (llm_args.py, see llm_arguments)."""
MAX_BATCH_SIZE: Final = 2048
"""Default of max_batch_size (llm_args.py)."""
MAX_NUM_TOKENS: Final = 8192
"""Default of max_num_tokens (llm_args.py)."""
EVENT_BUFFER: Final = 65_536
"""KV cache events that TensorRT-LLM buffers, unless llm.yaml says otherwise. Its own default 0 turns events off."""
TRANSFER_TIMEOUT_MS: Final = 60_000
"""Lifetime of a handoff, unless llm.yaml says otherwise. TensorRT-LLM's own default is to wait for ever."""
QUEUE_MAX: Final = 256
"""Requests beyond `max_batch_size` that wait in TensorRT-LLM; further requests are refused. It has no limit itself."""

MAX_BATCH_SIZE_MAX: Final = 1 << 16
MAX_NUM_TOKENS_MAX: Final = 1 << 24
KV_TOKENS_MAX: Final = 10**9
"""Largest kv_cache_config.max_tokens: of the smallest models it would be terabytes."""
TOKENS_PER_BLOCK_MAX: Final = 1024
EVENT_BUFFER_MAX: Final = 1 << 24
TRANSFER_TIMEOUT_MS_MAX: Final = 24 * 3_600_000
PARALLEL_MAX: Final = 1024
"""Largest tensor or pipeline parallel size."""
VALUES_MAX: Final = 10_000
"""Values in llm.yaml; one that an alias repeats counts each time."""
DEPTH_MAX: Final = 32
"""Levels of nested values in llm.yaml."""
NAME_MAX: Final = 100
"""Characters of a key in llm.yaml."""
INTEGER_MAX: Final = (1 << 63) - 1

BACKENDS: Final = ("UCX", "NIXL")
"""Transports of KV blocks between servers. MPI needs one MPI world, and DEFAULT is chosen by the environment."""


class SettingsRefused(Exception):
    """llm.yaml cannot be served. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter. `path`: its folder."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the folder of a model. `digest`: of its configuration, and of the names and sizes of its weights."""

    name: str
    vocab_size: int
    max_sequence_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one model. `llm`: the arguments of `LLM(...)`, completed."""

    llm: Mapping[str, Any]
    model_version: str
    vocab_size: int
    max_sequence_tokens: int
    digest: str  # engines with equal digests can exchange KV
    warm_up: bool
    loras: Mapping[int, Lora]

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a KV cache block."""
        return int(self._kv_cache["tokens_per_block"])

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache, from kv_cache_config.max_tokens."""
        return int(self._kv_cache["max_tokens"]) // self.tokens_per_block

    @property
    def max_batch_size(self) -> int:
        """Requests that TensorRT-LLM runs at once."""
        return int(self.llm["max_batch_size"])

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one step computes."""
        return int(self.llm["max_num_tokens"])

    @property
    def has_events(self) -> bool:
        """Whether TensorRT-LLM tells KV cache events that can be followed: one pool, with reuse and a buffer."""
        config = self._kv_cache
        is_told = bool(config["event_buffer_max_size"]) and config.get("enable_block_reuse", True)
        return bool(is_told) and not self.llm.get("enable_attention_dp", False)

    @property
    def has_guides(self) -> bool:
        """Whether TensorRT-LLM guides outputs."""
        return self.llm.get("guided_decoding_backend") is not None

    @property
    def is_disaggregated(self) -> bool:
        """Whether the model makes and takes handoffs."""
        return self.llm.get("cache_transceiver_config") is not None

    @property
    def transfer_timeout_s(self) -> float:
        """Lifetime of a handoff in seconds; 0 without disaggregation."""
        config = self.llm.get("cache_transceiver_config")
        return 0.0 if config is None else float(config["kv_transfer_timeout_ms"]) / 1000

    @property
    def parallelism(self) -> tuple[int, int]:
        """Tensor and pipeline parallel sizes."""
        return int(self.llm.get("tensor_parallel_size") or 1), int(
            self.llm.get("pipeline_parallel_size") or 1
        )

    @property
    def _kv_cache(self) -> Mapping[str, Any]:
        return self.llm["kv_cache_config"]  # type: ignore[no-any-return]  # `complete` has put it there

    def to_file(self) -> dict[str, Any]:
        """Return the completed llm.yaml, which `from_file` reads. The model needs no folder to read it."""
        loras = {number: {"name": each.name, "path": each.path} for number, each in self.loras.items()}
        told = {
            "model_version": self.model_version,
            "warm_up": self.warm_up,
            "loras": loras,
            "vocab_size": self.vocab_size,
            "max_sequence_tokens": self.max_sequence_tokens,
            "digest": self.digest,
        }
        return {**self.llm, "kvmesh": told}


def from_file(written: Mapping[str, Any]) -> Settings:
    """Return the settings that `Settings.to_file` gave."""
    llm = {name: value for name, value in written.items() if name != "kvmesh"}
    told = dict(written["kvmesh"])
    loras = {int(number): Lora(**each) for number, each in told.pop("loras").items()}
    return Settings(llm=llm, loras=loras, **told)


def complete(given: Any, facts: ModelFacts, version: str = "") -> Settings:
    """Return the settings of an llm.yaml, with the defaults that the mesh needs.

    `given`: the parsed file. `facts`: those of its model folder. `version`: takes the place of kvmesh.model_version.
    Raises SettingsRefused.
    """
    llm, told = split(given)
    kv_cache = _kv_cache(llm)
    longest = _number(llm, "max_seq_len", facts.max_sequence_tokens, low=2, high=INTEGER_MAX)
    if longest > facts.max_sequence_tokens:
        raise SettingsRefused(
            f"max_seq_len = {longest}: allowed is 2..{facts.max_sequence_tokens}, the max_position_embeddings of the model."
        )
    transceiver = _transceiver(llm)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        _number(llm, name, 1, low=1, high=PARALLEL_MAX)
    completed = {
        # The mesh sends token ids. A tokenizer is only needed for guides.
        "skip_tokenizer_init": llm.get("guided_decoding_backend") is None,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        **llm,
        "max_batch_size": _number(llm, "max_batch_size", MAX_BATCH_SIZE, low=1, high=MAX_BATCH_SIZE_MAX),
        "max_num_tokens": _number(llm, "max_num_tokens", MAX_NUM_TOKENS, low=1, high=MAX_NUM_TOKENS_MAX),
        "max_seq_len": longest,
        "kv_cache_config": kv_cache,
        **({} if transceiver is None else {"cache_transceiver_config": transceiver}),
    }
    data_types = f"{_data_type(llm)}-{_data_type(kv_cache, 'kv_cache_config.')}"
    digest = f"trtllm-{facts.digest}-{data_types}-{kv_cache['tokens_per_block']}"
    return Settings(
        llm=completed,
        model_version=version or told["model_version"] or facts.name,
        vocab_size=facts.vocab_size,
        max_sequence_tokens=longest,
        digest=digest,
        warm_up=told["warm_up"],
        loras=_loras(told["loras"], llm),
    )


def split(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `LLM(...)` and the table `kvmesh` with its defaults. Raises SettingsRefused."""
    if not isinstance(given, Mapping):
        raise SettingsRefused("llm.yaml is no table: allowed are the arguments of LLM(...), and kvmesh.")
    _check_values(given)
    llm = {str(name): value for name, value in given.items() if name != "kvmesh"}
    wrong = llm_arguments.unknown(llm)
    if wrong:
        raise SettingsRefused(f"llm.yaml has keys that LLM(...) does not take: {', '.join(wrong)}.")
    told = {"model_version": "", "warm_up": True, "loras": {}}
    own = given.get("kvmesh") or {}
    if not isinstance(own, Mapping) or set(own) - set(told):
        names = sorted(map(str, set(own) - set(told))) if isinstance(own, Mapping) else [type(own).__name__]
        raise SettingsRefused(f"kvmesh has {', '.join(names)}: allowed are {', '.join(told)}.")
    for name, kind in (("model_version", str), ("warm_up", bool)):
        if name in own and not isinstance(own[name], kind):
            raise SettingsRefused(f"kvmesh.{name} = {_shown(own[name])}: allowed is a {_KINDS[kind]}.")
    if not isinstance(llm.get("model"), str) or not llm["model"]:
        raise SettingsRefused("model is missing: allowed is the folder of a model.")
    if llm.get("backend", "pytorch") != "pytorch":
        raise SettingsRefused(f"backend = {_shown(llm['backend'])}: allowed is pytorch.")
    return llm, {**told, **own}


_KINDS: Final[Mapping[type, str]] = {str: "text", bool: "truth value"}


def _kv_cache(llm: Mapping[str, Any]) -> dict[str, Any]:
    given = llm.get("kv_cache_config", {})
    if not isinstance(given, Mapping):
        raise SettingsRefused("kv_cache_config is no table: allowed are the fields of KvCacheConfig.")
    block = _number(
        given,
        "tokens_per_block",
        TOKENS_PER_BLOCK,
        low=2,
        high=TOKENS_PER_BLOCK_MAX,
        where="kv_cache_config.",
    )
    if block & (block - 1):
        raise SettingsRefused(
            f"kv_cache_config.tokens_per_block = {block}: allowed is a power of two above 1."
        )
    if given.get("max_tokens") is None:
        raise SettingsRefused(
            "kv_cache_config.max_tokens is missing: the mesh must know the size of the KV cache before the engine starts."
        )
    _number(given, "max_tokens", 0, low=block, high=KV_TOKENS_MAX, where="kv_cache_config.")
    buffer = _number(
        given, "event_buffer_max_size", EVENT_BUFFER, low=0, high=EVENT_BUFFER_MAX, where="kv_cache_config."
    )
    return {**given, "tokens_per_block": block, "event_buffer_max_size": buffer}


def _transceiver(llm: Mapping[str, Any]) -> dict[str, Any] | None:
    given = llm.get("cache_transceiver_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise SettingsRefused(
            "cache_transceiver_config is no table: allowed are the fields of CacheTransceiverConfig."
        )
    backend = given.get("backend")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise SettingsRefused(
            f"cache_transceiver_config.backend = {_shown(backend)}: allowed are UCX and NIXL, because prefill and "
            "decode are servers of their own."
        )
    timeout_ms = _number(
        given,
        "kv_transfer_timeout_ms",
        TRANSFER_TIMEOUT_MS,
        low=1,
        high=TRANSFER_TIMEOUT_MS_MAX,
        where="cache_transceiver_config.",
    )
    return {**given, "kv_transfer_timeout_ms": timeout_ms}


def _loras(given: Any, llm: Mapping[str, Any]) -> dict[int, Lora]:
    found = {}
    rows: list[tuple[Any, Any]] = list(given.items()) if isinstance(given, Mapping) else [(given, {})]
    for number, each in rows:
        is_number = isinstance(number, int) and not isinstance(number, bool) and number > 0
        is_pair = isinstance(each, Mapping) and set(each) == {"name", "path"}
        if not is_number or not is_pair:
            raise SettingsRefused(
                f"kvmesh.loras has {_shown(number)}: allowed is a whole number above 0 with name and path."
            )
        found[number] = Lora(str(each["name"]), str(each["path"]))
    if found and not llm.get("enable_lora") and llm.get("lora_config") is None:
        raise SettingsRefused(
            "kvmesh.loras needs lora_config or enable_lora: without them LLM(...) loads no adapter."
        )
    return found


def _number(
    given: Mapping[str, Any], name: str, default: int, *, low: int, high: int, where: str = ""
) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SettingsRefused(f"{where}{name} = {_shown(value)}: allowed is a whole number, {low}..{high}.")
    return value


def _data_type(given: Mapping[str, Any], where: str = "") -> str:
    value = given.get("dtype")
    if value is not None and not isinstance(value, str):
        raise SettingsRefused(f"{where}dtype = {_shown(value)}: allowed is the name of a data type.")
    return value or "auto"


def _check_values(given: Mapping[Any, Any]) -> None:
    """Raise SettingsRefused unless all values are those of JSON, and few enough.

    YAML has dates, sets, bytes, and aliases with which a short file is a value of any size.
    """
    left = VALUES_MAX
    waiting: list[tuple[str, Any, int]] = [("", given, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        left -= 1
        if left < 0:
            raise SettingsRefused(f"llm.yaml has too many values: allowed are {VALUES_MAX}.")
        if depth > DEPTH_MAX:
            raise SettingsRefused(f"{_cut(path)} is nested too deeply: allowed are {DEPTH_MAX} levels.")
        if isinstance(value, Mapping):
            for name, each in value.items():
                if not _is_name(name):
                    raise SettingsRefused(
                        f"llm.yaml has a key of type {type(name).__name__}: allowed are names of at most "
                        f"{NAME_MAX} characters, and numbers."
                    )
                waiting.append((f"{path}.{name}" if path else str(name), each, depth + 1))
        elif isinstance(value, list):
            waiting += [(path, each, depth + 1) for each in value[: left + 1]]
        elif isinstance(value, int) and not -INTEGER_MAX <= value <= INTEGER_MAX:
            raise SettingsRefused(f"{_cut(path)} is a whole number beyond 64 bits: allowed are smaller ones.")
        elif value is not None and not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise SettingsRefused(
                f"{_cut(path)} = {_shown(value)} is a {kind}: allowed are texts, numbers, truth values, lists and tables."
            )


def _is_name(name: Any) -> bool:
    if isinstance(name, str):
        return len(name) <= NAME_MAX
    return isinstance(name, int) and abs(name) <= INTEGER_MAX


def _shown(value: Any) -> str:
    """Return a value as text of bounded length."""
    return reprlib.repr(value)


def _cut(path: str) -> str:
    return path[:NAME_MAX]
