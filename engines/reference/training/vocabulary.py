"""The tokenizer: byte-level BPE, so that every string round-trips exactly.

Special tokens are entries of the vocabulary that no merge produces, and they are *not* registered as "added tokens".
Therefore encoding never yields a special token, for any text; callers insert the ids of special tokens themselves.
`decode` prints special tokens as text, so a detokenizer must remove their ids itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCABULARY_SIZE = 4096

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""The special tokens in the order of their ids, from 0."""

PAD, END, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception("The roles are system, user and assistant, not '" + message.role + "'") }}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the result is deterministic."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(document))
