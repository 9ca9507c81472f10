"""Makes the folder of a small model for each family: a tokenizer of the family's shape, trained on fixed text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCABULARY: Final = 1200
WORDS: Final = 30_000

UNREPEATABLE: Final = ("bert", "unigram")
"""Families whose training differs from run to run: tokenizers 0.23.3 takes WordPiece's and Unigram's ties in hash order."""

_SYLLABLES: Final = [
    "ac",
    "al",
    "an",
    "ar",
    "be",
    "ca",
    "ce",
    "co",
    "com",
    "con",
    "de",
    "di",
    "dis",
    "el",
    "en",
    "er",
    "es",
    "est",
    "ex",
    "fa",
    "fi",
    "for",
    "ge",
    "gra",
    "ha",
    "he",
    "hi",
    "ho",
    "il",
    "im",
    "in",
    "ing",
    "ion",
    "is",
    "ite",
    "ive",
    "ja",
    "ke",
    "la",
    "le",
    "li",
    "lo",
    "lu",
    "ly",
    "ma",
    "me",
    "mi",
    "mo",
    "mu",
    "na",
    "ne",
    "ni",
    "no",
    "nt",
    "o",
    "of",
    "on",
    "or",
    "ou",
    "pa",
    "pe",
    "pi",
    "po",
    "pre",
    "pro",
    "qua",
    "ra",
    "re",
    "ri",
    "ro",
    "ru",
    "sa",
    "se",
    "si",
    "so",
    "st",
    "ste",
    "su",
    "ta",
    "te",
    "ter",
    "th",
    "the",
    "ti",
    "to",
    "tr",
    "tu",
    "un",
    "ur",
    "us",
    "va",
    "ve",
    "vi",
    "wa",
    "we",
    "wi",
    "y",
    "ze",
]
_OTHERS: Final = (
    "é",
    "naïve",
    "größer",
    "中文",
    "東京",
    "привет",
    "día",
    "ção",
    "10",
    "2024",
    "!",
    "?",
    ".",
    ",",
    "(",
    ")",
    '"',
)

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> Iterator[str]:
    """Yield lines of made-up words, the same in each run."""
    draw = random.Random(16)
    for _ in range(WORDS // 10):
        words = []
        for _ in range(10):
            is_other = draw.random() < 0.08
            words.append(
                draw.choice(_OTHERS) if is_other else "".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3)))
            )
        yield " ".join(words) + draw.choice((".", "!", "\n", ":\n\n", "  ", "..."))


def template(family: str) -> str:
    """Return the chat template of a family: its turns and its refusals, written for the tests."""
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8")


def write(family: str, folder: Path) -> None:
    """Write the folder of `family`. Its tokenizer.json stays if a second training would give another one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, files = FAMILIES[family]()
    trained = folder / "tokenizer.json"
    if family not in UNREPEATABLE or not trained.exists():
        tokenizer.save(str(trained), pretty=False)
    for name, content in files.items():
        text = (
            content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        )
        (folder / name).write_text(text, encoding="utf-8")


Made = tuple[Tokenizer, Mapping[str, Any]]


def _byte_fallback(specials: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with byte fallback, trained on text with spaces as marks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        limit_alphabet=90,  # so that some characters of the text need bytes
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][: len(specials)]  # bytes are ordinary tokens
    made = Tokenizer.from_str(json.dumps(document))
    made.pre_tokenizer = None
    return made


def _fused(*more: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _with_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _llama_2() -> Made:
    tokenizer = _byte_fallback(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = _fused(decoders.Strip(" ", 1, 0))
    _with_bos(tokenizer, "<s>")
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": template("llama-2"),
        },
        "special_tokens_map.json": {
            "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
            "eos_token": {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False},
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.6, "top_p": 0.9},
        "config.json": {"max_position_embeddings": 4096},
    }


def _mistral() -> Made:
    specials = [
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ]
    tokenizer = _byte_fallback([*specials, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = _fused(decoders.Strip(" ", 1, 0))
    _with_bos(tokenizer, "<s>")
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": [
                {"name": "default", "template": template("mistral")},
                {"name": "tool_use", "template": template("mistral")},
            ],
        },
        "generation_config.json": {"eos_token_id": 2},
        "config.json": {"max_position_embeddings": 32768},
    }


def _gemma() -> Made:
    tokenizer = _byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _fused()
    _with_bos(tokenizer, "<bos>")
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            "chat_template": template("gemma"),
        },
        "generation_config.json": {"eos_token_id": [1, 5], "top_k": 64, "top_p": 0.95},
        "config.json": {"text_config": {"max_position_embeddings": 8192}},
    }


def _byte_level(split: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), "isolated"), level]) if split else level
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama_3() -> Made:
    tokenizer = _byte_level()
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
            ),
        ]
    )
    ends = [tokenizer.token_to_id(name) for name in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
            "chat_template": template("llama-3"),
        },
        "generation_config.json": {"do_sample": True, "eos_token_id": ends, "temperature": 0.6, "top_p": 0.9},
        "config.json": {"max_position_embeddings": 131072, "eos_token_id": ends},
    }


def _qwen() -> Made:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    declared = {}
    for number, name in enumerate(plain, start=tokenizer.get_vocab_size()):
        declared[str(number)] = {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": False,
        }
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "added_tokens_decoder": declared,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "chat_template.jinja": template("qwen"),
        "generation_config.json": {
            "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
        "config.json": {"max_position_embeddings": 40960},
    }


def _bert() -> Made:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.WordPiece()
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "cls_token": "[CLS]",
            "pad_token": "[PAD]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
            "eos_token": "[SEP]",
        },
    }


def _unigram() -> Made:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer, {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
    }


FAMILIES: Final[Mapping[str, Callable[[], Made]]] = {
    "llama-2": _llama_2,
    "llama-3": _llama_3,
    "mistral": _mistral,
    "qwen": _qwen,
    "gemma": _gemma,
    "bert": _bert,
    "unigram": _unigram,
}
"""Makers of a tokenizer and of the other files, by family. The last two have no chat template, and another decoder."""
