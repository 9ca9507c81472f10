"""Rendered overlays, committed with the digest of their sources, so that a change of a source cannot be forgotten."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvmesh.config import ROOT

FOLDER: Final = ROOT / "deploy" / "kubernetes"
OVERLAYS: Final = ("laptop", "eight-gpus")
_HEAD: Final = """\
# Rendered by `make manifests` from deploy/kubernetes/overlays/{overlay}; never edited.
# sources: sha256:{sources}
# objects: sha256:{objects}
"""


def path_of(overlay: str) -> Path:
    """Return the path of a rendered overlay."""
    return FOLDER / "rendered" / f"{overlay}.yaml"


def digest(overlay: str, folder: Path = FOLDER) -> str:
    """Return the digest of the sources of an overlay: names and contents of base, components and overlay."""
    made = hashlib.sha256()
    for part in ("base", "pool", "pools", "components", f"overlays/{overlay}"):
        for path in sorted((folder / part).rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                made.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode() + data)
    return made.hexdigest()


def text_of(overlay: str, rendered: str) -> str:
    """Return the file of a rendered overlay."""
    objects = hashlib.sha256(rendered.encode()).hexdigest()
    return _HEAD.format(overlay=overlay, sources=digest(overlay), objects=objects) + rendered


def fault_of(overlay: str) -> str:
    """Return why the committed file is not that of the present sources, or an empty text."""
    path = path_of(overlay)
    if not path.exists():
        return f"{path.relative_to(ROOT)} is missing: run make manifests."
    return fault_in(overlay, path.read_text("utf-8"))


def fault_in(overlay: str, text: str) -> str:
    """Return why `text` is not the rendered file of the present sources, or an empty text."""
    path = path_of(overlay)
    head, body = text[: text.index("apiVersion")], text[text.index("apiVersion") :]
    if digest(overlay) not in head:
        return f"{path.relative_to(ROOT)} was rendered from other sources than deploy/kubernetes has: run make manifests."
    if text != text_of(overlay, body):
        return f"{path.relative_to(ROOT)} was edited by hand: change its sources, and run make manifests."
    return ""
