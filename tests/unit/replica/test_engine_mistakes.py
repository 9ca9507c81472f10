"""Mistakes in the engines of replicas that a start finds: another vocabulary, and one engine for two replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.config import ROOT
from kvmesh.membership.member import Member
from kvmesh.replica.engine_rival import rival_of
from kvmesh.replica.vocabulary import largest_token_id, vocabulary_fault
from kvmesh.tokenizer_digest import tokenizer_of

FOLDERS = ROOT / "tests" / "unit" / "models" / "folders"


@pytest.mark.parametrize("name", sorted(each.name for each in FOLDERS.iterdir() if each.is_dir()))
def test_the_largest_id_is_that_of_the_tokenizer(name: str) -> None:
    """Vocabularies are objects or lists; added tokens may lie above them."""
    text = tokenizer_of(FOLDERS / name)
    found: dict[str, Any] = json.loads(text)
    vocabulary = found["model"]["vocab"]
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    largest = max([*ids, *(each["id"] for each in found["added_tokens"])])
    assert largest_token_id(text) == largest
    assert vocabulary_fault(text, largest + 1) == vocabulary_fault(text, largest + 100) == ""
    assert vocabulary_fault(text, largest) == (
        f"The engine has a vocabulary of {largest} tokens, and the tokenizer of the model has token id {largest}: "
        f"allowed is an engine with {largest + 1} tokens or more."
    )


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"a": "b"}}}', b"\xff"]
)
def test_a_tokenizer_that_cannot_be_read_tells_nothing(text: bytes) -> None:
    """Frontends refuse such a folder with their own sentence."""
    assert largest_token_id(text) is None
    assert vocabulary_fault(text, 5) == ""


def test_a_rival_is_another_replica_with_the_same_boot_of_an_engine() -> None:
    """Engines without a boot id, and the own lease, are none."""

    def member(name: str, boot_id: str) -> Member:
        return Member(
            process_id=name,
            role="decode",
            address="h:1",
            boot_id="b",
            model_version="v",
            block_tokens=32,
            engine_boot_id=boot_id,
        )

    members = [member("decode-2", "e1"), member("decode-1", "e1"), member("prefill-0", "e2"), member("x", "")]
    assert rival_of("decode-0", "e1", members) == "decode-1"
    assert rival_of("decode-1", "e1", members[1:]) == ""
    assert rival_of("decode-0", "e3", members) == ""
    assert rival_of("decode-0", "", members) == ""
