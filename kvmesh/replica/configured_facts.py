"""The facts of a replica's engine that the configuration file gives. Pure."""

from __future__ import annotations

from kvmesh.config import MeshConfig
from kvmesh.triton.fact_sources import ConfiguredFacts


def configured_facts(config: MeshConfig, role: str) -> ConfiguredFacts:
    """Return the facts for an engine of `role`, "prefill" or "decode". A default of the configuration gives nothing."""
    engine = config.engine
    key = "prefill_kv_blocks" if role == "prefill" and engine.prefill_kv_blocks else "kv_blocks"

    def given(key: str) -> int | None:
        return getattr(engine, key) if f"engine.{key}" in config.given else None

    return ConfiguredFacts(
        block_tokens=given("block_tokens"),
        kv_blocks=given(key),
        kv_blocks_key=f"engine.{key}",
        max_sequence_tokens=given("max_sequence_tokens"),
        vocab_size=given("vocab_size"),
        disaggregated=engine.disaggregated,
    )
