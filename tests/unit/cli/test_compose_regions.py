"""deploy/compose/regions.yaml: two whole regions that agree with the table of roles and with their configurations."""

from __future__ import annotations

from typing import Any, Final

import pytest
import yaml

from kvmesh.config import ROOT, load
from kvmesh.roles import CONFIG_PATH, CONTROL, ROLES, SERVERS, SERVICES, option_of
from tests.unit.cli.test_roles import role_of

FOLDER: Final = ROOT / "deploy" / "compose"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "regions.yaml").read_text("utf-8"))["services"]
REGIONS: Final = ("eu", "us")


def parts_of(region: str) -> dict[str, Any]:
    """Return the parts of a region by their name inside it."""
    return {
        name.removeprefix(f"{region}-"): part
        for name, part in COMPOSE.items()
        if name.startswith(f"{region}-")
    }


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_has_each_role_that_a_mesh_needs(region: str) -> None:
    """A service role, a control process, Redis and the engines; nothing belongs to no region."""
    assert {role_of(name) for name in parts_of(region)} == {*SERVICES, CONTROL, "redis", "engine"}
    assert len(COMPOSE) == sum(len(parts_of(each)) for each in REGIONS)


@pytest.mark.parametrize("region", REGIONS)
def test_a_part_uses_the_redis_the_engine_and_the_configuration_of_its_region(region: str) -> None:
    """A part of one region that waits for the other one, or reads its Redis, would tie both together."""
    url = f"redis://{region}-redis:{ROLES['redis'].port}/0"
    for name, part in parts_of(region).items():
        role, words = ROLES[role_of(name)], part["command"]
        assert part["stop_grace_period"] == f"{role.stop_s}s", name
        assert all(each.startswith(f"{region}-") for each in part.get("depends_on", ())), name
        if role.name not in SERVERS:
            continue
        assert words[0] == role.name
        assert (option_of(words, "config"), option_of(words, "redis")) == (CONFIG_PATH, url)
        assert part["environment"]["KVMESH_REDIS_URL"] == url
        assert part["volumes"] == [f"./regions-{region}.toml:{CONFIG_PATH}:ro"]
        if "engine" in role.needs:
            assert option_of(words, "engine") == f"{region}-{name}-engine:{ROLES['engine'].port}"


def test_frontends_alone_are_published_on_this_host_at_ports_that_differ() -> None:
    """Both regions run at once."""
    published = {name: part["ports"] for name, part in COMPOSE.items() if "ports" in part}
    assert list(published) == [f"{region}-frontend" for region in REGIONS]
    found = [port for ports in published.values() for port in ports]
    assert len(set(found)) == 2 * len(REGIONS)
    for grpc, http in published.values():
        assert grpc.startswith("127.0.0.1:") and grpc.endswith(":7000")
        assert http.startswith("127.0.0.1:") and http.endswith(":8080")


@pytest.mark.parametrize("region", REGIONS)
def test_a_configuration_names_its_region_and_the_control_processes_of_all(region: str) -> None:
    """The tables are equal in all files, and their addresses are those of the containers."""
    config, other = load(FOLDER / f"regions-{region}.toml"), load(FOLDER / "regions-eu.toml")
    assert config.region.name == region
    assert config.regions == other.regions and set(config.regions) == set(REGIONS)
    for name, table in config.regions.items():
        assert table.control == (f"{name}-control-0:{ROLES[CONTROL].port}",)
        assert f"{name}-control-0" in COMPOSE
    salts = {option_of(part["command"], "salt") for name, part in COMPOSE.items() if name.endswith("-engine")}
    assert salts == {config.engine.salt}
