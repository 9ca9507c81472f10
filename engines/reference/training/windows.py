"""Training windows: token rows of one length, cut from running text or packed from dialogues.

Functions change no state but the generator's; the same generator state gives the same windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engines.reference.training.corpus import Corpus, Scene
from engines.reference.training.vocabulary import ASSISTANT, END, SYSTEM, USER

TURN_TOKENS_MAX = 90
"""Longest speech. Longer speeches are cut at the last sentence that fits, so that the model learns to end its turns."""

SYSTEM_SHARE = 0.3
"""Share of dialogues that start with a system turn, made of the narration before the dialogue if there is one."""

Tokens = NDArray[np.int64]


class Windows:
    """Draws windows of `length + 1` tokens from one side of the corpus."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, length: int) -> None:
        self._length = length
        text = [[*tokenizer.encode(passage).ids, END] for passage in corpus.passages]
        self._text: Tokens = np.concatenate([np.array(ids) for ids in text]).astype(np.int64)
        self._scenes = [_encode_scene(scene, tokenizer) for scene in corpus.scenes]
        self._turn_counts = np.array([len(turns) for _, turns in self._scenes], dtype=np.float64)

    @property
    def text_token_count(self) -> int:
        return len(self._text)

    @property
    def dialogue_token_count(self) -> int:
        return sum(len(turn) + 2 for _, turns in self._scenes for turn in turns)

    def draw_text(self, generator: np.random.Generator) -> Tokens:
        """Return a window of running text from a random position."""
        start = int(generator.integers(len(self._text) - self._length - 1))
        return self._text[start : start + self._length + 1]

    def draw_dialogue(self, generator: np.random.Generator) -> Tokens:
        """Return a window of packed dialogues; the first dialogue starts at the window's start."""
        ids: list[int] = []
        chances = self._turn_counts / self._turn_counts.sum()
        while len(ids) <= self._length:
            setting, turns = self._scenes[int(generator.choice(len(self._scenes), p=chances))]
            first = int(generator.integers(len(turns) - 1))
            if setting is not None and generator.random() < SYSTEM_SHARE:
                ids += [SYSTEM, *setting, END]
                first = 0
            for number, turn in enumerate(turns[first:]):
                ids += [ASSISTANT if number % 2 else USER, *turn, END]
        return np.array(ids[: self._length + 1], dtype=np.int64)

    def draw_batch(self, count: int, dialogue_share: float, generator: np.random.Generator) -> Tokens:
        """Return [count, length + 1] tokens; `dialogue_share` is the share of rows with dialogues."""
        dialogue_count = round(count * dialogue_share)
        rows = [self.draw_dialogue(generator) for _ in range(dialogue_count)]
        rows += [self.draw_text(generator) for _ in range(count - dialogue_count)]
        return np.stack(rows)


def _encode_scene(scene: Scene, tokenizer: Tokenizer) -> tuple[list[int] | None, list[list[int]]]:
    setting = _shorten(scene.setting, tokenizer) if scene.setting else None
    return setting, [_shorten(turn, tokenizer) for turn in scene.turns]


def _shorten(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode whole sentences up to TURN_TOKENS_MAX tokens; the first sentence is always included."""
    sentences = text.replace("! ", "!\n").replace("? ", "?\n").replace(". ", ".\n").split("\n")
    ids: list[int] = []
    for number, sentence in enumerate(sentences):
        more = tokenizer.encode(sentence if number == 0 else " " + sentence).ids
        if ids and len(ids) + len(more) > TURN_TOKENS_MAX:
            break
        ids += more
    return ids
