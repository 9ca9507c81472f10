"""Objects against the schemas of Kubernetes and of the vendored kinds. Unknown fields and kinds are faults."""

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


def known_versions() -> list[str]:
    """Return the versions of Kubernetes that have schemas, such as "1.30"."""
    return [".".join(each.split(".")[:2]) for each in kubernetes_validate.utils.all_versions()]


def refused(manifests: Sequence[Manifest], versions: Sequence[str] = VERSIONS) -> Iterator[str]:
    """Yield a sentence for each object that differs from its schema in one of `versions`."""
    for each in manifests:
        found = {_refusal(each, version) for version in versions}
        yield from sorted(found - {""})


def unknown(
    manifests: Sequence[Manifest], versions: Sequence[str] = VERSIONS, accepted: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a sentence for each object without a schema. `accepted`: kinds that may have none."""
    kinds = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
    for each in manifests:
        api = str(each.body["apiVersion"])
        if each.kind in accepted or all(_has_schema(api, each.kind, version) for version in versions):
            continue
        yield (
            f"{each.title} has an unknown kind, {api}: allowed are those of Kubernetes {' and '.join(versions)}, {kinds}, "
            "and those of --accept."
        )


def _refusal(manifest: Manifest, version: str) -> str:
    api = str(manifest.body["apiVersion"])
    try:
        vendored = _vendored(api, manifest.kind)
        if vendored is not None:
            vendored.validate(manifest.body)
        else:
            kubernetes_validate.validate(dict(manifest.body), version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        where = ".".join(map(str, error.path)) or "the object"
        return f"{where} of {manifest.title} is refused: {' '.join(error.message.split())[:300]}."
    except kubernetes_validate.SchemaNotFoundError:
        return ""
    return ""


@lru_cache
def _has_schema(api: str, kind: str, version: str) -> bool:
    if _vendored(api, kind) is not None:
        return True
    try:
        kubernetes_validate.validate({"apiVersion": api, "kind": kind}, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return False
    except kubernetes_validate.ValidationError:
        return True
    return True


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
