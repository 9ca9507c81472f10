"""The arms and the settings of the measurement: configuration of the mesh, options of its engines, load. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Tables = Mapping[str, Mapping[str, Any]]
"""A configuration by section."""

NONE: Final = "none"

STEP_TOKENS_MAX: Final = 128
"""Rows of a step: 8 shapes of prompts, 1 to 128."""

BATCH_MAX: Final = 8
"""Rows of a decode's batch: 4 shapes, 1 to 8."""

_WARM_UP: Final = {"package_every_s": 5, "prompt_tokens_max": STEP_TOKENS_MAX}
"""Packages follow the short load of a run; a mesh of hours has one. Engines run longer prompts in parts."""

ARMS: Final[Mapping[str, Tables]] = {
    NONE: {"control": {"replicas": 0}},
    "shapes": {"control": {"replicas": 1}, "warm_up": {"mode": "shapes", **_WARM_UP}},
    "pull": {"control": {"replicas": 1}, "warm_up": {"seeding": "pull", **_WARM_UP}},
    "replay": {"control": {"replicas": 1}, "warm_up": {"seeding": "replay", **_WARM_UP}},
}
"""Sections of the configuration that differ between the arms. Without a control process nothing is warmed up."""

ARM_TITLES: Final[Mapping[str, str]] = {
    NONE: "none",
    "shapes": "shapes",
    "pull": "shapes + pull",
    "replay": "shapes + replay",
}

BLOCK_TOKENS: Final = 16
REPLICAS: Final = 2
"""Replicas of the role with the restarted engine."""

ENGINE: Final[Mapping[str, Any]] = {
    "arithmetic": "hashed",
    "salt": "warmups",
    "block_tokens": BLOCK_TOKENS,
    "kv_blocks": 4096,
    "max_sequence_tokens": 2048,
}


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop of conversations: each client sends a turn, reads the answer, and pauses."""

    clients: int
    pause_s: float
    """Mean pause between an answer and the next turn."""
    output_tokens: int
    turns: int = 14
    """Mean turns of a conversation."""
    system_tokens: int = 256
    """System prompt that all conversations share."""
    message_tokens: int = 48
    """New tokens of each turn."""

    @property
    def turns_spread(self) -> tuple[int, int]:
        """Fewest and most turns of a conversation: a quarter below and above the mean."""
        return max(1, self.turns - self.turns // 4), self.turns + self.turns // 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a run. With the start of the mesh, a run takes up to 150 s, and with a control process up to 270 s."""

    warm_s: float = 20.0
    """Load before the steady rate is measured."""
    steady_s: float = 20.0
    after_s_max: float = 75.0
    """Cap: the loss is integrated for so long at most."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A row group of the page."""

    name: str
    title: str
    role: str
    engine: Mapping[str, Any]
    """Further keys of section [engine]."""
    load: Load
    options: tuple[str, ...] = ()
    """Options of the engines of `role`, at each start."""
    cold: tuple[str, ...] = ()
    """Further options of the engines that are restarted. All others are warm already."""
    restarted: int = 1
    """Engines of `role` that are restarted at once."""
    down_s: float = 25.0
    """Time without these engines. It does not count as loss. A replica that is left takes over their conversations."""

    @property
    def counts_output(self) -> bool:
        """True if goodput counts output tokens, as at decode; else it counts prompt tokens."""
        return self.role == "decode"

    @property
    def replica(self) -> str:
        """The replica with a restarted engine that is watched."""
        return self.replicas[-1]

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas with a restarted engine."""
        return tuple(f"{self.role}-{at}" for at in range(REPLICAS - self.restarted, REPLICAS))

    @property
    def is_all(self) -> bool:
        """True if no engine of the role is left."""
        return self.restarted == REPLICAS

    @property
    def token_s(self) -> float:
        """Cost of an uncached prompt token."""
        return float(self.engine["prefill_token_s"])


_STEP_TOKENS: Final = ("--max-step-tokens", str(STEP_TOKENS_MAX))
_COLD: Final = ("--cold-s", "2", "--cold-runs", "2")

_PREFILL_ENGINE: Final = {
    "step_s": 0.01,
    "prefill_s": 0.002,
    "prefill_token_s": 0.0013,
    "block_transfer_s": 0.0002,
}
_PREFILL_LOAD: Final = Load(clients=32, pause_s=1.1, output_tokens=4)

_DECODE_ENGINE: Final = {
    "step_s": 0.04,
    "prefill_s": 0.001,
    "prefill_token_s": 0.0001,
    "block_transfer_s": 0.002,
}
_DECODE_OPTIONS: Final = (*_STEP_TOKENS, "--max-running", str(BATCH_MAX))
"""A step costs the same for any number of rows, so the batch bounds the rate of a replica."""

_DECODE_LOAD: Final = Load(clients=28, pause_s=0.1, output_tokens=24)

SETTINGS: Final[Mapping[str, Setting]] = {
    each.name: each
    for each in (
        Setting(
            "a",
            "prefill, cold shapes",
            "prefill",
            _PREFILL_ENGINE,
            _PREFILL_LOAD,
            (*_STEP_TOKENS, "--step-s", "0"),
            _COLD,
        ),
        Setting(
            "b",
            "prefill, empty cache",
            "prefill",
            _PREFILL_ENGINE,
            _PREFILL_LOAD,
            (*_STEP_TOKENS, "--step-s", "0"),
        ),
        Setting(
            "decode-a", "decode, cold shapes", "decode", _DECODE_ENGINE, _DECODE_LOAD, _DECODE_OPTIONS, _COLD
        ),
        Setting("decode-b", "decode, empty cache", "decode", _DECODE_ENGINE, _DECODE_LOAD, _DECODE_OPTIONS),
        Setting(
            "all-a",
            "all prefill engines at once, cold shapes",
            "prefill",
            _PREFILL_ENGINE,
            _PREFILL_LOAD,
            (*_STEP_TOKENS, "--step-s", "0"),
            _COLD,
            restarted=REPLICAS,
            down_s=2.0,
        ),
        Setting(
            "all-decode-a",
            "all decode engines at once, cold shapes",
            "decode",
            _DECODE_ENGINE,
            _DECODE_LOAD,
            _DECODE_OPTIONS,
            _COLD,
            restarted=REPLICAS,
            down_s=2.0,
        ),
    )
}


def replica_counts(setting: Setting) -> dict[str, int]:
    """Return the number of replicas by role: REPLICAS of the role under test, one of the other."""
    return {"prefill": 1, "decode": 1} | {setting.role: REPLICAS}


def tables(setting: Setting, arm: str, redis_url: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of a mesh: REPLICAS of the role under test, one of the other."""
    counts = replica_counts(setting)
    return {
        "redis": {"url": redis_url},
        "engine": {**ENGINE, **setting.engine},
        "prefill": {"replicas": counts["prefill"]},
        "decode": {"replicas": counts["decode"]},
        "router": {"local_prefill_tokens_max": 0},
        "frontend": {"port": 0},
        **{section: dict(keys) for section, keys in ARMS[arm].items()},
    }


def planned(settings: Iterable[str], arms: Iterable[str], repeats: int) -> Iterator[tuple[Setting, str, int]]:
    """Yield the runs in their order: setting, arm, and repeat from 1.

    Repeats are the outer loop. Every second one has the arms in reverse, so that a drift of the machine hits all alike.
    """
    forward, chosen = list(arms), list(settings)
    for repeat in range(1, repeats + 1):
        for name in chosen:
            for arm in forward if repeat % 2 else reversed(forward):
                yield SETTINGS[name], arm, repeat
