"""A mesh in containers gives the same tokens as an engine alone, is locked down, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from docker.errors import APIError

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.containers import daemon, ownership
from tests.integration.containers.mesh import ContainerMesh, Options
from tests.integration.containers.network import private_network
from tests.integration.containers.ownership import Owner
from tests.integration.containers.plan import IMAGES, SERVICE_IMAGE
from tests.integration.containers.shared import SharedMesh
from tests.integration.generation import generate, token_request
from tests.integration.harness import ROOT, configure, running_engine, until
from tests.integration.oracle import Oracle

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "hashed", "kv_blocks": 512, "max_sequence_tokens": 4096},
    router={"replicas": 2},
    frontend={"replicas": 2},
)
STREAMS = 16

# Starts a Redis in a container and waits to be killed.
VICTIM = """
import asyncio, sys
from pathlib import Path
from tests.integration.containers.mesh import ContainerMesh
from tests.integration.live_mesh import configure

async def main():
    mesh = ContainerMesh(configure(), Path(sys.argv[1]))
    await mesh.start("redis")
    print(mesh.run, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, needs_images: Callable[..., None]
) -> Iterator[SharedMesh]:
    """Two parts of each role; the clocks of a router and a decode replica may be set."""
    needs_images(*IMAGES.values(), SERVICE_IMAGE)
    shared = SharedMesh(CONFIG, tmp_path_factory.mktemp("mesh"), Options(skewable=["router-0", "decode-0"]))
    yield shared
    asyncio.run(shared.close())


def requests(seed: int) -> list[tuple[list[int], pb.GenerateRequest]]:
    """Return prompts of 5 to 400 random tokens, a third with a shared prefix, greedy and sampled."""
    rng = random.Random(seed)
    prefix = [rng.randrange(5, 4096) for _ in range(128)]
    made = []
    for index in range(STREAMS):
        prompt = [rng.randrange(5, 4096) for _ in range(rng.randint(5, 400))]
        if index % 3 == 0:
            prompt = prefix + prompt
        temperature, sampled = rng.choice((0.0, 1.0)), rng.getrandbits(63)
        made.append(
            (prompt, token_request(prompt, max_output_tokens=96, seed=sampled, temperature=temperature))
        )
    return made


async def test_tokens_are_those_of_an_engine_alone_under_clock_skew(
    shared: SharedMesh, tmp_path: Path
) -> None:
    """16 streams over two frontends give the tokens of an engine alone, whatever the parts' clocks.

    A router's clock is an hour ahead, and a decode replica's an hour behind.
    """
    wanted = requests(seed := 20261121)
    end_token_id = json.loads((CONFIG.mesh.model_path / "config.json").read_text())["eos_token_id"]
    async with running_engine(CONFIG, tmp_path, "--no-prefix-reuse") as address:
        oracle = Oracle(address, end_token_id)
        expected = [await oracle.generate(*one) for one in wanted]
        await oracle.close()
    async with (
        shared.lease() as (mesh, faults),
        faults.skewed("router-0", 3600),
        faults.skewed("decode-0", -3600),
    ):
        answers = await asyncio.gather(
            *(
                generate(mesh.client(f"frontend-{index % 2}"), request)
                for index, (_, request) in enumerate(wanted)
            )
        )
        for index, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
            assert answer.error is None, f"seed {seed}, stream {index}: {answer.error}"
            assert answer.ids == tokens, f"seed {seed}, stream {index}"
        await mesh.idle(10)


async def test_every_part_is_locked_down(shared: SharedMesh) -> None:
    """Every part runs without root and capabilities, at its own address.

    It can write only to /tmp and shared memory, and has no volume.
    """
    look = (
        "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status; touch /x /opt/x /etc/x 2>&1 | grep -c Read-only"
    )
    async with shared.lease() as (mesh, _):
        assert len({part.ip for part in mesh.parts.values()}) == len(mesh.parts)
        for name, part in mesh.parts.items():
            done = await part.in_thread(lambda part=part: part.docker.exec_run(["sh", "-c", look]))  # type: ignore[misc]
            uid, *status, refused = done.output.decode().split("\n")[:4]
            assert uid not in ("0", ""), name
            assert [line.split()[1] for line in status] == ["0" * 16, "1"], (name, status)
            assert refused == "3", (name, refused)
            assert not [mount for mount in part.docker.attrs["Mounts"] if mount["Type"] == "volume"], name


async def test_vitals_describe_a_part(shared: SharedMesh) -> None:
    """Vitals of a running part give memory, descriptors and threads; of an ended one, its status and starts."""
    async with shared.lease() as (mesh, faults):
        began = mesh.parts["decode-1"].start_count
        before = await mesh.vitals("decode-1")
        assert before.is_running and 20 << 20 < before.rss_bytes < 1 << 30
        assert before.process_count >= 2 and before.thread_count > before.process_count
        assert before.fd_count > 5
        async with faults.down("decode-1"):
            ended = await mesh.vitals("decode-1")
            assert (ended.is_running, ended.exit_status, ended.rss_bytes) == (False, 137, 0)
        again = await mesh.vitals("decode-1")
        assert (again.is_running, again.start_count, again.restart_count) == (True, began + 1, 0)
        assert not again.oom_killed


