"""Properties of the images that operators rely on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import ContainerError
from docker.models.containers import Container

from tests.integration.containers.mesh import ContainerMesh, container_mesh
from tests.integration.generation import Answer, generate, token_request
from tests.integration.images import builds
from tests.integration.live_mesh import configure, until
from tests.patience import quiet_s

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(1200)]

SIZE_MB_MAX = {builds.SERVICE: 300, builds.ENGINE: 420, builds.REDIS: 170, builds.FAULTS: 170}
DEPLOYED = (builds.SERVICE, builds.ENGINE, builds.REDIS)
OURS = (builds.SERVICE, builds.ENGINE)
NOWHERE = "redis://127.0.0.1:1/0"
NO_OP_S_MAX = 10.0
HEALTHY_S_MAX = 60.0
LOOK_EVERY_S = 0.2
"""Interval between two polls of the engine."""

OUTPUT_TOKENS = 120
STEP_S = 0.03
"""120 tokens take 4 s: enough time to stop the service in the middle."""


@contextmanager
def running(client: docker.DockerClient, image: str, *command: str, **options: Any) -> Iterator[Container]:
    """Start a locked-down container with a health check each second; remove it afterwards."""
    # An empty test inherits the image's own; so does a zero.
    health = {"test": [], "interval": 1_000_000_000, "retries": 2, "start_period": 1_000_000}
    container = client.containers.run(
        image, list(command), detach=True, healthcheck=health, **builds.LOCKED_DOWN, **options
    )
    try:
        yield container
    finally:
        container.remove(force=True)


def health_of(container: Container) -> str:
    """Return Docker's view of the container: starting, healthy or unhealthy."""
    container.reload()
    return str(container.attrs["State"]["Health"]["Status"])


def test_a_second_build_does_nothing(client: docker.DockerClient) -> None:
    """Tests and developers build often; only a change may cost time."""
    builds.build()
    ids = [client.images.get(name).id for name in builds.ALL]
    began_s = quiet_s()
    assert builds.build() == ""
    assert quiet_s() - began_s < NO_OP_S_MAX
    assert [client.images.get(name).id for name in builds.ALL] == ids


@pytest.mark.parametrize("image", builds.ALL)
def test_images_are_small_and_labelled(client: docker.DockerClient, image: str) -> None:
    """A jump in size means an unintended dependency."""
    found = client.images.get(image)
    assert found.attrs["Size"] / 1e6 < SIZE_MB_MAX[image]
    labels = found.labels
    assert labels["org.opencontainers.image.title"] == image.removesuffix(":dev")
    assert {"kvmesh.sources", "org.opencontainers.image.version", "org.opencontainers.image.revision"} <= set(
        labels
    )


@pytest.mark.parametrize("image", DEPLOYED)
def test_no_container_runs_as_root(client: docker.DockerClient, image: str) -> None:
    """The image's own user is an account without a home, and cannot write into the image."""
    assert client.images.get(image).attrs["Config"]["User"] == "10001:10001"
    assert run_shell(client, image, "id -u; id -g").split() == ["10001", "10001"]
    writable = "for at in / /app /opt /etc /usr /usr/lib; do test -w $at && echo $at; done; true"
    done = client.containers.run(image, ["-c", writable], entrypoint="sh", remove=True, cap_drop=["ALL"])
    assert bytes(done).decode() == ""


@pytest.mark.parametrize("image", DEPLOYED)
def test_no_build_or_download_tool_is_left(client: docker.DockerClient, image: str) -> None:
    """Tools that help an intruder: compilers, installers, and programs that download."""
    tools = "pip pip3 gcc cc ld strip make git curl wget"
    assert run_shell(client, image, f"for tool in {tools}; do command -v $tool; done; true") == ""
    found = "find / -xdev -path /proc -prune -o -type d \\( -name tests -o -name ensurepip -o -name pip \\) -print 2>&1"
    assert [
        line for line in run_shell(client, image, f"{found}; true").splitlines() if "Permission" not in line
    ] == []


@pytest.mark.parametrize("image", OURS)
def test_everything_is_compiled(client: docker.DockerClient, image: str) -> None:
    """A read-only container cannot keep bytecode: each start would compile again."""
    code = """
import importlib.util, services.frontend.main, engines.reference.serve, kvmesh.cli.main, sys
print([name for name, module in sys.modules.items()
       if (at := getattr(module, "__cached__", None)) and not __import__("os").path.exists(at)])
"""
    assert run_shell(client, image, f"python -c '{code}'").strip() == "[]"


