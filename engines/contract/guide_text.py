"""A guide as a request names it: a JSON schema, a regular expression, or a grammar. Pure."""

from dataclasses import dataclass
from enum import Enum

GUIDE_BYTES_MAX = 64 << 10


class GuideKind(Enum):
    """Kinds of guides; values of TensorRT-LLM's input `guided_decoding_guide_type`."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"


@dataclass(frozen=True, slots=True)
class GuideText:
    """A guide as a request names it."""

    kind: GuideKind
    text: str = ""
    """Empty for JSON."""
