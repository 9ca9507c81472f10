"""tests/kubernetes/overlay.py: the overlay of a trial."""

from __future__ import annotations

import json
from pathlib import Path

from engines.reference import serve
from kvmesh import config
from tests.kubernetes import overlay


def test_the_configuration_is_read_as_it_is_meant(tmp_path: Path) -> None:
    """The services read the text; the clients compute their expected tokens from the object."""
    path = tmp_path / "kvmesh.toml"
    path.write_text(overlay.config_text(), "utf-8")
    assert config.load(path) == overlay.config()


def test_the_engines_get_the_same_settings() -> None:
    """The words of the patch come behind those of the component, so they count."""
    made = json.loads(overlay.kustomization("laptop", "mine", "1.4", "registry.example/team/"))
    words = [each["value"] for each in json.loads(made["patches"][0]["patch"])]
    first = [
        "--grpc-port=1",
        "--http-port=2",
        "--metrics-port=3",
        "--kv-port=4",
        "--arithmetic",
        "transformer",
    ]
    engine = serve.config_of(serve.parser().parse_args([*first, *words]))
    wanted = overlay.config().engine
    assert (engine.arithmetic, engine.costs.step_s, engine.costs.prefill_token_s) == ("hashed", 0.04, 0.0001)
    assert (engine.salt, engine.max_sequence_tokens) == (wanted.salt, wanted.max_sequence_tokens)


def test_images_have_tag_and_registry() -> None:
    """Without a registry the names stay those of `make images`."""
    assert json.loads(overlay.kustomization("laptop", "mine", "1.4", "registry.example/team/"))["images"][
        0
    ] == {
        "name": "kvmesh",
        "newTag": "1.4",
        "newName": "registry.example/team/kvmesh",
    }
    assert json.loads(overlay.kustomization("laptop", "mine", "dev"))["images"][1] == {
        "name": "kvmesh-engine",
        "newTag": "dev",
    }
