"""Options that a service refuses on its command line, before the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmesh import service_options
from kvmesh.config import ConfigError
from kvmesh.replica import options as replica_options
from services.decode import main as decode
from services.frontend import main as frontend
from services.prefill import main as prefill
from services.router import main as router

REDIS = ("--redis", "redis://127.0.0.1:6379/0")
REPLICA = ("--id", "replica-0", "--engine", "127.0.0.1:9001")
MAINS: dict[str, tuple[Callable[[list[str]], int | None], tuple[str, ...]]] = {
    "frontend": (frontend.main, ()),
    "router": (router.main, ()),
    "prefill": (prefill.main, REPLICA),
    "decode": (decode.main, REPLICA),
}


def refused(role: str, *arguments: str) -> None:
    """Call `role`'s main, which must end with status 2 before any start."""
    main, needed = MAINS[role]
    try:
        status = main([*needed, *arguments])
    except SystemExit as exited:
        status = exited.code if isinstance(exited.code, int) else None
    assert status == 2


@pytest.mark.parametrize("role", MAINS)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--metrics-port", "99999"), "--metrics-port = 99999 is out of range: allowed are 0 to 65535."),
        (("--metrics-port", "-1"), "--metrics-port = -1 is out of range: allowed are 0 to 65535."),
        (("--advertise", "foo:0"), '--advertise = "foo:0" is not HOST:PORT with a port of 1 to 65535'),
        (("--advertise", ""), '--advertise = "" is not HOST:PORT'),
        (("--id", "bad id"), '--id = "bad id" is not a valid process name: allowed are up to 128 letters'),
        (("--id", ""), '--id = "" is not a valid process name'),
    ],
)
def test_an_impossible_option_is_refused_in_one_sentence(
    role: str, arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An accepted value would start a process that no other process can find."""
    refused(role, *REDIS, *arguments)
    output = capsys.readouterr().err
    assert sentence in output and output.count("\n") == 1


@pytest.mark.parametrize("role", MAINS)
def test_without_redis_the_variable_is_named(
    role: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user can read an argument with a password, so the message must not ask for it alone."""
    monkeypatch.delenv("KVMESH_REDIS_URL", raising=False)
    refused(role)
    output = capsys.readouterr().err
    assert "$KVMESH_REDIS_URL" in output and output.count("\n") == 1
    with pytest.raises(SystemExit):
        MAINS[role][0](["--help"])
    assert "[--redis" in capsys.readouterr().out


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("engine", ["foo", "foo:0", ":9001", "foo:99999", ""])
def test_an_engine_needs_an_address(role: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes at once, not after a wait for the engine."""
    refused(role, *REDIS, "--engine", engine)
    output = capsys.readouterr().err
    assert f'--engine = "{engine}"' in output and "HOST:PORT" in output and output.count("\n") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_help_gives_an_example_of_its_own_role(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of a decode replica is not prefill-0."""
    with pytest.raises(SystemExit):
        MAINS[role][0](["--help"])
    assert f'"{role}-0"' in capsys.readouterr().out


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_an_unknown_pool_is_refused_with_the_allowed_ones(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mesh with pools has no pool "default" unless the file names one."""
    config = tmp_path / "kvmesh.toml"
    config.write_text("[pools.stable]\n[pools.next]\n")
    refused(role, *REDIS, "--config", str(config))
    assert '--pool = "default" is not a pool: allowed are next, stable.' in capsys.readouterr().err
    refused(role, *REDIS, "--config", str(config), "--pool", "nxt")
    assert '--pool = "nxt" is not a pool: did you mean next?' in capsys.readouterr().err


def test_the_pool_decides_version_and_lease(tmp_path: Path) -> None:
    """A router has the version of its pool. A frontend belongs to no pool and starts with the first one's version."""
    config = tmp_path / "kvmesh.toml"
    config.write_text("[versions.v1]\n[versions.v2]\n[pools.a]\nversion = 'v1'\n[pools.b]\nversion = 'v2'\n")
    given = (*REDIS, "--config", str(config))
    router = service_options.parse("router", (*given, "--pool", "b"), {})
    assert (router.pool, router.pool_settings.version.name) == ("b", "v2")
    replica = replica_options.parse("decode", (*given, *REPLICA, "--pool", "b"))
    assert replica.pool_settings.version.name == "v2"
    frontend_options = service_options.parse("frontend", given, {})
    assert (frontend_options.pool, frontend_options.pool_settings.version.name) == ("", "v1")
    assert service_options.parse("router", REDIS, {}).pool_settings.version.name == "kvmesh-1"
    with pytest.raises(SystemExit):
        service_options.parse("frontend", (*given, "--pool", "b"), {})


def test_the_metrics_of_an_engine_have_an_address(tmp_path: Path) -> None:
    """The option, else the configured port on the engine's host, else none."""
    config = tmp_path / "kvmesh.toml"
    config.write_text("[engine]\nmetrics_port = 8002\n")
    engine = ("--engine", "[fd00::1]:8001")
    given = (*REDIS, "--id", "decode-0", *engine)
    assert replica_options.parse("decode", given).engine_metrics == ""
    configured = (*given, "--config", str(config))
    assert replica_options.parse("decode", configured).engine_metrics == "[fd00::1]:8002"
    told = (*configured, "--engine-metrics", "gpu-0:9002")
    assert replica_options.parse("decode", told).engine_metrics == "gpu-0:9002"
    with pytest.raises(ConfigError, match="--engine-metrics"):
        replica_options.parse("decode", (*given, "--engine-metrics", "gpu-0"))
