"""Kubernetes objects in a file, and the pods among them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

WORKLOADS: Final = ("Deployment", "StatefulSet", "DaemonSet", "Job")
"""Kinds with a pod template."""

Body = Mapping[str, Any]


class Unreadable(Exception):
    """The file has no Kubernetes objects. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object."""

    body: Body

    @property
    def kind(self) -> str:
        return str(self.body["kind"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"].get("namespace", ""))

    @property
    def title(self) -> str:
        """Kind and name, for messages."""
        return f'{self.kind} "{self.name}"'

    @property
    def spec(self) -> Body:
        found = self.body.get("spec")
        return found if isinstance(found, Mapping) else {}

    @property
    def labels(self) -> Mapping[str, str]:
        return self.body["metadata"].get("labels") or {}


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod template of a workload."""

    workload: Manifest
    spec: Body
    labels: Mapping[str, str]

    @property
    def main(self) -> Sequence[Body]:
        """The containers that run side by side, without sidecars."""
        return self.spec.get("containers") or ()

    @property
    def sidecars(self) -> Sequence[Body]:
        """Init containers that go on beside the main ones, and end after them."""
        return [
            each for each in self.spec.get("initContainers") or () if each.get("restartPolicy") == "Always"
        ]

    @property
    def running(self) -> Sequence[Body]:
        """All containers that share the pod's address while it serves."""
        return [*self.main, *self.sidecars]

    @property
    def containers(self) -> Sequence[Body]:
        """All containers, those that only prepare the pod included."""
        return [*(self.spec.get("initContainers") or ()), *self.main]


def read(text: str, file: str) -> list[Manifest]:
    """Return the objects in `text`. Raises Unreadable."""
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise Unreadable(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
    for number, document in enumerate(found, 1):
        meta = document.get("metadata") if isinstance(document, dict) else None
        if not isinstance(meta, dict) or not all(document.get(key) for key in ("apiVersion", "kind")):
            raise Unreadable(
                f"{file}: document {number} has no apiVersion, kind and metadata: allowed are Kubernetes objects."
            )
        if not isinstance(meta.get("name"), str):
            raise Unreadable(f"{file}: document {number}, a {document['kind']}, has no metadata.name.")
    if not found:
        raise Unreadable(f"{file} has no Kubernetes objects.")
    return [Manifest(document) for document in found]


def pods(manifests: Sequence[Manifest]) -> Iterator[Pod]:
    """Yield the pod template of each workload."""
    for each in manifests:
        template = each.spec.get("template") if each.kind in WORKLOADS else None
        if isinstance(template, Mapping):
            labels = (template.get("metadata") or {}).get("labels") or {}
            yield Pod(each, template.get("spec") or {}, labels)


def named(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the objects of `kind` by name."""
    return {each.name: each for each in manifests if each.kind == kind}


def selects(selector: Body | None, labels: Mapping[str, str]) -> bool:
    """True if a label selector, matchLabels or matchExpressions, selects `labels`. An empty one selects everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for each in selector.get("matchExpressions") or ():
        key, operator, values = each["key"], each["operator"], each.get("values") or ()
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[operator]
        if not holds:
            return False
    return True
