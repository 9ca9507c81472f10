"""HTTP ports of frontends: `kvmesh up` gives each one, keeps it, prints it, and writes it to mesh.json."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli import up as up_module
from kvmesh.cli.mesh_file import MESH_FILE, read_mesh
from kvmesh.cli.planned_process import Process
from kvmesh.cli.processes import PortInUse, http_scheme, processes_of
from kvmesh.cli.readiness import ReadyLine
from kvmesh.cli.region_configs import with_regions
from kvmesh.cli.screen import address_table
from kvmesh.config import ConfigError, MeshConfig, build
from kvmesh.roles import option_of
from tests.integration.harness import own_loopback

READY = {"ready": True, "role": "frontend", "id": "x", "address": "127.0.0.1:1", "metrics_address": ""}
CONTROLS = {"eu": ["127.0.0.1:1001"], "us": ["127.0.0.1:1002"]}


def frontends_of(config: MeshConfig, folder: Path) -> list[Process]:
    """Return the planned frontends; no other process has an HTTP port of this kind."""
    processes = processes_of(config, folder / "kvmesh.toml", folder)
    others = [each for each in processes if each.role not in ("frontend", "engine")]
    assert not any("--http-port" in each.command for each in others)
    return [each for each in processes if each.role == "frontend"]


def test_each_frontend_has_an_http_port(tmp_path: Path) -> None:
    """A free one, which its command keeps over restarts, or one of those that follow the configured one."""
    planned = frontends_of(build({"frontend": {"replicas": 3}}), tmp_path)
    words = [word for each in planned for word in each.command]
    free = [option_of(each.command, "http-port") for each in planned]
    assert all(1024 < int(port) < 32_768 for port in free) and len(set(free)) == 3
    assert not {f"127.0.0.1:{port}" for port in free} & set(words), "a port of gRPC"
    planned = frontends_of(build({"frontend": {"replicas": 2, "http_port": 18_080}}), tmp_path)
    assert [option_of(each.command, "http-port") for each in planned] == ["18080", "18081"]


@pytest.mark.parametrize(("key", "what"), [("port", "frontend"), ("http_port", "frontend's HTTP")])
def test_a_taken_port_is_named_with_its_key(tmp_path: Path, key: str, what: str) -> None:
    """Also that of a later frontend. Nothing is started."""
    host = own_loopback()
    with socket.create_server((host, 18_081)):
        config = build({"mesh": {"host": host}, "frontend": {"replicas": 2, key: 18_080}})
        with pytest.raises(PortInUse) as refused:
            processes_of(config, tmp_path / "kvmesh.toml", tmp_path)
    told = f"Port 18081 of {host} cannot be used for a {what} (Address already in use): "
    assert str(refused.value).startswith(told)
    assert str(refused.value).endswith(f"set frontend.{key} to another port or to 0.")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"replicas": 2, "http_port": 65_535},
            r"frontend\.http_port = 65535 leaves no port for frontend\.repl",
        ),
        (
            {"replicas": 4, "port": 8000, "http_port": 8003},
            r"http_port = 8003 takes a port of frontend\.port = 8000",
        ),
        ({"replicas": 4, "port": 8003, "http_port": 8000}, r"allowed is 0, or a distance of 4 and more\."),
    ],
)
def test_ports_that_meet_are_refused(given: dict[str, int], words: str) -> None:
    """Before a second frontend finds its port taken."""
    with pytest.raises(ConfigError, match=words):
        build({"frontend": given})


def test_regions_have_http_ports_of_their_own() -> None:
    """A hundred apart. Ports of gRPC in one region and of HTTP in another one may not meet."""
    made = with_regions(build({"frontend": {"http_port": 8080}}), ("eu", "us"), CONTROLS)
    assert [each.frontend.http_port for each in made.values()] == [8080, 8180]
    config = build({"frontend": {"replicas": 2, "port": 8000, "http_port": 8101}})
    with pytest.raises(
        ConfigError, match=r"region us the port 8101, which is frontend\.http_port of region eu"
    ):
        with_regions(config, ("eu", "us"), CONTROLS)


@pytest.mark.parametrize(
    ("http", "certificate", "url"),
    [
        ("127.0.0.1:8080", "", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "c.pem", "https://127.0.0.1:8080"),
        ("", "", ""),
    ],
)
async def test_up_shows_where_http_is(
    http: str, certificate: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the address of gRPC, and in mesh.json. A frontend of release 0.1.0 has none."""
    line = json.dumps({**READY, **({"http_address": http} if http else {})})
    code = f"import signal; print({line!r}, flush=True); signal.pause()"
    fake = Process("frontend-0", "frontend", (sys.executable, "-c", code), (), ReadyLine())
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [fake])
    config = build({"frontend": {"certificate": certificate, "key": certificate}})
    screen = io.StringIO()
    monkeypatch.setattr(up_module, "Dial", lambda *_: None)
    async with up_module.running_mesh(config, tmp_path, Console(file=screen)) as (_, mesh):
        assert read_mesh(tmp_path) == mesh
        assert [each.http_address for each in mesh.processes] == [http]
        scheme = http_scheme(config)
        assert mesh.http_urls(scheme) == ([url] if url else [])
        Console(file=screen, width=80).print(address_table(mesh.processes, scheme))
    shown = screen.getvalue()
    assert "127.0.0.1:1" in shown and (url or "frontend-0") in shown and ("http" in shown) == bool(http)


def test_a_file_of_an_older_release_is_read(tmp_path: Path) -> None:
    """It has no HTTP addresses."""
    member = {"name": "f", "role": "frontend", "pid": 1, "address": "h:1", "metrics_address": "", "log": ""}
    (tmp_path / MESH_FILE).write_text(json.dumps({"pid": os.getpid(), "config": "", "processes": [member]}))
    assert read_mesh(tmp_path).processes[0].http_address == ""