async def test_a_part_gets_another_image_and_keeps_its_address(shared: SharedMesh) -> None:
    """A part gets another image and keeps its address, as in a rolling upgrade."""
    other = f"kvmesh-test:other-{os.getpid()}"  # two test runs at once may use one daemon
    with daemon.connected() as client:
        client.images.get(SERVICE_IMAGE).tag(other)
    try:
        async with shared.lease() as (mesh, faults):
            address = mesh.parts["router-1"].address
            for image in (other, SERVICE_IMAGE):
                assert await faults.terminate("router-1") == 0
                await mesh.replace("router-1", image)
                await faults.start("router-1")
                assert mesh.parts["router-1"].docker.attrs["Config"]["Image"] == image
                assert mesh.parts["router-1"].address == address
                await mesh.placeable()
    finally:
        with daemon.connected() as client:
            client.images.remove(other)


async def test_nothing_is_left_after_a_stop(needs_images: Callable[..., None], tmp_path: Path) -> None:
    """A stop leaves no container, network or volume, also with faults on; the logs are kept."""
    needs_images(*IMAGES.values(), SERVICE_IMAGE)
    mesh = ContainerMesh(configure(), tmp_path)
    try:
        await mesh.start("redis")
        await mesh.parts["redis"].in_thread(mesh.parts["redis"].docker.pause)
    finally:
        await mesh.stop()
    with daemon.connected() as client:
        assert ownership.left_of(client, mesh.run) == []
    assert b"Ready to accept connections" in (tmp_path / "redis.log").read_bytes()


async def test_a_killed_run_leaves_nothing(needs_images: Callable[..., None], tmp_path: Path) -> None:
    """SIGKILL of the test process leaves none of its containers and networks."""
    needs_images(*IMAGES.values(), SERVICE_IMAGE)
    victim = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", VICTIM, str(tmp_path)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert victim.stdout is not None
    with daemon.connected() as client:
        run = (await victim.stdout.readline()).decode().strip()
        try:
            assert len(ownership.left_of(client, run)) == 2
        finally:
            victim.kill()
            await victim.wait()
        await until(lambda: not ownership.left_of(client, run), 30, "everything is removed", every_s=0.1)


def test_only_containers_of_a_dead_process_are_swept(needs_images: Callable[..., None]) -> None:
    """The sweep leaves a run alone if its process lives or is not visible here."""
    needs_images()
    here = Owner.here()
    owners = {
        "alive": here,
        "unseen": replace(here, pid_namespace="1", started="1"),
        "dead": replace(here, started="1"),  # the same id, another process
        "rebooted": replace(here, boot_id="another", pid_namespace="1"),
    }
    names = {f"kvmesh-sweep-{kind}-{here.pid}": owner for kind, owner in owners.items()}
    with daemon.connected() as client:
        try:
            for name, owner in names.items():
                private_network(client, name, {ownership.RUN: name, ownership.OWNER: owner.text})
            swept = set(ownership.sweep(client)) & set(names)
            assert {name.split("-")[2] for name in swept} == {"dead", "rebooted"}
            left = [name for name in names if ownership.left_of(client, name)]
            assert [name.split("-")[2] for name in left] == ["alive", "unseen"]
        finally:
            for name in names:
                ownership.remove(client, name)


def test_a_network_goes_though_the_engine_still_counts_a_container_on_it(
    needs_images: Callable[..., None],
) -> None:
    """A network is removed although the engine still counts a removed container on it.

    A busy engine reports the container as gone and its network as in use.
    """
    needs_images(IMAGES["redis"])
    run = f"kvmesh-hanging-{Owner.here().pid}"
    with daemon.connected() as client:
        private_network(client, run, {ownership.RUN: run, ownership.OWNER: Owner.here().text})
        other = client.containers.run(IMAGES["redis"], network=run, detach=True)  # without a run label
        try:
            assert ownership.remove(client, run) == [run]
            assert ownership.left_of(client, run) == []
        finally:
            other.remove(force=True)
            ownership.remove(client, run)


def test_a_network_that_the_engine_never_removes_is_reported_and_left(
    needs_images: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine with a wrong count of endpoints fails no test; a container that stays is an error."""
    needs_images(IMAGES["redis"])
    run = f"kvmesh-miscounted-{Owner.here().pid}"
    labels = {ownership.RUN: run, ownership.OWNER: Owner.here().text}

    def refuse(_: object) -> None:
        raise APIError("has active endpoints")

    with daemon.connected() as client:
        private_network(client, run, labels)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(ownership, "_REMOVE_S_MAX", 0.0)
                patch.setattr(ownership, "_remove_network", refuse)
                assert ownership.remove(client, run) == [run]
                assert f"keeps {run}: has active endpoints" in capsys.readouterr().err
                patch.setattr(ownership, "_remove_container", refuse)
                client.containers.create(IMAGES["redis"], labels=labels)
                with pytest.raises(APIError):
                    ownership.remove(client, run)
        finally:
            ownership.remove(client, run)
        assert ownership.left_of(client, run) == []
