"""Files in a container: the volume that is mounted at a path, and the text that a ConfigMap puts there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from tools.manifests.documents import Body, Manifest, Pod, named


def absolute(container: Body, path: str) -> str:
    """Return `path` of a container, from its working directory on."""
    return str(PurePosixPath(str(container.get("workingDir", "/"))) / path)


def volume_at(pod: Pod, container: Body, path: str) -> tuple[Body, str]:
    """Return the volume at `path`, and the name of the file in it. An empty volume: nothing is mounted there."""
    where = PurePosixPath(absolute(container, path))
    volumes = {str(each["name"]): each for each in pod.spec.get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        at = PurePosixPath(str(mount["mountPath"]))
        volume: Body = volumes.get(str(mount["name"]), {})
        if "subPath" in mount and at == where:
            return volume, str(mount["subPath"])
        if at == where.parent:
            return volume, str(PurePosixPath(str(mount.get("subPath", ""))) / where.name)
    return {}, ""


def key_of(source: Body, file: str) -> str:
    """Return the key of a ConfigMap or Secret that is the file `file` of its volume. Empty: there is none."""
    items = source.get("items")
    if not items:
        return file
    return next((str(each["key"]) for each in items if each["path"] == file), "")


def text_at(manifests: Sequence[Manifest], pod: Pod, container: Body, path: str) -> str | None:
    """Return the text of the file at `path`, from the ConfigMap that is mounted there. None: it is in none."""
    volume, file = volume_at(pod, container, path)
    source: Body = volume.get("configMap") or {}
    config = named(manifests, "ConfigMap").get(str(source.get("name", "")))
    found: Any = (config.body.get("data") or {}).get(key_of(source, file)) if config else None
    return None if found is None else str(found)
