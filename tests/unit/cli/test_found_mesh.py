"""The mesh of a command in a data folder with regions: the first one, said on stderr."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmesh.cli.found_mesh import first_mesh, found_mesh, found_regions
from kvmesh.cli.mesh_file import ListedProcess, MeshFile, NoMesh, read_meshes, write_mesh
from kvmesh.config import build, describe

TABLES = {name: {"control": [f"127.0.0.1:{at}"]} for at, name in enumerate(("us", "eu"), 1)}


def listed(folder: Path, region: str, port: int) -> None:
    """Write the mesh.json of one region, with its Redis at `port`."""
    folder.mkdir(parents=True)
    config = build({"region": {"name": region}, "regions": TABLES})
    (folder / "kvmesh.toml").write_text(describe(config))
    redis = ListedProcess(
        name="redis", role="redis", pid=1, address=f"127.0.0.1:{port}", metrics_address="", log=""
    )
    write_mesh(folder, MeshFile(pid=os.getpid(), config=str(folder / "kvmesh.toml"), processes=(redis,)))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder in which "us" and "eu" run, in this order."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".kvmesh"
    for port, region in enumerate(("us", "eu"), 1):
        listed(folder / region, region, port)
    write_mesh(folder, MeshFile(pid=os.getpid(), config="", processes=(), regions=("us", "eu")))
    return folder


def test_a_command_works_on_the_first_region_and_says_so(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the option for the other one; with that option nothing is said."""
    mesh = found_mesh(None, None, {})
    assert (mesh.config.region.name, mesh.redis_url) == ("us", "redis://127.0.0.1:1/0")
    assert capsys.readouterr().err == "Region us. Others: --data-dir .kvmesh/eu.\n"
    mesh = found_mesh(None, data / "eu", {})
    assert (mesh.config.region.name, mesh.redis_url) == ("eu", "redis://127.0.0.1:2/0")
    assert capsys.readouterr().err == ""


def test_all_regions_that_run_are_read_in_their_order(data: Path) -> None:
    """One that has ended is left out; without any there is no mesh."""
    assert list(read_meshes(data)) == ["us", "eu"] and list(read_meshes(data / "eu")) == [""]
    (data / "us" / "mesh.json").unlink()
    assert list(read_meshes(data)) == ["eu"] and first_mesh(data).address_of("redis") == "127.0.0.1:2"
    (data / "eu" / "mesh.json").unlink()
    with pytest.raises(NoMesh, match="No region runs with"):
        read_meshes(data)


def test_a_command_about_regions_needs_no_redis(data: Path, tmp_path: Path) -> None:
    """Tables come from the given file, else from the mesh that runs here, else there are none."""
    assert found_regions(None, None).config.region.name == "us"
    given = tmp_path / "far.toml"
    given.write_text('[region]\nname = "ap"\n[regions.ap]\ncontrol = ["127.0.0.1:9"]\n')
    assert list(found_regions(given, None).config.regions) == ["ap"]
    given.write_text("")
    assert list(found_regions(given, None).config.regions) == ["us", "eu"]
    assert found_regions(given, tmp_path / "empty").config.regions == {}
