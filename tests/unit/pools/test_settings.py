"""Pools and versions of the configuration: defaults, inheritance, and one clear sentence per mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.config import ROOT, ConfigError, MeshConfig, describe, parse
from kvmesh.pool_sections import POOLS_MAX
from kvmesh.pools import first_pool, pool_names, pool_settings, version_names, version_settings
from kvmesh.snapshot import content

TWO = """
[engine]
arithmetic = "hashed"
salt = "s0"
step_s = 0.5
prefill_s = 0.25
[pools.next]
version = "v2"
prefill = 3
[pools.stable]
version = "v1"
routers = 2
[versions.v1]
[versions.v2]
salt = "s2"
step_s = 0
model_dir = "engines"
faults = "errors=0.05"
cold_s = 1.5
golden = "golden.json"
"""


def test_without_tables_there_is_one_pool_of_the_salts_name() -> None:
    """The mesh of release 0.1.0: the salt is the version's name, and the counts are those of the sections."""
    config = parse("[engine]\nsalt = 's'\n[router]\nreplicas = 3\n[prefill]\nreplicas = 0")
    assert pool_names(config) == ("default",) and version_names(config) == ("s",)
    pool = pool_settings(config, "default")
    assert (pool.version.name, pool.version.salt, pool.version.engine) == ("s", "s", config.engine)
    assert pool.version.model_path == config.mesh.model_path
    assert (pool.routers, pool.prefill, pool.decode) == (3, 0, 2)
    assert pool.process_name("router", 1) == "router-1" and first_pool(config) == pool


def test_a_version_overrides_the_engine_with_what_it_names() -> None:
    """An absent cost is the engine's, a cost of 0 is 0."""
    config = parse(TWO)
    assert parse(describe(config)) == config
    v1, v2 = version_settings(config, "v1"), version_settings(config, "v2")
    assert (v1.salt, v1.engine.step_s, v1.engine.prefill_s, v1.faults, v1.golden) == (
        *("s0", 0.5, 0.25, ""),
        None,
    )
    assert (v2.salt, v2.engine.step_s, v2.engine.prefill_s, v2.faults) == ("s2", 0.0, 0.25, "errors=0.05")
    assert [(each.engine.cold_s, each.engine.cold_runs) for each in (v1, v2)] == [(0.0, 2), (1.5, 2)]
    assert v2.model_path == ROOT / "engines" and v2.golden == ROOT / "golden.json"
    assert v1.model_path == config.mesh.model_path == Path(ROOT / "engines/reference/model")


def test_pools_have_counts_and_names_of_their_own() -> None:
    """The pool `stable` comes first, wherever the file has it."""
    config = parse(TWO)
    assert pool_names(config) == ("stable", "next") and version_names(config) == ("v1", "v2")
    stable, following = first_pool(config), pool_settings(config, "next")
    assert (stable.name, stable.version.name) == ("stable", "v1")
    assert (stable.routers, stable.prefill, stable.decode) == (2, 1, 1)
    assert (following.routers, following.prefill, following.decode) == (1, 3, 1)
    assert following.process_name("decode", 0) == "next-decode-0"


def test_the_only_version_is_the_default() -> None:
    """A pool without a version takes the only one, and without versions the salt."""
    config = parse("[versions.v7]\n[pools.a]\n[pools.b]\nversion = 'v7'")
    assert [pool_settings(config, name).version.name for name in ("a", "b")] == ["v7", "v7"]
    assert version_names(config) == ("v7",)
    assert pool_settings(parse("[pools.a]"), "a").version.name == "kvmesh-1"
    assert pool_settings(parse("[versions.v7]"), "default").version.name == "v7"


def test_the_mistakes_of_all_tables_are_told_at_once() -> None:
    """One line each."""
    text = "[versions.a]\nfaults = 'x'\n[versions.b]\n[pools.p]\nversion = 'x'\n[pools.q]\nversion = 'y'"
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == [
        "versions.a.faults",
        "pools.p.version",
        "pools.q.version",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[versions.a]\n[pools.p]\nversion = 'b'", 'pools.p.version = "b" is unknown: allowed are a.'),
        ("[pools.p]\nversion = 'b'", 'pools.p.version = "b" is unknown: the configuration names none.'),
        (
            "[versions.a]\n[versions.b]\n[pools.p]",
            'pools.p.version = "" is unknown: allowed are a, b.',
        ),
        ("[versions.a]\n[versions.b]", "has 2 versions (a, b) and no [pools.NAME]"),
        ("[pools.P]", '[pools.P] has the invalid name "P": allowed are up to 64 of a-z, 0-9 and -.'),
        ("[versions.'a b']", "has the invalid name"),
        ("[pools.p]\nrouters = 17", "pools.p.routers = 17 is out of range: allowed is 0 to 16."),
        ("[pools.p]\nprefil = 1", "Unknown key pools.p.prefil: did you mean pools.p.prefill?"),
        ("[versions.a]\nstep_s = -1", "versions.a.step_s = -1 is out of range: allowed is 0 to 10 s."),
        ("[versions.a]\nstep_s = 'x'", 'versions.a.step_s = "x" is not a number: allowed is 0 to 10 s.'),
        ("[versions.a]\nsalt = 'a b'", "allowed is empty or 1 to 64 characters without spaces."),
        ("[versions.a]\nfaults = 'x'", 'versions.a.faults = "x" needs engine.arithmetic = "hashed"'),
        ("[versions.a]\ncold_s = 1", 'versions.a.cold_s = 1 needs engine.arithmetic = "hashed"'),
        (
            "[versions.a]\ncold_runs = 101",
            "versions.a.cold_runs = 101 is out of range: allowed is 0 to 100 runs.",
        ),
        (
            "[versions.a]\ncold_runs = 1.5",
            "versions.a.cold_runs = 1.5 is not a whole number: allowed is 0 to 100 runs.",
        ),
        ("[engine]\ncold_s = 1", 'engine.cold_s = 1 needs engine.arithmetic = "hashed"'),
        (
            "[engine]\narithmetic = 'hashed'\ncold_s = 61",
            "engine.cold_s = 61 is out of range: allowed is 0 to 60 s.",
        ),
        ("[control]\nreplicas = 4", "control.replicas = 4 is out of range: allowed is 0 to 3."),
    ],
)
def test_a_mistake_is_one_sentence_with_field_value_and_range(text: str, sentence: str) -> None:
    """The message alone is enough to correct the file."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_pool_or_version_is_refused_with_the_allowed_ones() -> None:
    """A near name is suggested."""
    config = parse(TWO)
    with pytest.raises(ConfigError, match=r'"stabel" is not a pool: did you mean stable\? allowed are next'):
        pool_settings(config, "stabel")
    with pytest.raises(ConfigError, match=r'"default" is not a pool: allowed are next, stable\.'):
        pool_settings(config, "default")
    with pytest.raises(ConfigError, match=r'version = "v3" is unknown: allowed are v1, v2\.'):
        version_settings(config, "v3")
    with pytest.raises(ConfigError, match=r"allowed are kvmesh-1\."):
        version_settings(MeshConfig(), "v3")


def test_a_mesh_has_at_most_as_many_pools_as_a_snapshot() -> None:
    """A configuration with more pools could never be published."""
    assert POOLS_MAX == content.POOLS_MAX
    parse("".join(f"[pools.p{number}]\n" for number in range(POOLS_MAX)))
    with pytest.raises(ConfigError, match=r"has 65 pools: allowed are 0 to 64\."):
        parse("".join(f"[pools.p{number}]\n" for number in range(POOLS_MAX + 1)))
