"""The small files of the model's folder, in the format of Hugging Face: all but weights and tokenizer. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from engines.reference.training.vocabulary import CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, VOCABULARY_SIZE
from engines.reference.transformer import FORMAT, Shape

MAX_SEQUENCE_TOKENS = 4096
"""The limit of the engine. Beyond the training window results stay exact, but the text gets worse."""


def model_files(shape: Shape, training: Mapping[str, float]) -> dict[str, str]:
    """Return the content of each file by name. `training`: figures of the training, for readers alone."""
    end, pad = SPECIAL_TOKENS[END], SPECIAL_TOKENS[PAD]
    roles = [token for token in SPECIAL_TOKENS if token not in (end, pad)]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    documents: dict[str, Mapping[str, Any]] = {
        "config.json": {
            "architectures": ["KvmeshReferenceForCausalLM"],
            "model_type": "kvmesh_reference",
            "format": FORMAT,
            "shape": dataclasses.asdict(shape),
            "vocab_size": VOCABULARY_SIZE,
            "max_position_embeddings": MAX_SEQUENCE_TOKENS,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "training": training,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(number): {"content": token, **flags} for number, token in enumerate(SPECIAL_TOKENS)
            },
            "eos_token": end,
            "pad_token": pad,
            "model_max_length": MAX_SEQUENCE_TOKENS,
        },
        "special_tokens_map.json": {
            "eos_token": end,
            "pad_token": pad,
            "additional_special_tokens": roles,
        },
        "generation_config.json": {"eos_token_id": END, "pad_token_id": PAD},
    }
    files = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    return {**files, "chat_template.jinja": CHAT_TEMPLATE}
