"""Addresses from which a replica may pull KV blocks."""

from __future__ import annotations

import msgspec

from kvmesh.replica.kv_sources import KEPT_S, KvSources
from tests.unit.membership.test_view import member


def test_an_address_stays_allowed_while_handoffs_may_be_held_there() -> None:
    """A prefill that drains or has lost its name is no longer listed. Its handoffs can still be pulled, for KEPT_S."""
    one, two = (
        msgspec.structs.replace(member(name), role="prefill", kv_address=f"kv:{name}") for name in ("a", "b")
    )
    sources = KvSources("default", "m")
    assert not sources.allows("kv:a", 0.0)
    sources.take([one, two], 1.0)
    sources.take([two], 10.0)
    sources.take([two], 20.0)
    assert sources.allows("kv:b", 1e9)
    assert sources.allows("kv:a", 10.0 + KEPT_S - 0.1)
    assert not sources.allows("kv:a", 10.0 + KEPT_S)
    sources.take([one], 30.0)
    assert sources.allows("kv:a", 1e9) and sources.allows("kv:b", 59.0) and not sources.allows("kv:b", 60.0)
    assert not sources.allows("", 30.0)


def test_addresses_of_other_pools_are_refused() -> None:
    """Prefill replicas of another pool may have other weights."""
    own, foreign = (
        msgspec.structs.replace(member(name), role="prefill", kv_address=f"kv:{name}", pool=pool)
        for name, pool in (("a", "next"), ("b", "stable"))
    )
    sources = KvSources("next", "m")
    sources.take([own, foreign], 1.0)
    assert sources.allows("kv:a", 1.0) and not sources.allows("kv:b", 1.0)
    sources.take([msgspec.structs.replace(own, pool="stable"), foreign], 2.0)
    assert sources.allows("kv:a", 2.0) and not sources.allows("kv:a", 2.0 + KEPT_S)


def test_addresses_of_other_versions_and_of_decode_replicas_are_refused() -> None:
    """A prefill of the own pool may register with another version until routers have refused it. Decode has no handoffs."""
    stale = msgspec.structs.replace(member("a"), role="prefill", kv_address="kv:a", model_version="older")
    decode = msgspec.structs.replace(member("b"), role="decode", kv_address="kv:b")
    sources = KvSources("default", "m")
    sources.take([stale, decode], 1.0)
    assert not any(sources.allows(address, 1.0) for address in ("kv:a", "kv:b", ""))


def test_an_engine_without_an_address_allows_handoffs_without_one() -> None:
    """The boots of all sources are known, so that a new one is tried."""
    bare = msgspec.structs.replace(member("c"), role="prefill", boot_id="1", engine_boot_id="e")
    sources = KvSources("default", "m")
    sources.take([bare, member("d")], 1.0)
    assert sources.allows("", 1.0) and sources.boots == {("c", "1", "e")}
