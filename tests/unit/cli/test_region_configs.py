"""`kvmesh up --regions`: its names, the configuration of each region, and the ports of the control processes."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.bad_option import BadOption
from kvmesh.cli.processes import PortInUse, processes_of
from kvmesh.cli.region_configs import check_names, region_names, with_regions
from kvmesh.config import ConfigError, MeshConfig, build, describe, parse
from kvmesh.ports import free_ports
from kvmesh.redis_url import VARIABLE
from kvmesh.roles import CONTROL, option_of
from tests.unit.cli.test_commands import mistake

CONTROLS = {"eu": ["127.0.0.1:1001"], "us": ["127.0.0.1:1002"], "ap": ["127.0.0.1:1003"]}


def test_names_keep_their_order() -> None:
    """Blanks around a comma do not count."""
    assert region_names("us, eu") == ("us", "eu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eu", r'--regions = "eu" has 1 name: allowed are 2 to 10 names'),
        (",".join(f"r{n}" for n in range(11)), "has 11 names: allowed are 2 to 10 names"),
        ("eu,US", r'has the invalid name "US": allowed are up to 64 of a-z, 0-9 and -\.'),
        ("eu,", r'has the invalid name ""'),
        ("eu,../us", r'has the invalid name "\.\./us"'),
        ("eu,us,eu", r"names the region eu twice: once is allowed\."),
        ("eu,logs", r'has the name "logs", which is a folder of the data folder'),
    ],
)
def test_a_wrong_name_is_refused_with_the_allowed_ones(text: str, words: str) -> None:
    """Before anything is started."""
    with pytest.raises(BadOption, match=words):
        region_names(text)


@pytest.mark.parametrize("seed", range(20))
def test_every_region_has_the_same_tables_its_own_name_and_ports_that_do_not_meet(seed: int) -> None:
    """For any number of regions, frontends and control processes, also after a turn through the file."""
    rng = random.Random(seed)
    names = [f"r{n}" for n in range(rng.randrange(2, 11))]
    frontends, port = rng.randrange(1, 17), rng.choice((0, 7000))
    config = build(
        {"frontend": {"replicas": frontends, "port": port}, "control": {"replicas": rng.randrange(3)}}
    )
    control = {name: [f"127.0.0.1:{1000 + at}"] for at, name in enumerate(names)}
    made = with_regions(config, names, control)
    assert [each.region.name for each in made.values()] == list(made) == names
    assert all(each.regions == made[names[0]].regions for each in made.values())
    assert all(each.control.replicas >= 1 for each in made.values())
    assert all(parse(describe(each)) == each for each in made.values())
    used = [each.frontend.port + n for each in made.values() for n in range(frontends) if port]
    assert len(used) == len(set(used))
    assert all(each.frontend.port == port for each in made.values()) == (port == 0)


def test_shares_and_residency_of_the_configuration_are_kept() -> None:
    """Its tables name the same regions; the addresses are those of this machine."""
    config = build(
        {
            "region": {"name": "eu", "insecure": True},
            "regions": {
                "eu": {"control": ["10.0.0.1:1"], "share": 0.7},
                "us": {"control": ["10.1.0.1:1"], "share": 0.3},
            },
            "tenants": {"bank": {"regions": ["eu"]}},
        }
    )
    made = with_regions(config, ("us", "eu"), CONTROLS)
    assert {name: each.share for name, each in made["us"].regions.items()} == {"us": 0.3, "eu": 0.7}
    assert made["us"].regions["eu"].control == ("127.0.0.1:1001",)
    assert made["us"].tenants["bank"].regions == ("eu",)
    with pytest.raises(
        ConfigError, match=r"--regions = eu,ap differs from the tables .*: allowed are eu,us,"
    ):
        check_names(config, ("eu", "ap"))
    check_names(MeshConfig(), ("eu", "ap"))


def test_control_processes_listen_where_other_regions_dial_them(tmp_path: Path) -> None:
    """Addresses of this host go to the processes in turn; a further process takes a free port."""
    one, other = free_ports("127.0.0.1", 2)
    control = [f"127.0.0.1:{one}", "10.9.9.9:7000", f"127.0.0.1:{other}"]
    config = build(
        {
            "region": {"name": "eu", "insecure": True},
            "regions": {"eu": {"control": control}, "us": {"control": ["127.0.0.1:1"]}},
            "control": {"replicas": 3},
            "frontend": {"port": 0},
        }
    )
    processes = processes_of(config, tmp_path / "kvmesh.toml", tmp_path)
    listen = [option_of(each.command, "listen") for each in processes if each.role == CONTROL]
    assert listen[:2] == [f"127.0.0.1:{one}", f"127.0.0.1:{other}"]
    assert listen[2].startswith("127.0.0.1:") and listen[2] not in (*listen[:2], "127.0.0.1:0")


def test_a_taken_port_of_a_control_process_is_named(tmp_path: Path) -> None:
    """With the key to change."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = build(
            {
                "region": {"name": "eu"},
                "regions": {
                    "eu": {"control": [f"127.0.0.1:{port}"]},
                    "us": {"control": ["127.0.0.1:1"]},
                },
                "control": {"replicas": 1},
                "frontend": {"port": 0},
            }
        )
        with pytest.raises(
            PortInUse, match=rf"Port {port} .* control process .* change regions\.eu\.control"
        ):
            processes_of(config, tmp_path / "kvmesh.toml", tmp_path)


def test_an_existing_redis_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions share none; the sentence names the variable or the key, and shows no password."""
    config, data = tmp_path / "kvmesh.toml", ("--data-dir", str(tmp_path / "data"))
    config.write_text('[redis]\nurl = "redis://:secret@127.0.0.1:1/0"\n')
    shown = mistake("up", "--regions", "eu,us", "--config", str(config), *data, capfd=capfd)
    assert shown.startswith("--regions = eu,us with redis.url: allowed is no Redis") and "secret" not in shown
    monkeypatch.setenv(VARIABLE, "redis://127.0.0.1:1/0")
    config.write_text("")
    shown = mistake("up", "--regions", "eu,us", "--config", str(config), *data, capfd=capfd)
    assert shown.startswith(f"--regions = eu,us with {VARIABLE}: ")
    assert not (tmp_path / "data").exists()


def test_a_region_that_fails_ends_all_with_its_own_sentence(tmp_path: Path) -> None:
    """The status is 1, the region is named, and no folder stays locked."""
    config = tmp_path / "kvmesh.toml"
    config.write_text('[mesh]\nmodel_dir = "nowhere"\n[frontend]\nport = 0\n')
    words = ("up", "--regions", "eu,us", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "kvmesh.cli.main", *words],
        env={**environment, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "ended with status 2. Last lines of its log:\n  mesh.model_dir" in done.stdout
    assert done.stdout.startswith("Region ") and done.stdout.endswith(
        "The meshes of all regions are stopped.\n"
    )
    assert not (tmp_path / "data" / "mesh.json").exists()
