"""The sampling parameters of an admitted request, and the features of engines that they need. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb

PENALTIES: Final = "penalties"
LOGIT_BIAS: Final = "logit_bias"
MIN_TOKENS: Final = "min_tokens"
TOP_LOGPROBS: Final = "top_logprobs"
GUIDED_OUTPUT: Final = "guided_output"
GUIDED_RESUME: Final = "guided_resume"
"""Features by the names that replicas give them in their leases (kvmesh.triton.capabilities)."""


@dataclass(frozen=True, slots=True)
class Guide:
    """Form that the output must have."""

    kind: pb.Guide.Kind.ValueType
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. The defaults behind `seed` change nothing."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, value), by ascending id."""
    min_tokens: int = 0
    alternatives: int = 0
    """Most likely tokens to return at each position."""
    guide: Guide | None = None

    @property
    def has_penalties(self) -> bool:
        """True if a penalty changes the logits."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    def needs(self) -> dict[str, str]:
        """Return the features of engines that the request needs, each with the field that needs it."""
        penalty = next(
            (
                name
                for name, off in (("frequency", 0.0), ("presence", 0.0), ("repetition", 1.0))
                if getattr(self, f"{name}_penalty") != off
            ),
            "",
        )
        fields = {
            PENALTIES: f"sampling.{penalty}_penalty" if penalty else "",
            LOGIT_BIAS: "sampling.logit_bias" if self.bias else "",
            MIN_TOKENS: "sampling.min_tokens" if self.min_tokens else "",
            TOP_LOGPROBS: "options.top_logprobs" if self.alternatives else "",
            GUIDED_OUTPUT: "sampling.guide" if self.guide is not None else "",
        }
        return {feature: field for feature, field in fields.items() if field}

    def message(self) -> pb.Sampling:
        """Return the parameters for a router."""
        made = pb.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=0.0 if self.repetition_penalty == 1.0 else self.repetition_penalty,
            bias_token_ids=[token_id for token_id, _ in self.bias],
            bias_values=[value for _, value in self.bias],
            min_tokens=self.min_tokens,
            alternative_count=self.alternatives,
        )
        if self.guide is not None:
            made.guide.kind, made.guide.text = self.guide.kind, self.guide.text
        return made
