"""The committed artefacts: properties that an engine and a frontend rely on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engines.reference.arithmetic import ChunkInput
from engines.reference.training.model_files import model_files
from engines.reference.training.vocabulary import SPECIAL_TOKENS
from engines.reference.transformer import Shape, Transformer

MODEL_DIR = Path(__file__).parents[3] / "engines" / "reference" / "model"
CONFIG = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
END = CONFIG["eos_token_id"]
SPECIAL = {token: number for number, token in enumerate(SPECIAL_TOKENS)}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200))
@example(text="<|end|><|user|>")
@example(text="  \n\t\r\n  x  \u00a0\u2028")
@example(text="\u0000\u200d👩‍👩‍👧‍👦 é é ﷽ 日本語 𝔘")
@example(text="it's 'll  ")
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """Decoding an encoded text returns the text, and no text yields a special token."""
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(SPECIAL.values())
    assert all(0 <= token < CONFIG["shape"]["vocab_size"] for token in ids)


def test_any_bytes_can_be_spelled(tokenizer: Tokenizer) -> None:
    """Each of the 256 bytes has an entry of its own, so no UTF-8 is ever unknown."""
    alphabet = [token for token in tokenizer.get_vocab() if len(token) == 1]
    assert len(alphabet) == 256


def test_vocabulary_and_special_tokens_agree(tokenizer: Tokenizer) -> None:
    """The special tokens are the tokenizer's, and the end token is one of them."""
    assert tokenizer.get_vocab_size() == CONFIG["shape"]["vocab_size"] == CONFIG["vocab_size"] == 4096
    assert {token: tokenizer.token_to_id(token) for token in SPECIAL} == SPECIAL
    assert SPECIAL["<|end|>"] == END


def test_the_folder_is_that_of_its_source() -> None:
    """The small files are what the training writes."""
    for name, text in model_files(Shape(**CONFIG["shape"]), CONFIG["training"]).items():
        assert (MODEL_DIR / name).read_text(encoding="utf-8") == text, name


def test_weights_are_small() -> None:
    """The weights have at most 10 MB, a size that a repository can hold."""
    assert (MODEL_DIR / "weights.npz").stat().st_size <= 10_000_000


def test_continues_a_dialogue(trained: Transformer, tokenizer: Tokenizer) -> None:
    """Given a question in the chat template, the model answers in words and then stops by itself."""
    ids = [SPECIAL["<|user|>"], *tokenizer.encode("Will you come to the ball with us?").ids]
    ids += [SPECIAL["<|end|>"], SPECIAL["<|assistant|>"]]
    start, answer, store = 0, list[int](), trained.new_store(16, 16)
    while END not in answer and len(answer) < 200:
        pages = np.arange(-(-(start + len(ids)) // 16), dtype=np.int32)
        (logits,) = trained.forward([ChunkInput(np.array(ids, np.int32), start, pages, True)], store)
        assert logits is not None
        start += len(ids)
        ids = [int(logits.argmax())]
        answer += ids
    assert answer[-1] == END
    words = tokenizer.decode(answer[:-1]).split()
    assert len(words) >= 3
    assert sum(word.strip(".,;:!?'-").isalpha() for word in words) >= 0.8 * len(words)


def test_rejects_artefacts_that_do_not_match(tmp_path: Path) -> None:
    """Another format, or weights of another shape, raise an error that names the difference."""
    shutil.copy(MODEL_DIR / "weights.npz", tmp_path)
    config = {**CONFIG, "shape": {**CONFIG["shape"], "feed_forward_width": 640}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"does not match config\.json, first at layers\.0\.feed_forward_out"
    ):
        Transformer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "format": "other"}), encoding="utf-8")
    with pytest.raises(ValueError, match="format 'other'"):
        Transformer.load(tmp_path)
