"""The versions of a frontend: one tokenizer for equal files, bounds of each, and snapshots that it cannot serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvmesh.config import MeshConfig, build
from kvmesh.models.folder import ModelFolderError
from kvmesh.models.tokenizer import Conversation
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.tenants.caller import ServiceClass
from services.frontend.surface import served_versions

CLASS = ServiceClass(name="c", runtime_max_s=60, default_deadline_s=60, max_output_tokens=77)


def copied(folder: Path, prefix: str = "") -> str:
    """Return a copy of the model's folder in `folder`, with `prefix` at the end of the rendered text."""
    shutil.copytree(MeshConfig().mesh.model_path, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + prefix, encoding="utf-8")
    return str(folder)


def test_equal_tokenizer_files_share_one_object_and_other_templates_do_not(tmp_path: Path) -> None:
    """A copied folder shares the table of token bytes; another chat template makes other ids of a prompt."""
    versions = {
        "v1": {"salt": "a"},
        "v2": {"salt": "b", "model_dir": copied(tmp_path / "same")},
        "v3": {"salt": "c", "model_dir": copied(tmp_path / "other", "Well: ")},
    }
    pools = {"next": {"version": "v2"}, "stable": {"version": "v1"}, "third": {"version": "v3"}}
    found = served_versions.load(build({"versions": versions, "pools": pools}))
    assert next(iter(found)) == found.first.name == "v1" and set(found) == {"v1", "v2", "v3"}
    assert found["v1"].tokenizer is found["v2"].tokenizer
    assert found.share_tokenizer("v1", "v2") and not found.share_tokenizer("v1", "v3")
    assert not found.share_tokenizer("v1", "gone") and not found.has_one_tokenizer
    chat = Conversation([{"role": "user", "content": "Hello"}])
    assert found["v1"].tokenizer.encode_chat(chat) != found["v3"].tokenizer.encode_chat(chat)
    assert found.get("gone") is found.first
    for name in found:
        bounds = found[name].bounds(CLASS)
        assert (bounds.model_version, bounds.max_output_tokens_max) == (name, 77)
        assert found[name].bounds(CLASS) is bounds


@pytest.mark.parametrize(
    ("arithmetic", "engines", "context"),
    [
        ("transformer", 1024, 1024),
        ("transformer", 8192, 4096),
        ("hashed", 1024, 1024),
        ("hashed", 8192, 8192),
    ],
)
def test_the_context_is_that_of_engines_and_model(arithmetic: str, engines: int, context: int) -> None:
    """The reference model has 4,096 tokens. An engine that does not compute it is not bound by that."""
    config = build({"engine": {"arithmetic": arithmetic, "max_sequence_tokens": engines}})
    assert served_versions.load(config).first.max_sequence_tokens == context


def test_a_mesh_without_pools_serves_its_salt_alone() -> None:
    """The name of the only version is `engine.salt`, as in release 0.1.0."""
    config = MeshConfig()
    found = served_versions.load(config)
    assert list(found) == [config.engine.salt] and found.has_one_tokenizer


def test_a_snapshot_with_unknown_versions_is_refused_by_their_names() -> None:
    """Each pool with a track and an unknown version is named. An idle pool is not: it gets no request."""
    config = MeshConfig()
    found, salt = served_versions.load(config), config.engine.salt
    stable = PoolTrack("stable", salt, Track.STABLE, 100)
    assert found.refusal(Content((stable,))) == ""
    assert found.refusal(Content((stable, PoolTrack("scratch", "v9")))) == ""
    wrong = Content((stable, PoolTrack("a", "v8", Track.CANARY), PoolTrack("b", "v9", Track.BASELINE)))
    assert found.refusal(wrong) == (
        f'pools["a"].model_version is "v8", pools["b"].model_version is "v9"; this frontend serves {salt}'
    )


def test_a_missing_model_folder_stops_the_start(tmp_path: Path) -> None:
    """The error names the file of the version that cannot be loaded."""
    tables = {
        "versions": {"v1": {"salt": "a"}, "v2": {"salt": "b", "model_dir": str(tmp_path / "gone")}},
        "pools": {"stable": {"version": "v1"}, "next": {"version": "v2"}},
    }
    with pytest.raises(ModelFolderError, match="gone"):
        served_versions.load(build(tables))
