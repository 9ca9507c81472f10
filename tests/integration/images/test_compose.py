"""deploy/compose/compose.yaml as an operator uses it: up, generate, scale, stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh import server
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.integration.generation import Answer, generate, token_request
from tests.integration.images.compose import Project
from tests.integration.live_mesh import until
from tests.patience import wait_for

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

HEALTHY_S_MAX = 180.0
OUTPUT_TOKENS = 60
REPLICAS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CONTROL = ("control-0", "control-1")
SERVICES = {"redis", "router", "frontend", *CONTROL, *REPLICAS, *(f"{name}-engine" for name in REPLICAS)}


async def test_up_generate_scale_stop(small_mesh: Project) -> None:
    """The steps of docs/deploying.md, in order; the stop comes while a stream runs."""
    await asyncio.to_thread(small_mesh.run, "up", "--detach")
    await _healthy(small_mesh, len(SERVICES))
    _assert_locked_down(small_mesh)
    whole = await _answer(small_mesh)
    assert whole.error is None and len(whole.ids) == OUTPUT_TOKENS
    await asyncio.to_thread(_check_commands, small_mesh)

    await asyncio.to_thread(small_mesh.run, "up", "--detach", "--scale", "router=2", "--scale", "frontend=2")
    await _healthy(small_mesh, len(SERVICES) + 2)
    scaled = await _answer(small_mesh)
    assert scaled.error is None, scaled.error
    assert scaled.ids == whole.ids

    seen = asyncio.Event()
    stream = asyncio.create_task(_answer(small_mesh, on_tokens=lambda _: seen.set()))
    await wait_for(seen.wait(), 30)
    assert not stream.done()
    await asyncio.to_thread(small_mesh.run, "stop")
    answer = await stream
    assert answer.error is None and answer.ids == whole.ids
    containers = small_mesh.containers()
    assert {
        name: one.attrs["State"]["ExitCode"] for name, one in containers if one.attrs["State"]["ExitCode"]
    } == {}
    assert not any(one.attrs["State"]["Running"] for _, one in containers)


def _check_commands(mesh: Project) -> None:
    """Without [trust] the leading control process takes changes from its own container, and from no other one."""
    containers = dict(mesh.containers())
    answers = {}
    for name in CONTROL:
        done = containers[name].exec_run(["kvmesh", "freeze", "--ttl", "60s", "--json"])
        answers[name] = done.exit_code, done.output.decode()
    (taken,) = [name for name, (status, _) in answers.items() if status == 0]
    (refused,) = [text for status, text in answers.values() if status]
    assert "PEER_REFUSED" in refused and "because the mesh has no [trust]" in refused, (taken, refused)
    # `kvmesh replicas` reads the leases, so it works in each container and needs no control process.
    listed = containers["frontend"].exec_run(["kvmesh", "replicas"])
    shown = listed.output.decode()
    assert listed.exit_code == 0 and all(name in shown for name in REPLICAS), shown


def _assert_locked_down(mesh: Project) -> None:
    """Read-only, without capabilities, with limits; only the frontend can be reached from outside."""
    found = mesh.containers()
    assert {name for name, _ in found} == SERVICES
    for name, container in found:
        host, networks = container.attrs["HostConfig"], container.attrs["NetworkSettings"]["Networks"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], name
        assert host["SecurityOpt"] == ["no-new-privileges:true"], name
        assert host["Memory"] and host["PidsLimit"], name
        assert host["RestartPolicy"]["Name"] == "unless-stopped", name
        assert "/tmp" in host["Tmpfs"], name
        is_edge = name == "frontend"
        assert bool(host["PortBindings"]) == is_edge, name
        assert {network.removeprefix(f"{mesh.name}_") for network in networks} == (
            {"mesh", "edge"} if is_edge else {"mesh"}
        ), name


async def _healthy(mesh: Project, count: int) -> None:
    """Wait until `count` containers are healthy."""

    async def all_healthy() -> bool:
        found = await asyncio.to_thread(mesh.containers)
        states = [one.attrs["State"].get("Health", {}).get("Status") for _, one in found]
        return len(states) == count and set(states) == {"healthy"}

    try:
        await until(all_healthy, HEALTHY_S_MAX, f"{count} containers healthy", every_s=0.3)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{mesh.log()}") from None


async def _answer(mesh: Project, **options: Any) -> Answer:
    """Send one request to the published port of the first frontend; prefill and decode are disaggregated."""
    address = (await asyncio.to_thread(mesh.run, "port", "--index", "1", "frontend", "7000")).strip()
    request = token_request(list(range(100, 260)), max_output_tokens=OUTPUT_TOKENS, seed=3, temperature=1.0)
    async with server.channel(address) as channel:
        return await generate(inference_pb2_grpc.InferenceServiceStub(channel), request, **options)
