"""The training text: fetched from a Debian package, cut into paragraphs and dialogues.

`r-cran-janeaustenr` (MIT) contains six public-domain novels by Jane Austen as an R "lazy-load" database: a sequence
of compressed pieces, each a vector of lines. No other source is read. The first functions do I/O; the rest are pure.
"""

from __future__ import annotations

import re
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
RDB_PATH = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"

HELD_OUT_STRIDE = 25
"""One of 25 consecutive passages is held out: 4 % of each novel, evenly spread."""

PASSAGE_PARAGRAPHS = 24
"""Paragraphs of a passage, which is on one side of the split as a whole, so that the split cuts no dialogue."""

CHARTYPE_STRINGS = 16
"""The type code of a vector of strings in R (R Internals, section 1.1)."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A dialogue: alternating speeches, with the narration before the first speech if there is one."""

    setting: str | None
    turns: list[str]


@dataclass(frozen=True, slots=True)
class Corpus:
    """One side of the split: the text in passages, and the dialogues found in the passages."""

    passages: list[str]
    scenes: list[Scene]


def fetch_package(folder: Path) -> Path:
    """Download and unpack the Debian package into `folder` unless it is unpacked already; return `folder`.

    Needs `dpkg-deb`, and `apt-get` with the index of a Debian release. Raises `subprocess.CalledProcessError` if one of
    them fails.
    """
    if not (folder / RDB_PATH).exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
        archive = next(folder.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True)
    return folder


def read_novels(rdb: bytes) -> list[list[str]]:
    """Parse an R lazy-load database of string vectors; return the lines of each vector.

    A piece is a 4-byte length (of the unpacked data) and a zlib stream. The stream contains R's XDR serialization,
    format 3. Raises ValueError for other content.
    """
    novels, offset = [], 0
    while offset < len(rdb):
        stream = zlib.decompressobj()
        piece = stream.decompress(rdb[offset + 4 :])
        if len(piece) != int.from_bytes(rdb[offset : offset + 4], "big"):
            raise ValueError(
                f"R database: piece at byte {offset} unpacks to {len(piece)} bytes, not its stated length"
            )
        novels.append(_string_vector(piece))
        offset = len(rdb) - len(stream.unused_data)
    return novels


def _string_vector(piece: bytes) -> list[str]:
    def integer(at: int) -> int:
        return int.from_bytes(piece[at : at + 4], "big", signed=True)

    if piece[:2] != b"X\n" or integer(2) != 3:
        raise ValueError("not an R serialization of format 3")
    at = 18 + integer(14)  # after the name of the native encoding
    if piece[at + 3] != CHARTYPE_STRINGS:
        raise ValueError("not a vector of strings")
    lines, count, at = [], integer(at + 4), at + 8
    for _ in range(count):
        size = max(integer(at + 4), 0)  # -1 is a missing value
        lines.append(piece[at + 8 : at + 8 + size].decode("utf-8"))
        at += 8 + size
    return lines


def split(novels: list[list[str]]) -> tuple[Corpus, Corpus]:
    """Return (training text, held-out text). Pure and deterministic."""
    kept: list[list[str]] = []
    held_out: list[list[str]] = []
    for novel in novels:
        paragraphs = paragraphs_of(novel)
        for number, start in enumerate(range(0, len(paragraphs), PASSAGE_PARAGRAPHS)):
            side = held_out if number % HELD_OUT_STRIDE == HELD_OUT_STRIDE // 2 else kept
            side.append(paragraphs[start : start + PASSAGE_PARAGRAPHS])
    return _corpus(kept), _corpus(held_out)


def _corpus(passages: list[list[str]]) -> Corpus:
    scenes = [scene for paragraphs in passages for scene in scenes_of(paragraphs)]
    return Corpus(["\n".join(paragraphs) for paragraphs in passages], scenes)


def paragraphs_of(lines: list[str]) -> list[str]:
    """Join lines into paragraphs; drop title pages, headings and marks of italics."""
    body = "\n".join(line.strip() for line in lines)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n{2,}", body)]
    heading = re.compile(r"(CHAPTER|VOLUME|Chapter|Volume|[Bb]y Jane Austen|THE END|FINIS|\(?\d{4}\)?$)")
    return [
        part.replace("_", "")
        for part in paragraphs
        if len(part) > 3 and part.upper() != part and not heading.match(part)
    ]


def scenes_of(paragraphs: list[str], narration_chars_max: int = 300) -> list[Scene]:
    """Find dialogues: at least two consecutive speeches by alternating speakers.

    Consecutive paragraphs with quoted speech count as alternating speakers. A short narration between two speeches is
    skipped. A speech with an open quotation continues in the next paragraph.
    """
    scenes: list[Scene] = []
    setting: str | None = None
    turns: list[str] = []
    is_open = False
    narration_before: str | None = None
    for paragraph in [*paragraphs, ""]:
        speech = _speech(paragraph)
        if speech and is_open and paragraph.startswith('"'):
            turns[-1] += " " + speech
        elif speech:
            if not turns:
                setting = narration_before
            turns.append(speech)
        elif not paragraph or len(paragraph) > narration_chars_max:
            if len(turns) >= 2:
                scenes.append(Scene(setting, turns))
            turns = []
        is_open = bool(speech) and paragraph.count('"') % 2 == 1
        narration_before = None if speech else paragraph or None
    return scenes


def _speech(paragraph: str) -> str:
    """Return the quoted speech of a paragraph without its tags ("said ..."); empty if there is no speech."""
    parts = [part.strip() for part in paragraph.split('"')[1::2]]
    words = " ".join(part for part in parts if part)
    words = re.sub(r"[,;:]$|-+$", ".", words)  # the comma before a tag
    return words if len(words.split()) >= 2 else ""
