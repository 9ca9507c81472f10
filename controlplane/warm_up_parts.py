"""Builds the warm-up of replicas from the configuration. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from controlplane.rollouts.golden import VOCABULARY_MIN, GoldenSet, Prompt
from controlplane.warming import Warming
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.references import References
from controlplane.warmup.settings import Mode, Seeding, WarmUpSettings
from kvmesh.config import MeshConfig
from kvmesh.pools import pool_names, pool_settings

_SMALLEST: Final = ModelBounds(1, VOCABULARY_MIN, {})
"""Bounds of a pool that the configuration does not have: no work fits them."""


def settings_of(config: MeshConfig) -> WarmUpSettings:
    """Return the settings in `[warm_up]`."""
    section = config.warm_up
    return WarmUpSettings(
        mode=Mode(section.mode),
        seeding=Seeding(section.seeding),
        warming_max_s=section.warming_max_s,
        seeding_max_s=section.seeding_max_s,
        probing_max_s=section.probing_max_s,
        package_every_s=section.package_every_s,
    )


def warming_of(
    config: MeshConfig,
    prompts: tuple[Prompt, ...],
    sets: Mapping[str, GoldenSet],
    wall: Callable[[], float],
) -> Warming:
    """Return the warm-up of replicas. `prompts`: golden prompts of versions without a set in `sets`."""
    bounds = {name: _bounds(config, name) for name in pool_names(config)}
    return Warming(
        settings_of(config), References(prompts, sets), lambda pool: bounds.get(pool, _SMALLEST), wall
    )


def _bounds(config: MeshConfig, pool: str) -> ModelBounds:
    engine = pool_settings(config, pool).version.engine
    blocks = {"prefill": engine.blocks_of_prefill, "decode": engine.kv_blocks}
    longest = min(config.warm_up.prompt_tokens_max, engine.max_sequence_tokens // 2)
    return ModelBounds(longest, VOCABULARY_MIN, blocks, min(longest, config.router.local_prefill_tokens_max))
