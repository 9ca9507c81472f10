"""Every script in a real Redis: it compiles, its digest is the one that is sent, and the Redis functions that it uses
exist.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.config import ROOT
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from tests.lua_names import SCRIPTS, names


@pytest_asyncio.fixture
async def link(redis_url: str) -> AsyncIterator[RedisLink]:
    """A link to a Redis of the test's own."""
    link = RedisLink(redis_url)
    yield link
    await link.close()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
async def test_a_script_loads(link: RedisLink, path: Path) -> None:
    """Redis compiles it under the digest that EVALSHA will name."""
    script = Script.beside(str(path), path.name)
    assert bytes(await link.execute("SCRIPT", "LOAD", script.text)).decode() == script.digest
    for name, member in sorted(names(script.text).members):
        assert await link.execute("EVAL", f"return type({name}.{member})", 0) != b"nil", f"{name}.{member}"


@pytest.mark.parametrize("text", ["return total", "total = 1"])
async def test_redis_refuses_undeclared_names(link: RedisLink, text: str) -> None:
    """At run time, for reads and writes; the check of the sources finds such names earlier."""
    assert names(text).undeclared == [(1, "total")]
    with pytest.raises(RedisUnavailable, match=r"global variable|readonly table"):
        await link.execute("EVAL", text, 0)
