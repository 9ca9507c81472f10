"""Packages that are wrong in each way, in the Redis of a real mesh: the replica serves within three boots."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from controlplane.store.documents import Document, value_of
from controlplane.warmup.packages import FORMAT, Package, ShapeRow, encode, package_name
from controlplane.warmup.references import ReferenceKey
from kvmesh.control.v1 import warm_up_pb2
from tests.integration.harness import until
from tests.integration.warmup.warm_mesh import (
    BLOCK,
    SERVING,
    WarmMesh,
    config,
    warm_mesh,
)

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.asyncio(loop_scope="module"),
]

DAY_S = 86_400.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WarmMesh]:
    """A mesh that makes one package by itself at most."""
    settings = config(warm_up={"package_every_s": 86_400.0})
    async with warm_mesh(tmp_path_factory.mktemp("packages"), settings) as made:
        yield made


async def _key(mesh: WarmMesh) -> ReferenceKey:
    """Return version and engine build of the mesh."""
    link = mesh.redis()
    lease = json.loads(await link.execute("GET", "kvmesh:proc:prefill-0"))
    await link.close()
    return ReferenceKey(lease["model_version"], lease.get("digests", {}).get("engine", ""))


async def _package(mesh: WarmMesh, revision: int, **changes: object) -> Package:
    """Return a good package for prefill replicas with some fields replaced."""
    key = await _key(mesh)
    fields: dict[str, object] = {
        "name": package_name("prefill", key),
        "revision": revision,
        "model_version": key.model_version,
        "role": "prefill",
        "engine_digest": key.engine_digest,
        "made_s": time.time(),
        "made_from": "default",
        "shapes": (ShapeRow(32), ShapeRow(64)),
    }
    return Package(**{**fields, **changes})  # type: ignore[arg-type]  # fields by name


USABLE: dict[str, dict[str, object]] = {
    "stale": {"made_s": -2 * DAY_S},
    "empty": {"shapes": ()},
    "hostile ids": {"prefixes": (tuple(range(300_000, 300_000 + 4 * BLOCK)),)},
}
"""Packages that are read. Times are seconds from now."""

UNREADABLE: dict[str, dict[str, object]] = {
    "corrupt": {},
    "negative ids": {"prefixes": ((-1,) * BLOCK,)},
    "hostile shapes": {"shapes": (ShapeRow(-5), ShapeRow(2**40), ShapeRow(0), ShapeRow(8, -1))},
    "large ids": {"prefixes": ((2**31,) * BLOCK,)},
    "another form": {"form": FORMAT + 1},
    "hostile time": {"made_s": 1e300},
}
"""No two in a row have the same problem."""


@pytest.mark.parametrize("case", USABLE)
async def test_a_bad_package_keeps_no_replica_from_service(mesh: WarmMesh, case: str) -> None:
    """The replica serves at its first boot, with the package unless that is stale."""
    changes = dict(USABLE[case])
    if case == "stale":
        changes["made_s"] = time.time() - 2 * DAY_S
    package = await _package(mesh, 1000 * (1 + list(USABLE).index(case)), **changes)
    await mesh.write_package(package)

    async def is_read() -> bool:
        found = (await mesh.profiles()).profiles
        return package.revision in [each.revision for each in found if each.name == package.name]

    await until(is_read, 15, f"the control process has read the {case} package", every_s=0.1)
    assert (await mesh.command("profile", "list"))[0] == 0
    life = await _restarted(mesh)
    assert (life.package == package.name) == (case != "stale"), life


async def test_unreadable_packages_are_listed_and_keep_no_replica_from_service(mesh: WarmMesh) -> None:
    """One after the other. The list shows each problem, and the process goes on with an earlier package, if it has one."""
    told = ""
    for number, (case, changes) in enumerate(UNREADABLE.items()):
        package = await _package(mesh, 10_000 + number, **changes)
        if case == "corrupt":
            value = value_of(Document(package.revision, encode(package)[:-40] + b"}}"))
            await mesh.write_stored(package.name, value)
        else:
            await mesh.write_package(package)

        async def is_told(name: str = package.name, before: str = told) -> bool:
            return (await mesh.profiles()).problems.get(name, before) != before

        await until(is_told, 15, f"the control process has found the {case} package", every_s=0.1)
        told = (await mesh.profiles()).problems[package.name]
    status, _, errors = await mesh.command("profile", "list")
    assert status == 1 and f'The stored package "{package.name}" is not used: {told}' in errors, errors
    await _restarted(mesh)


async def _restarted(mesh: WarmMesh) -> warm_up_pb2.Life:
    """Restart an engine once, and return the life of its replica in service."""
    boot_id = (await mesh.life("prefill-0")).engine_boot_id
    await mesh.restart_engine("prefill-0")
    life = await mesh.until_state("prefill-0", SERVING, not_boot=boot_id)
    assert not mesh.parts["prefill-0-engine"].has_fallen
    await mesh.until_life(
        "prefill-0", lambda life: not life.failed_boot_count, "its failed boots are forgotten"
    )
    return life
