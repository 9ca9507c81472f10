"""Prepares the host's Python for the archive, and starts the run: with the standard library alone.

A virtual environment beside the archive sees the packages of the archive first, then those of the host's Python, among
them PyTorch. Triton's stub finds the same: it takes the packages of the first python3 on PATH.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import venv
from pathlib import Path

EXIT_USAGE = 2


def main(home: Path, options: list[str]) -> None:
    """Make `home`/environment if it is missing, and become `python -m tools.gpu run` there."""
    wanted = (home / "python-version").read_text(encoding="utf-8").strip()
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own != wanted:
        refuse(
            f"this archive is for Python {wanted}, and {sys.executable} is {own}: set PYTHON to a Python {wanted}, or pack "
            f"with --python {own}"
        )
    library = sysconfig.get_config_var("LIBDIR") or ""
    if not any(Path(library).glob(f"libpython{wanted}.so*")):
        refuse(
            f"{library} has no libpython{wanted}.so, which Triton's stub loads: install the shared library of Python"
        )
    environment = home / "environment"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, symlinks=True, with_pip=False)
    packages = next((environment / "lib").glob("python*/site-packages"))
    lines = [home / "repo", home / "packages", *map(Path, host_packages())]
    (packages / "kvmesh-gpu.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    variables["PATH"] = os.pathsep.join((str(environment / "bin"), variables.get("PATH", os.defpath)))
    os.execve(python, [str(python), "-m", "tools.gpu", "run", *options], variables)


def host_packages() -> list[str]:
    """Return the folders with packages of this Python: those of its path, *.pth files included, and the user's own."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    folders = [folder for folder in sys.path if folder not in own and not folder.endswith("lib-dynload")]
    folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def refuse(reason: str) -> None:
    """End with one sentence."""
    sys.stderr.write(f"cannot run: {reason}\n")
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
