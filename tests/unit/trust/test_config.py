"""[trust] and the frontend's TLS keys: all that belong together, or none."""

from __future__ import annotations

import itertools

import pytest

from kvmesh.config import ConfigError, build, describe, parse

PATHS = {"certificate": "c.pem", "key": "c.key", "authority": "a.pem"}


@pytest.mark.parametrize("given", [combo for size in (1, 2) for combo in itertools.combinations(PATHS, size)])
def test_a_part_of_trust_is_refused(given: tuple[str, ...]) -> None:
    """A forgotten key must not leave a mesh open."""
    with pytest.raises(ConfigError) as refused:
        build({"trust": {name: PATHS[name] for name in given}})
    missing = next(name for name in PATHS if name not in given)
    assert f'trust.{missing} = ""' in str(refused.value) and "all three or none" in str(refused.value)


def test_a_certificate_without_key_at_the_edge_is_refused() -> None:
    """The same for an authority of clients without a certificate of the frontend."""
    for table in ({"certificate": "x"}, {"key": "x"}, {"client_authority": "x"}):
        with pytest.raises(ConfigError, match="certificate and key together"):
            build({"frontend": table})
    with pytest.raises(ConfigError, match=r"needs trust\.certificate"):
        build({"frontend": {"certificate": "x", "key": "y", "client_authority": "z"}})
    build({"frontend": {"certificate": "x", "key": "y", "client_authority": "z"}, "trust": PATHS})


def test_a_password_of_redis_is_never_shown() -> None:
    """The password is neither in the configuration printed at start nor in the sentence of a mistake."""
    config = build({"redis": {"url": "rediss://mesh:s3cret@redis.example:6380/0?ssl_password=s3cret2"}})
    shown = describe(config)
    assert "s3cret" not in shown and "redis.example:6380" in shown
    assert parse(shown).redis.url, "the output is a configuration again"
    with pytest.raises(ConfigError) as refused:
        build({"redis": {"url": "http://mesh:s3cret@redis.example"}})
    assert "s3cret" not in str(refused.value) and "redis.example" in str(refused.value)
