"""Objects that a pod reads: its account, Secrets and their keys, ConfigMaps, claims. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from tools.manifests.documents import Body, Manifest, Pod, named, pods

CERTIFICATE_KEYS: Final = ("tls.crt", "tls.key", "ca.crt")
"""Keys of a Secret that cert-manager writes."""

DEFAULT_ACCOUNT: Final = "default"
"""Account that each namespace has."""

Keys = Mapping[str, Collection[str] | None]
"""Name of an object -> its keys; None: they are not known."""


def faults(manifests: Sequence[Manifest], present: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for each object or key that a pod needs and that is missing.

    `present`: objects that the cluster has already, such as "Secret/kvmesh-redis".
    """
    keys = keys_of(manifests, present)
    for pod in pods(manifests):
        account = pod.spec.get("serviceAccountName", DEFAULT_ACCOUNT)
        if account != DEFAULT_ACCOUNT and account not in keys["ServiceAccount"]:
            yield f'serviceAccountName = "{account}" of {pod.workload.title} names no ServiceAccount of these manifests.'
        for kind, ref, wanted in _needs(pod):
            name = str(ref.get("name", ref.get("secretName", ref.get("claimName"))))
            if ref.get("optional"):
                continue
            if name not in keys[kind]:
                yield f'{pod.workload.title} needs the {kind} "{name}", which is missing.'
                continue
            there = keys[kind][name]
            for key in wanted:
                if there is not None and key not in there:
                    yield f'{pod.workload.title} needs the key "{key}" of the {kind} "{name}", which is missing.'


def keys_of(
    manifests: Sequence[Manifest], present: Collection[str] = ()
) -> dict[str, dict[str, set[str] | None]]:
    """Return the keys of each object by kind and name. Secrets that cert-manager will write are there, too."""
    found: dict[str, dict[str, set[str] | None]] = {}
    for kind in ("Secret", "ConfigMap", "PersistentVolumeClaim", "ServiceAccount"):
        found[kind] = {
            name: {
                str(key)
                for field in ("data", "stringData", "binaryData")
                for key in each.body.get(field) or ()
            }
            for name, each in named(manifests, kind).items()
        }
    for each in named(manifests, "Certificate").values():
        found["Secret"][str(each.spec.get("secretName"))] = set(CERTIFICATE_KEYS)
    for text in present:
        kind, _, name = text.partition("/")
        found.setdefault(kind, {})[name] = None
    return found


def _needs(pod: Pod) -> Iterator[tuple[str, Body, Sequence[str]]]:
    """Yield kind, reference and keys of each object that a pod reads."""
    for ref in pod.spec.get("imagePullSecrets") or ():
        yield "Secret", ref, ()
    for volume in pod.spec.get("volumes") or ():
        for field, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
            if field in volume:
                yield kind, volume[field], _items(volume[field])
            for source in (volume.get("projected") or {}).get("sources") or ():
                if field in source:
                    yield kind, source[field], _items(source[field])
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"], ()
    for container in pod.containers:
        for source in container.get("envFrom") or ():
            for field, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                if field in source:
                    yield kind, source[field], ()
        for variable in container.get("env") or ():
            for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                ref = (variable.get("valueFrom") or {}).get(field)
                if ref is not None:
                    yield kind, ref, (str(ref["key"]),)


def _items(source: Body) -> list[str]:
    return [str(each["key"]) for each in source.get("items") or ()]
