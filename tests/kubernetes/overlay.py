"""The overlay of a trial: overlays/laptop with two frontends and routers, and engines of the hashed arithmetic. Pure."""

from __future__ import annotations

import json
from typing import Final

from kvmesh.config import MeshConfig
from kvmesh.config_sections import Engine

IMAGES: Final = ("kvmesh", "kvmesh-engine", "kvmesh-redis")
ENGINE: Final = Engine(arithmetic="hashed", step_s=0.04, prefill_token_s=0.0001)
"""Engines that make 25 tokens a second for each stream."""


def config() -> MeshConfig:
    """Return the configuration of the mesh."""
    return MeshConfig(engine=ENGINE)


def config_text() -> str:
    """Return kvmesh.toml."""
    made = config()
    return "\n".join(
        (
            "[mesh]",
            f"name = {json.dumps(made.mesh.name)}",
            "[engine]",
            f"arithmetic = {json.dumps(made.engine.arithmetic)}",
            f"salt = {json.dumps(made.engine.salt)}",
            f"step_s = {made.engine.step_s}",
            f"prefill_token_s = {made.engine.prefill_token_s}",
            "",
        )
    )


def kustomization(laptop: str, namespace: str, tag: str, registry: str = "") -> str:
    """Return kustomization.yaml, as JSON. `laptop`: path of the overlay from the folder of the file."""
    images = [
        {"name": name, "newTag": tag} | ({"newName": f"{registry.rstrip('/')}/{name}"} if registry else {})
        for name in IMAGES
    ]
    return json.dumps(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "resources": [laptop],
            "configMapGenerator": [
                {"name": "kvmesh-config", "behavior": "replace", "files": ["kvmesh.toml"]}
            ],
            "images": images,
            "replicas": [{"name": "frontend", "count": 2}, {"name": "router", "count": 2}],
            "patches": [
                {
                    "target": {"kind": "StatefulSet", "name": "prefill|decode"},
                    "patch": json.dumps(_engine_patch()),
                }
            ],
        },
        indent=1,
    )


def _engine_patch() -> list[dict[str, str]]:
    """Return a JSON patch of the engine's arguments: of an option that is given twice the last value counts."""
    words = (
        *("--arithmetic", ENGINE.arithmetic),
        *("--step-s", f"{ENGINE.step_s}"),
        *("--prefill-token-s", f"{ENGINE.prefill_token_s}"),
        *("--salt", ENGINE.salt),
        *("--model-version", ENGINE.salt),
        *("--max-sequence-tokens", f"{ENGINE.max_sequence_tokens}"),
    )
    return [
        {"op": "add", "path": "/spec/template/spec/initContainers/0/args/-", "value": word} for word in words
    ]
