"""One rule chooses the Redis of every command."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis as AsyncRedis
from rich.console import Console

from kvmesh.bad_option import BadOption
from kvmesh.cli import up as up_module
from kvmesh.cli.leased_names import leased_names
from kvmesh.cli.main import main
from kvmesh.cli.mesh_file import ListedProcess, MeshFile, read_mesh, write_mesh
from kvmesh.cli.redis_choice import EMBEDDED, NamedRedis, named_redis, redis_url_of, with_redis
from kvmesh.cli.status import status
from kvmesh.cli.supervisor import Stopped
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_sections import Redis, Trust
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_url import VARIABLE, without_password

SECRET = "redis://mesh:s3cret@redis.example:6379/0"
SENTINELS = "redis+sentinel://mesh:s3cret@a,b:7001/service/3?sentinel_password=other"
SHOWN = "redis://***@redis.example:6379/0"
FILE = NamedRedis("redis://file.example", "redis.url")
NONE = NamedRedis("", EMBEDDED)
LOCAL = NamedRedis("redis://localhost", VARIABLE)


def running(address: str) -> MeshFile:
    redis = ListedProcess(name="redis", role="redis", pid=0, address=address, metrics_address="", log="")
    return MeshFile(pid=os.getpid(), config="", processes=(redis,))


def test_the_environment_precedes_the_file() -> None:
    """If neither names a Redis, an embedded one is used."""
    file = MeshConfig(redis=Redis(url=FILE.url))
    assert named_redis(file, {VARIABLE: SECRET}) == NamedRedis(SECRET, VARIABLE)
    assert named_redis(file, {}) == FILE
    assert named_redis(file, {VARIABLE: ""}) == FILE
    assert named_redis(MeshConfig(), {}) == NONE
    assert with_redis(file, NamedRedis(SECRET, VARIABLE)).redis.url == SECRET


@pytest.mark.parametrize(
    ("mesh", "named", "is_file_given", "url"),
    [
        (None, FILE, False, FILE.url),
        (running("127.0.0.1:7001"), NONE, False, "redis://127.0.0.1:7001/0"),
        (running(FILE.url), FILE, False, FILE.url),
        (running(SHOWN), NamedRedis(SECRET, VARIABLE), False, SECRET),
        (running(without_password(SENTINELS)), NamedRedis(SENTINELS, VARIABLE), False, SENTINELS),
        (running("127.0.0.1:7001"), FILE, True, FILE.url),
        (running("127.0.0.1:6379"), LOCAL, False, LOCAL.url),
    ],
    ids=["no mesh", "embedded", "the same", "password", "sentinels", "--config", "other spelling"],
)
def test_a_command_uses_the_redis_of_the_running_mesh(
    mesh: MeshFile | None, named: NamedRedis, is_file_given: bool, url: str
) -> None:
    """The named URL has the password. A file given on the command line precedes the running mesh."""
    assert redis_url_of(mesh, named, is_file_given=is_file_given) == url


@pytest.mark.parametrize(
    ("mesh", "named", "sentence"),
    [
        (None, NONE, f"set ${VARIABLE} or redis.url"),
        (
            running("127.0.0.1:7001"),
            NamedRedis(SECRET, VARIABLE),
            f"{VARIABLE} = {SHOWN} is not the Redis of the mesh",
        ),
        (running("127.0.0.1:7001"), FILE, "redis.url = redis://file.example is not the Redis of the mesh"),
        (running(SHOWN), NONE, f"is not known: set ${VARIABLE}"),
        (
            running("127.0.0.1:6379"),
            NamedRedis("redis://localhost/1", VARIABLE),
            "is not the Redis of the mesh",
        ),
    ],
    ids=["none", "environment", "file", "password", "other number"],
)
def test_a_command_never_writes_into_another_redis(
    mesh: MeshFile | None, named: NamedRedis, sentence: str
) -> None:
    """One sentence names both, without a password."""
    with pytest.raises(BadOption) as refused:
        redis_url_of(mesh, named, is_file_given=False)
    assert sentence in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_password_in_the_file_of_an_older_release_is_left_out(tmp_path: Path) -> None:
    """A mesh of the older release may still run."""
    write_mesh(tmp_path, running(SECRET))
    assert read_mesh(tmp_path) == running(SHOWN)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[MeshConfig]:
    """`kvmesh up` starts nothing; the list gets the configuration of the start."""
    started: list[MeshConfig] = []

    def none(config: MeshConfig, *_: object) -> list[object]:
        started.append(config)
        raise Stopped

    monkeypatch.setattr(up_module, "processes_of", none)
    return started


def test_up_uses_the_redis_of_the_environment(
    redis_url: str, no_processes: list[MeshConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same Redis that `kvmesh tenants` writes to."""
    monkeypatch.setenv(VARIABLE, redis_url)
    with pytest.raises(SystemExit):
        main(["up", "--data-dir", str(tmp_path)])
    assert [config.redis.url for config in no_processes] == [redis_url]


