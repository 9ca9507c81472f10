"""The check of a model's folder tells people and machines the same, and warns of what a user may miss."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvmesh.cli import models
from kvmesh.config import ROOT

FOLDERS = ROOT / "tests" / "unit" / "models" / "folders"


def _checked(folder: Path, *, as_json: bool = False) -> tuple[int, str]:
    out = StringIO()
    status = models.check(folder, 4096, 1 << 20, Console(file=out, width=200), as_json=as_json)
    return status, out.getvalue()


def _facts(folder: Path) -> dict[str, Any]:
    status, text = _checked(folder, as_json=True)
    assert status == 0, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_people_see_the_conversation_as_the_template_writes_it() -> None:
    status, text = _checked(FOLDERS / "llama-2")
    assert status == 0
    assert "<s>[INST] Check: 12 tokens" in text
    assert "1 <s>" in text and "2 </s>" in text, text
    assert "Warning" not in text


def test_machines_get_numbers_and_lists() -> None:
    facts = _facts(FOLDERS / "qwen")
    assert facts["sampling_defaults"] == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    assert facts["end_tokens"][0] == {"id": 1202, "token": "<|im_end|>"}
    assert facts["conversation"].startswith("<|im_start|>user\nCheck")
    assert facts["conversation_ids"][0] == 1201
    assert facts["warnings"] == []


def test_a_folder_without_template_and_end_tokens_is_warned_of(tmp_path: Path) -> None:
    shutil.copy(FOLDERS / "qwen" / "tokenizer.json", tmp_path)
    facts = _facts(tmp_path)
    assert facts["conversation"] is None and facts["end_tokens"] == []
    assert [each.split(":")[0] for each in facts["warnings"]] == [
        "The folder has no chat template",
        "The folder names no end token",
    ]
    status, text = _checked(tmp_path)
    assert status == 0 and text.count("Warning: ") == 2


def test_a_template_that_wants_more_than_one_user_turn_is_warned_of(tmp_path: Path) -> None:
    shutil.copy(FOLDERS / "qwen" / "tokenizer.json", tmp_path)
    text = "{{ raise_exception('a system turn comes first') if messages[0]['role'] != 'system' }}x"
    (tmp_path / "chat_template.jinja").write_text(text, encoding="utf-8")
    facts = _facts(tmp_path)
    assert facts["conversation"] is None
    assert "a system turn comes first" in facts["warnings"][0]


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    status, text = _checked(path, as_json=True)
    what = "is no folder" if name == "file" else "does not exist"
    assert (status, json.loads(text)) == (
        1,
        {"error": f"{path} {what}; allowed is a folder with tokenizer.json."},
    )
