"""The features of an engine that a submit needs. Pure."""

from __future__ import annotations

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.capabilities import Capabilities


def missing(submit: pb.Submit, offered: Capabilities) -> tuple[str, str] | None:
    """Return (field, reason) of the first feature that the engine lacks, or None.

    A frontend asks for the features of the pool before it submits. This check is for a replica that changed since.
    """
    sampling = submit.sampling
    has_penalty = bool(sampling.frequency_penalty or sampling.presence_penalty)
    has_penalty = has_penalty or sampling.repetition_penalty not in (0.0, 1.0)
    has_guide = sampling.HasField("guide")
    for name, is_needed, is_offered in (
        ("frequency_penalty", has_penalty, offered.penalties),
        ("bias_token_ids", bool(sampling.bias_token_ids), offered.logit_bias),
        ("min_tokens", bool(sampling.min_tokens), offered.min_tokens),
        ("alternative_count", bool(sampling.alternative_count), offered.top_logprobs),
        ("guide", has_guide, offered.guided_output),
    ):
        if is_needed and not is_offered:
            return f"sampling.{name}", "the engine does not offer it"
    if has_guide and submit.start_position and not offered.guided_resume:
        return "sampling.guide", "the engine cannot go on behind a guided output"
    return None
