"""Objects against the schemas of Kubernetes and of the vendored kinds. An unknown field or kind is a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate

from tools.manifests.documents import Manifest

VERSIONS: Final = ("1.30", "1.37")
"""Versions of Kubernetes: the oldest one that has all fields that the manifests use, and the newest one with schemas."""

FOLDER: Final = Path(__file__).parent / "schemas"


def faults(manifests: Sequence[Manifest], versions: Sequence[str] = VERSIONS) -> Iterator[str]:
    """Yield a sentence for each object that differs from its schema in one of `versions`."""
    for each in manifests:
        found = {fault for version in versions for fault in _faults(each, version)}
        yield from sorted(found)


def _faults(manifest: Manifest, version: str) -> Iterator[str]:
    api = str(manifest.body["apiVersion"])
    try:
        vendored = _vendored(api, manifest.kind)
        if vendored is not None:
            vendored.validate(manifest.body)
        else:
            kubernetes_validate.validate(dict(manifest.body), version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        where = ".".join(map(str, error.path)) or "the object"
        yield f"{where} of {manifest.title} is refused: {error.message}."
    except kubernetes_validate.SchemaNotFoundError:
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        yield f"{manifest.title} has an unknown kind, {api}: allowed are those of Kubernetes {version}, and {known}."


@lru_cache
def _vendored(api: str, kind: str) -> Any | None:
    """Return the validator of a kind whose schema is in this repository; None for every other kind."""
    path = FOLDER / f"{kind}.json"
    if not path.exists():
        return None
    schema = json.loads(path.read_text("utf-8"))
    if schema["properties"]["apiVersion"]["const"] != api:
        return None
    return jsonschema.Draft202012Validator(schema)
