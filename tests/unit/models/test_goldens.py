"""Ids and text are those of transformers, for every family: dialogues, texts, and streams cut anywhere."""

from __future__ import annotations

import random
import re

import pytest

from kvmesh.models.template_budget import TemplateError
from kvmesh.models.tokenizer import Conversation
from tests.unit.models.goldens import BYTE_FALLBACK, CHAT_FAMILIES, FAMILIES, FOLDERS, goldens, tokenizer


def test_every_family_has_its_goldens() -> None:
    """The counts are those that docs/models.md names."""
    assert set(FAMILIES) == {*CHAT_FAMILIES, "bert", "unigram"}
    for family in FAMILIES:
        made = goldens(family)
        assert len(made["dialogues"]) == (200 if family in CHAT_FAMILIES else 0)
        assert (len(made["texts"]), len(made["sequences"])) == (200, 2000)


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_dialogues_have_the_ids_of_transformers(family: str) -> None:
    """A dialogue that the template refuses there is refused here, with the template's own words."""
    refused = 0
    for each in goldens(family)["dialogues"]:
        asked = Conversation(each["messages"], each.get("tools"), each.get("arguments"))
        if "ids" in each:
            assert tokenizer(family).encode_chat(asked) == each["ids"], each
            continue
        refused += 1
        kind, _, reason = each["error"].partition(": ")
        with pytest.raises(TemplateError) as caught:
            tokenizer(family).encode_chat(asked)
        assert kind != "TemplateError" or reason.rstrip(".") in str(caught.value)
    assert refused < 30


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_have_the_ids_of_transformers(family: str) -> None:
    """BOS and EOS included."""
    for each in goldens(family)["texts"]:
        assert tokenizer(family).encode(each["text"]) == each["ids"], each


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_text_is_that_of_transformers(family: str) -> None:
    """However the ids are cut. The exception is a run of bytes that begins well and ends wrong (see detokenizer)."""
    draw, exceptions = random.Random(family), 0
    for each in goldens(family)["sequences"]:
        ids = each["ids"]
        made, pieces, at = tokenizer(family).detokenizer(), [], 0
        while at < len(ids):
            count = draw.randint(1, 4)
            pieces.append(made.feed(ids[at : at + count]))
            at += count
        pieces.append(made.flush())
        wanted = each["text"]
        if family in BYTE_FALLBACK and (kept := kept_beginnings(family, ids)) is not None:
            wanted, exceptions = kept, exceptions + 1
        assert "".join(pieces) == wanted, each
        assert tokenizer(family).decode(ids) == wanted
    assert (exceptions > 0) == (family in BYTE_FALLBACK)


def kept_beginnings(family: str, ids: list[int]) -> str | None:
    """Return the text with the good beginning of each broken run of bytes; None: no run has one. A slow reference."""
    library = tokenizer(family)
    tokens = [None if each in library.special_ids else library.token(each) for each in ids]
    text, run, is_exception = "", b"", False
    for token in [*(each for each in tokens if each is not None), ""]:
        found = re.fullmatch(r"<0x(..)>", token)
        if found:
            run += bytes.fromhex(found[1])
            continue
        good = next(run[:end] for end in range(len(run), -1, -1) if is_utf8(run[:end]))
        is_exception = is_exception or (bool(good) and good != run)
        text += good.decode() + "\ufffd" * (len(run) - len(good)) + token.replace("▁", " ")
        run = b""
    return text.removeprefix(" " if family != "gemma" else "") if is_exception else None


def is_utf8(data: bytes) -> bool:
    """Return True if `data` is whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_folders_say_what_the_families_say() -> None:
    """End tokens, defaults and contexts, by family."""
    made = {family: tokenizer(family) for family in CHAT_FAMILIES}
    ends = {
        family: [library.token(each) for each in library.end_token_ids] for family, library in made.items()
    }
    assert ends == {
        "gemma": ["<eos>", "<end_of_turn>"],
        "llama-2": ["</s>"],
        "llama-3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "mistral": ["</s>"],
        "qwen": ["<|im_end|>", "<|endoftext|>"],
    }
    assert {family: library.folder.context_tokens for family, library in made.items()} == {
        "gemma": 8192,
        "llama-2": 4096,
        "llama-3": 131072,
        "mistral": 32768,
        "qwen": 40960,
    }
    defaults = made["qwen"].folder.defaults
    found = (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty)
    assert found == (0.7, 0.8, 20, 1.05)
    assert (FOLDERS / "qwen" / "chat_template.jinja").exists()
