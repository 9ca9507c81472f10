"""The rendered overlays, parsed once."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils

from tools.manifests import documents, rendered
from tools.manifests.documents import Manifest

_read = lru_cache(utils.schema_contents)


@pytest.fixture(autouse=True)
def schemas_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validator reads a megabyte of definitions for each object."""
    monkeypatch.setattr(utils, "schema_contents", _read)


@lru_cache
def _bodies(overlay: str) -> list[Any]:
    text = rendered.path_of(overlay).read_text("utf-8")
    return list(yaml.safe_load_all(text))


def overlay(name: str) -> list[Manifest]:
    """Return the objects of a rendered overlay; the caller may change them."""
    return [Manifest(body) for body in deepcopy(_bodies(name))]


def one(manifests: list[Manifest], kind: str, name: str) -> Any:
    """Return the body of one object. A name may lack the digest that kustomize appends."""
    return next(
        each.body
        for each in manifests
        if each.kind == kind and each.name.startswith(name) and each.body["kind"] == kind
    )


def pod_of(manifests: list[Manifest], name: str) -> Any:
    """Return the pod template's spec of the workload `name`, to be changed."""
    found = next(each for each in manifests if each.kind in documents.WORKLOADS and each.name == name)
    return found.body["spec"]["template"]["spec"]
