"""The table of roles, and the files of deploy/ that cannot read it: images and compose agree with it."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import yaml

from kvmesh.config import ROOT
from kvmesh.roles import CONFIG_PATH, ROLES, SERVERS, engine_command, option_of, service_command

IMAGES: Final = ROOT / "deploy" / "images"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text("utf-8"))[
    "services"
]
MODULES: Final = {"control": "controlplane", "xds": "controlplane.xds"}
"""Modules of the servers that are no services."""

ENTRYPOINT: Final = (IMAGES / "entrypoint").read_text("utf-8").replace("\\\n", " ")


def role_of(name: str) -> str:
    """Return the role of a service of the compose file."""
    return "engine" if name.endswith("-engine") else re.sub(r"-\d+$", "", name)


def started_before(name: str) -> set[str]:
    """Return the roles that compose has started when it starts `name`."""
    waited = COMPOSE[name].get("depends_on", {})
    return {role_of(one) for one in waited}.union(*map(started_before, waited))


def test_a_role_starts_after_those_that_it_needs() -> None:
    """The table is in start order."""
    names = list(ROLES)
    assert set(names) == {*SERVERS, "redis", "engine"}
    for role in ROLES.values():
        assert all(names.index(needed) < names.index(role.name) for needed in role.needs), role


@pytest.mark.parametrize("role", SERVERS)
def test_the_entrypoint_starts_servers_on_the_ports_of_the_table(role: str) -> None:
    """Module and ports."""
    ports = ROLES[role].ports
    module = MODULES.get(role, f"services.{role}" if role == "frontend" else "services.$role")
    assert ROLES[role].module == module.replace("$role", role)
    line = next(line for line in ENTRYPOINT.splitlines() if f"-m {module} " in line.replace('"', "")).split()
    assert option_of(line, "listen") == f"0.0.0.0:{ports['grpc']}"
    for kind in ("http", "metrics"):
        assert option_of(line, f"{kind}-port") == str(ports.get(kind, ""))
    assert re.search(rf"[ |]{role} [|)]|[ |]{role}\)", ENTRYPOINT)


def test_the_entrypoint_starts_an_engine_on_the_ports_of_the_table() -> None:
    """Each kind has its option."""
    line = next(line for line in ENTRYPOINT.splitlines() if ROLES["engine"].module in line).split()
    assert {kind: int(option_of(line, f"{kind}-port")) for kind in ROLES["engine"].ports} == dict(
        ROLES["engine"].ports
    )


def test_the_images_expose_the_ports_of_the_table() -> None:
    """One line of EXPOSE per image."""
    exposed = re.findall(r"^EXPOSE (.*)$", (IMAGES / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    expected = [sorted(ROLES[role].ports.values()) for role in ("frontend", "engine", "redis")]
    assert [sorted(map(int, ports.split())) for ports in exposed] == expected


def test_compose_has_each_role() -> None:
    """No role is missing, and none is unknown."""
    assert {role_of(name) for name in COMPOSE} == set(ROLES)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_starts_a_part_as_the_table_says(name: str) -> None:
    """Role, addresses, dependencies, and the longest time of a stop."""
    part, role = COMPOSE[name], ROLES[role_of(name)]
    words = part["command"]
    if role.module:
        assert words[0] == role.name
    if role.name in SERVERS:
        assert option_of(words, "config") == CONFIG_PATH
        assert option_of(words, "redis") == f"redis://redis:{ROLES['redis'].port}/0"
    if "engine" in role.needs:
        assert option_of(words, "engine") == f"{name}-engine:{ROLES['engine'].port}"
    assert part["stop_grace_period"] == f"{role.stop_s}s"
    assert started_before(name) >= set(role.needs)
    published = [port.rsplit(":", 1)[1] for port in part.get("ports", ())]
    assert published == ([str(role.ports[kind]) for kind in ("grpc", "http")] if name == "frontend" else [])


def test_commands_name_the_module_and_every_port() -> None:
    """The last value of an option counts, as argparse reads it."""
    words = service_command(
        "router", "r-1", config="k.toml", listen="h:1", more=("--listen=h:2", "--redis", "u")
    )
    assert words[1:3] == ["-m", "services.router"]
    assert [option_of(words, name) for name in ("id", "listen", "redis", "none")] == ["r-1", "h:2", "u", ""]
    words = engine_command("reference", "h", {"grpc": 1, "kv": 2}, more=("--salt", "s"))
    assert [option_of(words, name) for name in ("grpc-port", "kv-port", "salt", "host")] == [
        "1",
        "2",
        "s",
        "h",
    ]


def test_the_gpu_engines_of_compose_take_the_places_of_its_engines() -> None:
    """Every engine of compose.yaml is replaced, on the same ports, with a GPU of its own."""
    overlay = yaml.safe_load((ROOT / "deploy/compose/gpu.yaml").read_text("utf-8"))["services"]
    assert overlay.keys() == {name for name in COMPOSE if role_of(name) == "engine"}
    ports = ROLES["engine"].ports
    gpus = []
    for part in overlay.values():
        words = part["command"]
        assert words[0] == "tritonserver"
        for kind in ("grpc", "http", "metrics"):
            assert option_of(words, f"{kind}-port") == str(ports[kind])
        assert f":{ports['http']}/" in part["healthcheck"]["test"][-1]
        (device,) = part["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert len(set(gpus)) == len(overlay)