@pytest.mark.parametrize("image", OURS)
def test_the_command_line_is_there(client: docker.DockerClient, image: str) -> None:
    """`docker run kvmesh kvmesh ...` works for commands with options, and reports mistakes in one sentence."""
    assert "Usage: kvmesh" in builds.run(client, image, "kvmesh", "--help")
    assert "--deadline" in builds.run(client, image, "kvmesh", "generate", "--help")
    assert "[router]" in builds.run(client, image, "kvmesh", "config")
    for command, status, sentence in (
        (("kvmesh", "status"), 2, "No mesh runs with"),
        (("kvmesh", "health", "127.0.0.1:1"), 1, "127.0.0.1:1 does not answer"),
        (("frontent",), 2, '"frontent" is no role'),
    ):
        with pytest.raises(ContainerError) as refused:
            builds.run(client, image, *command)
        said = bytes(refused.value.stderr or b"").decode()
        assert (refused.value.exit_status, said.count("\n")) == (status, 1), said
        assert sentence in said


def test_the_health_check_finds_the_address_of_a_service(client: docker.DockerClient) -> None:
    """The check reads the container's own command line, so the address is given in one place."""
    command = ("router", "--redis", NOWHERE, "--listen=127.0.0.1:7123")
    with running(client, builds.SERVICE, *command) as container:
        wait_for(container, "healthy")


def test_a_process_that_does_not_serve_is_unhealthy(client: docker.DockerClient) -> None:
    """A check that cannot fail would be useless."""
    with running(client, builds.SERVICE, "python", "-c", "import time; time.sleep(600)") as container:
        wait_for(container, "unhealthy")


def test_a_stopped_engine_and_redis_end_with_status_0(client: docker.DockerClient) -> None:
    """Both are healthy by their images' own checks, then end within their grace period."""
    engine = running(client, builds.ENGINE, "engine", "--arithmetic", "hashed", shm_size="128m")
    with engine as one, running(client, builds.REDIS) as other:
        for container in (one, other):
            wait_for(container, "healthy")
        for container in (one, other):
            container.stop(timeout=15)
            assert container.wait(timeout=20)["StatusCode"] == 0


async def test_a_stop_lets_running_streams_end(images: None, tmp_path: Path) -> None:
    """SIGTERM to each service while it carries a stream: the stream ends normally, the status is 0."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": STEP_S, "kv_blocks": 512, "max_sequence_tokens": 2048},
        prefill={"replicas": 1},
        decode={"replicas": 1},
        router={"local_prefill_tokens_max": 0},
    )
    async with container_mesh(config, tmp_path) as mesh:
        whole = await generate(mesh.client(), _request())
        assert len(whole.ids) == OUTPUT_TOKENS
        for name in ("prefill-0", "decode-0", "router-0", "frontend-0"):
            answer, status = await _stopped_in_the_middle(mesh, name)
            assert answer.error is None, f"{name}: {answer.error}"
            assert answer.ids == whole.ids, name
            assert status == 0, f"{name}:\n{mesh.parts[name].tail()}"
            await mesh.close_channels()
            await mesh.start(name)
            await mesh.placeable()


async def _stopped_in_the_middle(mesh: ContainerMesh, name: str) -> tuple[Answer, int]:
    seen = Answer()

    def note(answer: Answer) -> None:
        nonlocal seen
        seen = answer

    stream = asyncio.create_task(generate(mesh.client(), _request(), on_tokens=note))
    await until(lambda: len(seen.ids) >= 10, 30, f"10 tokens before {name} is asked to end")
    assert not stream.done()
    status = await mesh.parts[name].end(signal.SIGTERM)
    return await stream, status


def _request() -> Any:
    return token_request(list(range(100, 200)), max_output_tokens=OUTPUT_TOKENS, seed=5, temperature=1.0)


def run_shell(client: docker.DockerClient, image: str, script: str) -> str:
    """Run a shell script in a locked-down container of `image`; return its output."""
    return builds.run(client, image, "-c", script, entrypoint="sh")


def wait_for(container: Container, health: str) -> None:
    """Wait until Docker reports the state; fail with the container's log."""
    began_s = quiet_s()
    while health_of(container) != health:
        log = container.logs(tail=20).decode(errors="replace")
        assert quiet_s() - began_s < HEALTHY_S_MAX, f"never {health}:\n{log}"
        time.sleep(LOOK_EVERY_S)
