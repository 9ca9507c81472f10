"""kvmesh.toml: strict, one clear sentence per mistake, documentation from the same annotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.config import ROOT, ConfigError, MeshConfig, build, describe, keys, load, parse, sections
from kvmesh.config_sections import Decode, Engine


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[engine]\nkv_block = 3", "Unknown key engine.kv_block: did you mean engine.kv_blocks?"),
        ("[engin]", "Unknown section [engin]: did you mean [engine]?"),
        ("bogus = 1", "Unknown key bogus: allowed are"),
        ("mesh = 3", "mesh = 3 is not a section: write [mesh] and its keys below it."),
        ("[engine]\nkv_blocks = 3", "engine.kv_blocks = 3 is out of range: allowed is 8 to 10000000 blocks."),
        (
            "[engine]\nkv_blocks = '9'",
            'engine.kv_blocks = "9" is not a whole number: allowed is 8 to 10000000 blocks.',
        ),
        (
            "[decode]\ndetached_s = true",
            "decode.detached_s = true is not a number: allowed is 0.05 to 600 s.",
        ),
        ("[decode]\ndetached_s = nan", "decode.detached_s = nan is out of range: allowed is 0.05 to 600 s."),
        (
            "[engine]\narithmetic = 'gpu'",
            'engine.arithmetic = "gpu" is out of range: allowed is "transformer" or "hashed" or "torch".',
        ),
        (
            "[redis]\nurl = 'localhost'",
            'redis.url = "localhost" is out of range: allowed is empty, redis://, rediss://, unix://, redis+sentinel://',
        ),
        ("[engine]\nkv_blocks = 127", "allowed are 128 or more blocks of 32 tokens."),
        ("[frontend]\ndefault_deadline_s = 700", "allowed are 0.1 to 600 s."),
        ("[frontend]\nruntime_max_s = 3601", "allowed is 0.1 to 3600 s."),
        ("[frontend]\ndefault_deadline_s = 3601", "allowed is 0.1 to 3600 s."),
        ("[frontend]\nmax_output_tokens_default = 5000", "allowed are 1 to 4096 tokens."),
        ("[frontend]\nport = 65535\nreplicas = 2", "allowed are 0 to 65534."),
        ("[engine]\nmax_sequence_tokens = 100", "frontend.max_output_tokens_default = 256 leaves no tokens"),
    ],
)
def test_a_mistake_is_one_sentence_with_key_value_and_range(text: str, sentence: str) -> None:
    """The message alone is enough to correct the file."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[engine", "is not TOML: "),
        (b"\xff", "is not UTF-8 text."),
        (None, "Cannot read the configuration"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """Missing, broken and foreign files have different messages."""
    path = tmp_path / "kvmesh.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        load(path)


def test_direct_construction_is_checked_like_the_file() -> None:
    """Tests and benches that build sections in code get the same refusals."""
    with pytest.raises(ConfigError, match=r"decode\.replicas = 0"):
        Decode(replicas=0)
    assert Decode(detached_s=1).detached_s == 1


def test_described_defaults_parse_back() -> None:
    """The documentation is a working configuration, and it holds every key."""
    text = describe(MeshConfig())
    assert parse(text) == MeshConfig()
    for name, section in sections().items():
        assert f"[{name}]" in text
        for key, _, allowed in keys(section):
            assert f"{key} = " in text
            assert allowed.about[0].isupper() or allowed.about[0] == "`"
            assert allowed.about.endswith(".")


def test_all_mistakes_are_told_at_once() -> None:
    """One line each, in the order of the file."""
    text = """
[mesh]
hots = "x"
[router]
replicas = 99
[frontend]
port = "x"
max_live_request = 3
[routers]
a = 1
[tenants.a]
clas = "b"
[pools.x]
routers = 44
[pools.y]
routers = "many"
"""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert [line.split(" = ")[0] for line in str(caught.value).split("\n")] == [
        "Unknown section [routers]: did you mean [router]?",
        "Unknown key mesh.hots: did you mean mesh.host?",
        "router.replicas",
        "Unknown key frontend.max_live_request: did you mean frontend.max_live_requests?",
        "frontend.port",
        "Unknown key tenants.a.clas: did you mean tenants.a.class?",
        "pools.x.routers",
        "pools.y.routers",
    ]


def test_documentation_of_the_configuration_is_current() -> None:
    """docs/configuration.md shows what `kvmesh config` prints without a file."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert describe(MeshConfig()) in page, "run: make docs"


def test_the_file_in_the_repository_is_accepted() -> None:
    """The example of the repository is a valid configuration."""
    assert load(ROOT / "kvmesh.toml").engine.arithmetic == "transformer"


def test_prefill_takes_the_cache_size_of_decode_by_default() -> None:
    """The value 0 stands for the same size."""
    assert Engine(kv_blocks=500).blocks_of_prefill == 500
    assert Engine(kv_blocks=500, prefill_kv_blocks=300).blocks_of_prefill == 300


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("/a", False),
        ("a b", False),
    ],
)
def test_a_model_may_have_the_name_of_the_hub(name: str, is_allowed: bool) -> None:
    """Clients send that name."""
    tables = {"mesh": {"model": name}, "versions": {"v1": {"model": name}}}
    if is_allowed:
        assert build(tables).versions["v1"].model == name
    else:
        with pytest.raises(ConfigError, match="1 to 128 letters, digits"):
            build(tables)


def test_mistakes_between_sections_are_told_together() -> None:
    """A pool of an unknown version, and a default that leaves no room for a prompt."""
    tables = {
        "pools": {"a": {"version": "v9"}},
        "versions": {"v1": {}},
        "frontend": {"max_output_tokens_default": 4096},
        "engine": {"max_sequence_tokens": 4096},
    }
    with pytest.raises(ConfigError) as refused:
        build(tables)
    first, second = str(refused.value).splitlines()
    assert "pools.a.version" in first and "max_output_tokens_default" in second
