"""The digest of a tokenizer follows its file."""

from __future__ import annotations

from pathlib import Path

from kvmesh.config import MeshConfig
from kvmesh.tokenizer_digest import TOKENIZER_FILE, tokenizer_digest


def test_the_digest_changes_with_the_file_and_is_unknown_without_it(tmp_path: Path) -> None:
    """A folder without the file, as in an image without the model, has an unknown digest."""
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tmp_path / "none") == ""
    (tmp_path / TOKENIZER_FILE).write_bytes(b"{}")
    first = tokenizer_digest(tmp_path)
    assert len(first) == 16
    (tmp_path / TOKENIZER_FILE).write_bytes(b"{ }")
    assert tokenizer_digest(tmp_path) not in ("", first)
    assert tokenizer_digest(MeshConfig().mesh.model_path) != ""
