"""Budgets in a separate Redis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Reserve
from kvmesh.cli import tenants
from kvmesh.config import load
from kvmesh.redis_link import RedisLink
from kvmesh.tenants.catalogue import Catalogue

CONFIG = """
[tenants.search]
requests_per_min = 600
tokens_per_min = 60000
"""


async def test_live_use_is_read_where_the_budgets_are(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reservations of frontends in the other database are shown from there, and are not in the mesh's database."""
    (tmp_path / "kvmesh.toml").write_text(CONFIG)
    config = load(str(tmp_path / "kvmesh.toml"))
    other = redis_url.removesuffix("/0") + "/1"
    link = RedisLink(other)
    caller = Catalogue(config).caller("search")
    assert caller is not None
    await Ledger(link, config.mesh.name).run([Reserve(caller.account, "r", 700, 15)])
    await link.close()
    for budgets_url, reserved in ((other, 700), ("", 0)):
        assert await tenants.show(config, redis_url, "search", as_json=True, budgets_url=budgets_url) == 0
        assert json.loads(capsys.readouterr().out)["ledger"]["reserved"] == reserved
