"""Kubernetes objects in a file, and the pods among them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

WORKLOADS: Final = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
"""Kinds with a pod template in `spec.template`."""

_API: Final = re.compile(r"([a-z0-9.-]{1,253}/)?v[a-z0-9]{1,30}")
_KIND: Final = re.compile(r"[A-Za-z]{1,63}")

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
    """A pod, or the pod template of a workload."""

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
    """Return the objects in `text`, those of lists included. A null counts as absent. Raises Unreadable."""
    try:
        found = [_dense(document) for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Unreadable(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
    manifests = []
    for number, document in enumerate(found, 1):
        items = [document]
        if (
            isinstance(document, dict)
            and document.get("kind") == "List"
            and isinstance(document.get("items"), list)
        ):
            items = document["items"]
        for item in items:
            _refuse_foreign(item, f"{file}: document {number}")
            manifests.append(Manifest(item))
    if not manifests:
        raise Unreadable(f"{file} has no Kubernetes objects.")
    return manifests


def _refuse_foreign(document: Any, where: str) -> None:
    meta = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(meta, dict) or not all(document.get(key) for key in ("apiVersion", "kind")):
        raise Unreadable(f"{where} has no apiVersion, kind and metadata: allowed are Kubernetes objects.")
    for key, pattern in (("apiVersion", _API), ("kind", _KIND)):
        value = document[key]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise Unreadable(
                f'{where} has {key} = "{str(value)[:80]}": allowed is a name such as {_EXAMPLES[key]}.'
            )
    if not isinstance(meta.get("name"), str):
        raise Unreadable(f"{where}, a {document['kind']}, has no metadata.name.")


_EXAMPLES: Final = {"apiVersion": "apps/v1", "kind": "Deployment"}


def _dense(value: Any) -> Any:
    """Return `value` without nulls: for Kubernetes they are absent fields."""
    if isinstance(value, dict):
        return {key: _dense(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_dense(each) for each in value if each is not None]
    return value


def pods(manifests: Sequence[Manifest]) -> Iterator[Pod]:
    """Yield each pod and the pod template of each workload."""
    for each in manifests:
        template: Any = None
        if each.kind == "Pod":
            template = each.body
        elif each.kind in WORKLOADS:
            template = each.spec.get("template")
        elif each.kind == "CronJob":
            template = ((each.spec.get("jobTemplate") or {}).get("spec") or {}).get("template")
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
        key, operator, values = each["key"], str(each["operator"]), each.get("values") or ()
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }.get(operator, False)  # the API refuses others
        if not holds:
            return False
    return True
