"""The behaviour of kvmesh without a capability, by its name in `capabilities.Capabilities`. Pure."""

from __future__ import annotations

from typing import Final

FALLBACKS: Final = {
    "disaggregated": "decode runs every prompt itself",
    "end_token": "decode appends the end token to the output",
    "kv_events": "routers infer the cached blocks from their own dispatches",
    "load_report": "replicas count their own calls and blocks, or read Triton's metrics",
    "release_handoff": "an abandoned handoff stays until the engine's own timeout",
    "step_frames": "each call has a stream of its own, which takes more CPU per token",
    "stop": "a call ends by the cancel of its stream",
    "reuse": "routers count each prompt that they sent as cached",
    "logprobs": "requests with log-probabilities get none",
    "top_logprobs": "requests with top_logprobs are refused",
    "seed": "sampled answers cannot be repeated",
    "seeded_resume": "an answer that is resumed on another replica may go on with other tokens",
    "penalties": "requests with penalties are refused",
    "logit_bias": "requests with a logit bias are refused",
    "min_tokens": "requests with min_tokens are refused",
    "stop_words": "requests end at the first end token of the model alone",
    "guided_output": "requests with a guide are refused",
    "guided_resume": "a guided answer ends where its engine is lost",
    "after": "each subscription starts with a snapshot",
    "max_bytes": "the replica ends a subscription itself after some megabytes",
    "repeatable": "an answer that is resumed on another replica may go on with other tokens",
    "sizes": "the keys of [engine] in kvmesh.toml, or Triton's metrics",
    "refused": "the frontend refuses such requests",
    "malformed": "replicas send words of one token alone",
    "input_lengths": "replicas always send it",
    "request_type": "replicas send the known types alone",
}
