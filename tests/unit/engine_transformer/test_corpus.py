"""Parsing of the training text: R's compressed vectors of lines, paragraphs, and dialogues."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from engines.reference.training.corpus import paragraphs_of, read_novels, scenes_of


def _piece(lines: Sequence[str | None]) -> bytes:
    """Serialize as R does: header of format 3, a vector of strings, each cached in UTF-8."""
    data = b"X\n" + b"".join(n.to_bytes(4, "big") for n in (3, 0x40201, 0x30500, 5)) + b"UTF-8"
    data += (16).to_bytes(4, "big") + len(lines).to_bytes(4, "big")
    for line in lines:
        encoded = b"" if line is None else line.encode()
        size = -1 if line is None else len(encoded)
        data += (0x00040009).to_bytes(4, "big") + size.to_bytes(4, "big", signed=True) + encoded
    return len(data).to_bytes(4, "big") + zlib.compress(data)


def test_reads_the_format_of_r() -> None:
    """Consecutive vectors are read line by line; a missing value is an empty line."""
    novels: list[list[str | None]] = [["Emma", "", "a café", None], ["x" * 5000]]
    read = read_novels(b"".join(_piece(novel) for novel in novels))
    assert read == [["Emma", "", "a café", ""], ["x" * 5000]]


def test_rejects_other_data() -> None:
    """Data other than a vector of strings raises an error."""
    piece = zlib.compress(b"X\n" + bytes(40))
    with pytest.raises(ValueError, match="format 3"):
        read_novels((42).to_bytes(4, "big") + piece)
    with pytest.raises(ValueError, match="not its stated length"):
        read_novels((41).to_bytes(4, "big") + piece)


def test_paragraphs_lose_headings_and_italics() -> None:
    """Lines are joined into paragraphs; titles, chapter headings and underscores are removed."""
    lines = [
        "EMMA",
        "",
        "By Jane Austen",
        "",
        "CHAPTER I",
        "",
        "She was _very_",
        "clever.",
        "",
        "",
        "Chapter 2",
    ]
    assert paragraphs_of(lines) == ["She was very clever."]


def test_dialogues_alternate_between_speakers() -> None:
    """Speeches in a row become turns: interrupted and continued speeches are one turn, tags are left out."""
    scenes = scenes_of(
        [
            "They sat down.",
            '"Do you know," said he, "that it rains?"',
            '"I do. It rained yesterday.',
            '"And it will rain."',
            "She smiled.",
            '"Oh! no,"',
            "A very long narration. " * 20,
            '"Alone again."',
        ]
    )
    assert [scene.turns for scene in scenes] == [
        ["Do you know, that it rains?", "I do. It rained yesterday. And it will rain.", "Oh! no."]
    ]
    assert scenes[0].setting == "They sat down."