@pytest.mark.parametrize("redis_server", redis_binaries()[:1], indirect=True, ids=["redis"])
async def test_names_of_a_running_mesh_are_leased(redis_url: str) -> None:
    """Names of another mesh are free, and so is a lease that expires during the check."""
    client = AsyncRedis.from_url(redis_url)
    await client.set("mesh:proc:router-0", b"{}")
    await client.set("mesh:proc:router-1", b"{}", px=100)
    await client.set("other:proc:decode-0", b"{}")
    names = ["router-0", "router-1", "decode-0"]
    assert await leased_names(redis_url, "mesh", names, within_s=0.3) == ["router-0"]
    await client.delete("mesh:proc:router-0")
    assert await leased_names(redis_url, "mesh", names) == []
    await client.aclose()


@pytest.mark.parametrize("redis_server", redis_binaries()[:1], indirect=True, ids=["redis"])
async def test_up_refuses_the_names_of_a_running_mesh(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would supersede its processes silently."""
    client = AsyncRedis.from_url(redis_url)
    await client.set("kvmesh:proc:router-0", b"{}")
    await client.aclose()
    monkeypatch.setattr(up_module, "leased_names", partial(leased_names, within_s=0.1))
    config = MeshConfig(redis=Redis(url=redis_url))
    with pytest.raises(ConfigError, match=r"REDIS = .* \(router-0\): stop that mesh"):
        await up_module.up(config, tmp_path, Console(file=io.StringIO()), redis_source="REDIS")


async def test_up_refuses_networks_without_its_own_host(tmp_path: Path) -> None:
    """All processes would refuse each other, although the mesh would seem to be up."""
    config = MeshConfig(trust=Trust(networks=("10.0.0.0/8",)))
    with pytest.raises(ConfigError, match=r"mesh\.host: 127\.0\.0\.1:0 is outside trust\.networks"):
        await up_module.up(config, tmp_path, Console(file=io.StringIO()))


def test_a_wrong_url_is_reported_for_its_variable() -> None:
    """The key of the file has no value and is not named."""
    with pytest.raises(ConfigError, match=f'{VARIABLE} = "rubbish" is out of range'):
        with_redis(MeshConfig(), NamedRedis("rubbish", VARIABLE))


def test_up_names_the_variable_of_an_unresponsive_redis(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file has no such URL. The password is not in the sentence."""
    monkeypatch.setenv(VARIABLE, f"redis://:s3cret@127.0.0.1:{free_port}/0")
    with pytest.raises(SystemExit) as ended:
        main(["up", "--data-dir", str(tmp_path)])
    output = capfd.readouterr().err
    assert ended.value.code == 2
    assert output.startswith(f'{VARIABLE} = "redis://***@127.0.0.1:{free_port}/0" does not answer')


def test_config_shows_the_redis_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The configuration in force is the one that `kvmesh up` would use."""
    monkeypatch.setenv(VARIABLE, SECRET)
    with pytest.raises(SystemExit):
        main(["config"])
    assert f'url = "{SHOWN}"' in capfd.readouterr().out


@pytest.fixture
def secret_url(redis_url: str) -> Iterator[str]:
    """URL of a Redis that asks for a password."""
    client = SyncRedis.from_url(redis_url)
    client.config_set("requirepass", "s3cret")
    try:
        yield redis_url.replace("://", "://:s3cret@")
    finally:
        client.auth("s3cret")
        client.config_set("requirepass", "")
        client.close()


@pytest.mark.parametrize("redis_server", redis_binaries()[:1], indirect=True, ids=["redis"])
async def test_mesh_json_has_no_password_and_status_works_without_it(
    secret_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis with a password counts as answering, also if the command does not have the password."""
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [])
    screen = Console(file=io.StringIO(), width=200)
    config = MeshConfig(redis=Redis(url=secret_url))
    async with up_module.running_mesh(config, tmp_path, screen) as (_, mesh):
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or b"s3cret" not in file.read_bytes(), file
        for named in ("", secret_url):
            assert await status(mesh, screen, as_json=False, redis_url=named) == 0
        wrong = secret_url.replace("s3cret", "wrong")
        assert await status(mesh, screen, as_json=False, redis_url=wrong) == 1
        assert isinstance(screen.file, io.StringIO)
        assert "refuses the one of this URL" in screen.file.getvalue()
