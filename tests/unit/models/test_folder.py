"""Folders that cannot be served: each is refused with one sentence that names the file and the reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.models import folder as model_folder
from kvmesh.models.folder import FILE_BYTES_MAX, TOKENIZER_BYTES_MAX, ModelFolderError
from kvmesh.models.tokenizer import ModelTokenizer
from tests.unit.models.goldens import FOLDERS

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
OPTIONAL = (*FILES[1:], "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of a good folder."""
    return Path(shutil.copytree(FOLDERS / "llama-3", tmp_path / "m"))


def refused(folder: Path) -> str:
    """Return the sentence with which the folder is refused."""
    with pytest.raises(ModelFolderError) as caught:
        ModelTokenizer.load(folder).run_once("Check: 12 tokens, naïve café.")
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600 and said.endswith(".") and not said.endswith("..")
    return said


def changed(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Apply `change` to the JSON of `file`."""
    document = json.loads((folder / file).read_text())
    change(document)
    (folder / file).write_text(json.dumps(document))
    return folder


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", [*FILES, *OPTIONAL[3:]])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "a pipe or a device"),
        (device, "a pipe or a device"),
        (Path.mkdir, "is a folder"),
        (link_to_nothing, "a link to a file that does not exist"),
        (link_to_itself, "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8: invalid start byte at byte 0"),
    ],
)
def test_what_is_no_readable_file_is_refused(
    llama: Path, file: str, make: Callable[[Path], object], reason: str
) -> None:
    """A file that cannot be read is not an absent file. A pipe is not waited for."""
    changed(llama, "tokenizer_config.json", lambda found: found.pop("chat_template"))
    (llama / file).unlink(missing_ok=True)
    make(llama / file)
    said = refused(llama)
    assert str(llama / file) in said and reason in said


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[" * 99_999, '{"a":' * 99_999, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_json_object_is_refused(llama: Path, file: str, text: str) -> None:
    """Empty, cut, deep, or another value."""
    (llama / file).write_text(text)
    assert str(llama / file) in refused(llama)


@pytest.mark.parametrize(("file", "most"), [(FILES[0], TOKENIZER_BYTES_MAX), (FILES[1], FILE_BYTES_MAX)])
def test_a_huge_file_is_not_read(llama: Path, file: str, most: int) -> None:
    """Its size is enough."""
    os.truncate(llama / file, 1 << 30)
    assert f"{file} has {1 << 30} bytes; allowed are {most}" in refused(llama)


def test_a_folder_that_may_not_be_read_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason of the system."""

    def stat(_: Path, **__: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ModelFolderError, match=r"Cannot read .*: Permission denied"):
        model_folder.read(llama)


def special(**changes: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"id": 1206, "content": "<z>", "special": True, **flags, **changes}


def norm(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.update(normalizer=value)


def post(ids: list[int], *, has_text: bool = True) -> Callable[[dict[str, Any]], object]:
    single = [{"SpecialToken": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"A": {"id": "A", "ids": ids, "tokens": ["a"] * len(ids)}}
    made = {"type": "TemplateProcessing", "pair": [], "special_tokens": tokens}
    return lambda found: found.update(post_processor={**made, "single": single[: 1 + has_text]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found["model"]["vocab"].update(zz=-1), "is not a tokenizer"),
        (lambda found: found["model"]["vocab"].update(zz=2**40), "is not a tokenizer"),
        (lambda found: found["model"]["vocab"].update(zz="5"), "is not a tokenizer"),
        (lambda found: found["model"]["vocab"].update(zz=2**32 - 1), "allowed is 0 to 4194303"),
        (lambda found: found["model"].update(merges=[1]), "is not a tokenizer"),
        (lambda found: found.update(model=None), "is not a tokenizer"),
        (lambda found: found.update(decoder=3), "is not a tokenizer"),
        (norm([]), "is not a tokenizer"),
        (
            lambda found: (found["model"].update(vocab={}, merges=[]), found.update(added_tokens=[])),
            "vocab is empty",
        ),
        (lambda found: found["added_tokens"].append(special(content="z" * 999)), "has 999 characters"),
        (norm({"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 99}), "99 characters of one"),
        (norm({"type": "Prepend", "prepend": "b" * 99}), "99 characters of one"),
        (
            norm(
                {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaa"}]
                    * 3,
                }
            ),
            "729 characters of one",
        ),
        (norm({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b"}), "cannot encode a text"),
        (post([1] * 99), "post_processor makes 100 tokens"),
        (post([99_999]), "tokens of the vocabulary"),
        (post([5], has_text=False), "post_processor makes 1 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_served_is_refused(
    llama: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """Also where the library panics, or would make much of little."""
    assert reason in refused(changed(llama, "tokenizer.json", change))


def declared(number: str, **token: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.setdefault("added_tokens_decoder", {}).update({number: token})


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (FILES[1], {"bos_token": 5}, "bos_token is 5; allowed is a string"),
        (FILES[1], {"bos_token": "\ud800"}, "without lone surrogates"),
        (FILES[1], {"chat_template": 5}, "chat_template is 5"),
        (FILES[1], {"chat_template": "\ud800"}, "chat_template is"),
        (FILES[1], {"chat_template": [{"name": "rag", "template": "x"}]}, "one of them named default"),
        (FILES[1], {"chat_template": [{"name": "default"}]}, "chat_template is"),
        (FILES[1], {"chat_template": "x" * 99_999}, "has 99999 characters; allowed are 65536"),
        (FILES[1], {"additional_special_tokens": "abc"}, "allowed is a list of tokens"),
        (FILES[1], {"additional_special_tokens": [5]}, "additional_special_tokens is 5"),
        (FILES[1], {"add_bos_token": "yes"}, 'add_bos_token is "yes"; allowed is true or false'),
        (FILES[1], declared("-1", content="q"), "added_tokens_decoder['-1']"),
        (FILES[1], declared("9" * 20, content="q"), "under a token id"),
        (FILES[1], declared("9" * 5000, content="q"), "under a token id"),
        (FILES[1], declared("1206", content=""), "1 character or more"),
        (FILES[1], declared("1206", content="q" * 999), "has 999 characters"),
        (FILES[1], declared("1206", content="q", special=1), "true or false for each of its flags"),
        (
            FILES[1],
            declared("7777", content="<q>", special=True),
            "the id 7777; in the vocabulary it has 1206",
        ),
        (FILES[2], {"temperature": float("nan")}, "temperature is NaN; allowed is a number from 0 to 10"),
        (FILES[2], {"temperature": float("inf")}, "temperature is Infinity"),
        (FILES[2], {"temperature": 10**400}, "temperature is 1000"),
        (FILES[2], {"temperature": -1}, "temperature is -1"),
        (FILES[2], {"temperature": True}, "temperature is true"),
        (FILES[2], {"top_p": 0}, "top_p is 0; allowed is a number above 0 to 1"),
        (FILES[2], {"top_k": 2.5}, "top_k is 2.5; allowed is a whole number"),
        (FILES[2], {"top_k": -1}, "top_k is -1"),
        (FILES[2], {"repetition_penalty": 0}, "repetition_penalty is 0"),
        (FILES[2], {"repetition_penalty": 0.001}, "allowed is a number from 0.01 to 10"),
        (FILES[2], {"eos_token_id": 10**9}, "the end token 1000000000, which is not in the vocabulary"),
        (FILES[2], {"eos_token_id": -1}, "eos_token_id is -1"),
        (FILES[2], {"eos_token_id": []}, "eos_token_id is []"),
        (FILES[2], {"eos_token_id": True}, "eos_token_id is true"),
        (FILES[3], {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        (FILES[3], {"max_position_embeddings": float("inf")}, "max_position_embeddings is Infinity"),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_range(
    llama: Path, file: str, change: dict[str, Any] | Callable[[dict[str, Any]], object], reason: str
) -> None:
    """Whatever JSON can hold."""
    made = changed(llama, file, change if callable(change) else lambda found: found.update(change))
    assert reason in refused(made)


def test_an_end_token_in_a_hole_of_the_vocabulary_is_refused(llama: Path) -> None:
    """The hole is an id below the largest one without a token."""
    changed(llama, FILES[0], lambda found: found["model"]["vocab"].update(zz=9000))
    changed(llama, FILES[2], lambda found: found.update(eos_token_id=8000))
    assert "the end token 8000" in refused(llama)


def test_holes_truncation_and_padding_change_no_prompt(llama: Path) -> None:
    """A prompt is neither cut nor filled; ids of a hole have no text. `model_max_length` of transformers means no bound."""
    text = "It was a fine morning"
    wanted = ModelTokenizer.load(llama).encode(text)
    changed(llama, FILES[0], lambda found: found["model"]["vocab"].update(zz=9000))
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    fill = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    fill |= {"pad_type_id": 0, "pad_token": "x"}
    changed(llama, FILES[0], lambda found: found.update(truncation=cut, padding=fill))
    changed(llama, FILES[1], lambda found: found.update(model_max_length=int(1e30)))
    made = ModelTokenizer.load(llama)
    assert made.encode(text) == wanted and made.vocab_size == 9001
    assert made.decode([8000, *wanted]) == made.decode(wanted)
    assert made.folder.context_tokens == 131_072


@pytest.mark.parametrize("kind", ["settings", "list", "jinja", "old"])
def test_a_template_is_found_wherever_transformers_keeps_it(llama: Path, kind: str) -> None:
    """The file of its own comes first; the template for tools lies beside it."""
    plain, tools = "{{ messages[0].content }}", "{{ tools }}"
    both = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
    changed(llama, FILES[1], lambda found: found.pop("chat_template"))
    match kind:
        case "settings":
            changed(llama, FILES[1], lambda found: found.update(chat_template=plain))
        case "list":
            changed(llama, FILES[1], lambda found: found.update(chat_template=both))
        case "jinja":
            changed(llama, FILES[1], lambda found: found.update(chat_template="another"))
            (llama / "chat_template.jinja").write_text(plain)
            (llama / "additional_chat_templates").mkdir()
            (llama / "additional_chat_templates/tool_use.jinja").write_text(tools)
        case _:
            (llama / "chat_template.json").write_text(json.dumps({"chat_template": plain}))
    found = model_folder.read(llama)
    assert found.template == plain
    assert found.tool_template == (tools if kind in ("list", "jinja") else "")


def test_a_table_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    """The library reserves what the table says that it has."""
    folder = Path(shutil.copytree(FOLDERS / "unigram", tmp_path / "m"))
    table = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    changed(folder, FILES[0], norm(table))
    assert "precompiled_charsmap names 4294967295 bytes" in refused(folder)
    changed(folder, FILES[0], norm(table | {"precompiled_charsmap": "?"}))
    assert "precompiled_charsmap is not Base64" in refused(folder)


def test_a_byte_order_mark_is_no_part_of_a_file(llama: Path) -> None:
    """Some editors write one. The template begins behind it."""
    made = ModelTokenizer.load(llama)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        (llama / file).write_bytes(b"\xef\xbb\xbf" + (llama / file).read_bytes())
    (llama / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf" + made.folder.template.encode())
    assert ModelTokenizer.load(llama).folder == made.folder
