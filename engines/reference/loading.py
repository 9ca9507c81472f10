"""Loads the arithmetic of a configuration and computes its digest, which identifies compatible KV."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engines.contract.guide_text import GuideText
from engines.reference.arithmetic import Arithmetic
from engines.reference.config import EngineConfig
from engines.reference.hashed import HashedArithmetic
from engines.reference.sequence import Guide


@dataclass(frozen=True, slots=True)
class ArithmeticFacts:
    """What the launcher tells of an arithmetic that the model's process loads."""

    vocab_size: int
    max_sequence_tokens: int
    digest: str


def facts_of(config: EngineConfig) -> ArithmeticFacts:
    """Return the facts of a configuration's arithmetic. Raises ValueError and OSError where it cannot be loaded.

    The weights of `torch` are checked, but not loaded.
    """
    if config.arithmetic == "torch":
        from engines.reference.llama.loading import choose

        choice = choose(config)
        return ArithmeticFacts(choice.shape.vocabulary, choice.max_sequence_tokens, choice.digest)
    arithmetic, digest = load_arithmetic(config)
    return ArithmeticFacts(arithmetic.vocab_size, arithmetic.max_sequence_tokens, digest)


def load_arithmetic(config: EngineConfig) -> tuple[Arithmetic, str]:
    """Return the arithmetic and its digest.

    The weights of the transformer, and those of `torch` without a shape, are read from the model directory. Raises OSError
    if a file is missing, and ValueError for one that does not fit.
    """
    if config.arithmetic == "hashed":
        hashed = HashedArithmetic(
            vocab_size=config.vocab_size,
            max_sequence_tokens=config.max_sequence_tokens,
            salt=config.salt,
            end_token=config.end_token,
            end_probability=config.end_probability,
        )
        return (
            hashed,
            f"hashed-{config.vocab_size}-{config.end_token}-{xxhash.xxh3_64_hexdigest(config.salt.encode())}",
        )
    if config.arithmetic == "torch":
        from engines.reference.llama.loading import choose  # PyTorch is no dependency of the engine

        choice = choose(config)
        return choice.load(), choice.digest
    from engines.reference.transformer import Transformer  # hashed needs neither weights nor BLAS

    model_dir = Path(config.model_dir)
    return Transformer.load(model_dir), f"transformer-{model_digest(model_dir)}"


def load_guide_compiler(config: EngineConfig) -> Callable[[GuideText], Guide] | None:
    """Return the compiler of guides for the model's tokenizer; None for an arithmetic without one."""
    if not config.has_guides:
        return None
    from engines.reference.guides import compiler_of  # hashed does without llguidance

    folder = Path(config.model_dir)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {int(each) for each, token in settings["added_tokens_decoder"].items() if token["special"]}
    end_id = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return compiler_of(text, special, end_id).compile


MODEL_FILES = ("config.json", "tokenizer.json", "weights.npz")
"""The files that decide on keys and values. The chat template does not."""


def model_digest(directory: Path) -> str:
    """Return xxh3_64 over names and bytes of MODEL_FILES in `directory`, as 16 hex digits."""
    digest = xxhash.xxh3_64()
    for name in MODEL_FILES:
        digest.update(name.encode())
        digest.update((directory / name).read_bytes())
    return digest.hexdigest()
