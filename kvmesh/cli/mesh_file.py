"""`mesh.json` in the data folder: the processes of the running mesh, for the other commands."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.redis_url import without_password

MESH_FILE: Final = "mesh.json"
LOCK_FILE: Final = "lock"


class NoMesh(RuntimeError):
    """No mesh runs here; the text is one sentence for the operator."""


class MeshBusy(RuntimeError):
    """Another mesh uses the data folder; the text is one sentence for the operator."""


class DataDirUnusable(RuntimeError):
    """Nothing can be written to the data folder; the text is one sentence for the operator."""


class ListedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the running mesh. A Redis that the mesh did not start has `pid` 0 and a URL as its address.

    INVARIANT: the URL has no password. Commands read the file, editors keep it, and people copy it into reports.
    """

    name: str
    role: str
    pid: int
    address: str
    metrics_address: str
    log: str
    http_address: str = ""
    """"host:port" of a frontend's HTTP. Empty: other roles, and frontends of older releases."""


class MeshFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The running mesh. `pid` is the supervisor's."""

    pid: int
    config: str
    processes: tuple[ListedProcess, ...]
    regions: tuple[str, ...] = ()
    """Regions of `kvmesh up --regions`. Each has a mesh.json in the folder of its name; `processes` is then empty."""

    def addresses_of(self, role: str) -> list[str]:
        """Return the addresses of all processes of `role`."""
        return [member.address for member in self.processes if member.role == role]

    def http_urls(self, scheme: str) -> list[str]:
        """Return the URL of the HTTP port of each process that has one. `scheme`: http or https."""
        return [f"{scheme}://{member.http_address}" for member in self.processes if member.http_address]

    def address_of(self, role: str) -> str:
        """Return the address of the first process of `role`."""
        return next(member.address for member in self.processes if member.role == role)


def write_mesh(data_dir: Path, mesh: MeshFile) -> None:
    """Write mesh.json atomically, readable by its owner only."""
    draft = data_dir / f"{MESH_FILE}.draft"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(mesh), indent=2) + b"\n")
    draft.rename(data_dir / MESH_FILE)


def read_mesh(data_dir: Path) -> MeshFile:
    """Return the mesh that runs with `data_dir`. Raises NoMesh.

    A password in the file of an older release is left out.
    """
    path = data_dir / MESH_FILE
    with suppress(OSError, msgspec.DecodeError):
        mesh = msgspec.json.decode(path.read_bytes(), type=MeshFile)
        if is_alive(mesh.pid):
            shown = (
                msgspec.structs.replace(one, address=without_password(one.address)) for one in mesh.processes
            )
            return msgspec.structs.replace(mesh, processes=tuple(shown))
    raise NoMesh(f"No mesh runs with {data_dir}: start one with `kvmesh up`, or name its --data-dir.")


def read_meshes(data_dir: Path) -> dict[str, MeshFile]:
    """Return the meshes that run with `data_dir` by region, in the order of --regions; without regions by "".

    A region that has ended is left out. Raises NoMesh.
    """
    mesh = read_mesh(data_dir)
    found = {} if mesh.regions else {"": mesh}
    for region in mesh.regions:
        with suppress(NoMesh):
            found[region] = read_mesh(data_dir / region)
    if not found:
        raise NoMesh(f"No region runs with {data_dir}: its meshes start or stop.")
    return found


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock `data_dir` for one mesh inside the block; remove mesh.json afterwards. Raises MeshBusy and DataDirUnusable.

    The kernel holds the lock and releases it when a mesh is killed.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / LOCK_FILE).open("w")
    except OSError as error:
        raise DataDirUnusable(
            f"Cannot use {data_dir} for logs and mesh.json ({error.strerror}): name another --data-dir, "
            "or set mesh.data_dir."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshBusy(
                f"Another mesh runs with {data_dir}: stop that mesh, or use another --data-dir."
            ) from None
        try:
            yield
        finally:
            (data_dir / MESH_FILE).unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Return whether a process `pid` exists, also if another user owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
