"""Facts of an engine that the configuration file gives: a default gives none, also after the file was written anew."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.config import MeshConfig, describe, parse
from kvmesh.config_sections import Engine
from kvmesh.replica.configured_facts import configured_facts
from kvmesh.triton.fact_sources import ConfiguredFacts


@pytest.mark.parametrize(
    ("text", "role", "facts"),
    [
        ("", "decode", ConfiguredFacts()),
        ("[engine]\nkv_blocks = 1024\n", "decode", ConfiguredFacts(kv_blocks=1024)),
        ("[engine]\nkv_blocks = 1024\n", "prefill", ConfiguredFacts(kv_blocks=1024)),
        (
            "[engine]\nkv_blocks = 1024\nprefill_kv_blocks = 4096\n",
            "prefill",
            ConfiguredFacts(kv_blocks=4096, kv_blocks_key="engine.prefill_kv_blocks"),
        ),
        ("[engine]\nkv_blocks = 1024\nprefill_kv_blocks = 4096\n", "decode", ConfiguredFacts(kv_blocks=1024)),
        ("[engine]\nblock_tokens = 32\n", "decode", ConfiguredFacts(block_tokens=32)),
        (
            '[engine]\nmax_sequence_tokens = 8192\nvocab_size = 32000\ndisaggregated = "no"\n',
            "decode",
            ConfiguredFacts(max_sequence_tokens=8192, vocab_size=32_000, disaggregated="no"),
        ),
    ],
)
def test_only_keys_of_the_file_are_facts(text: str, role: str, facts: ConfiguredFacts) -> None:
    """`kvmesh up` writes the checked configuration for its processes: that file gives the same facts."""
    config = parse(text)
    assert configured_facts(config, role) == facts
    written = parse(describe(config))
    assert written == config and configured_facts(written, role) == facts


def test_a_changed_value_is_given() -> None:
    """Also in a configuration that was never a file."""
    config = MeshConfig(engine=Engine(kv_blocks=2048))
    assert config.given == {"engine.kv_blocks"}
    replaced = msgspec.structs.replace(MeshConfig(), engine=Engine(vocab_size=512))
    assert replaced.given == {"engine.vocab_size"}


def test_no_vocabulary_is_no_fact() -> None:
    """0 asks the model, also where the file says it."""
    assert configured_facts(parse("[engine]\nvocab_size = 0\n"), "decode").vocab_size == 0
