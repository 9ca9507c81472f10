"""All error texts that this engine returns.

Triton reports all of them with the code INTERNAL, as the TensorRT-LLM C++ backend does, so clients match on the
text. The texts are part of the contract: docs/engines.md has the table, and both change together. Texts of faults after
a request was accepted have TensorRT-LLM's prefix (`EXECUTOR_FAILED`).
"""

from typing import Final

EXECUTOR_FAILED: Final = "Executor failed process requestId {request} due to the following error: {reason}"

MISSING_INPUT: Final = "Required input tensor {field} is missing"
BAD_VALUE: Final = "Invalid value for {field}: {value}; allowed: {allowed}"
PROMPT_TOO_LONG: Final = (
    "Prompt length ({prompt}) plus request_output_len ({output}) exceeds max_sequence_tokens ({limit})"
)
KV_POOL_TOO_SMALL: Final = "Request needs {needed} KV cache blocks but the pool has only {total}"
QUEUE_FULL: Final = "Maximum queue size of {limit} has been reached, please try again later"
CONTEXT_PARAMS_MISSING: Final = "context_phase_params must be set for generation_only requests"
HANDOFF_MALFORMED: Final = "context_phase_params is malformed: {reason}"
HANDOFF_MISMATCH: Final = "handoff does not belong to this request: {reason}"
SOURCE_NOT_REGISTERED: Final = (
    "handoff names a KV source that is not registered: handoff names {named}, registered is {registered}"
)
STEP_STREAM_UNKNOWN: Final = "Step stream is unknown or over: open it again, with another name"
STOP_WITHOUT_ID: Final = "Trying to stop a request but request ID is not provided"
SUBSCRIPTION_OVERFLOW: Final = (
    "subscription overflow: reader is {events} events behind; subscribe again for a new snapshot"
)
SHUTTING_DOWN: Final = "engine is shutting down"
ENGINE_FAULT: Final = "engine fault: {reason}"

# Reasons after the prefix EXECUTOR_FAILED.
HANDOFF_UNKNOWN: Final = "KV handoff {handoff} is unknown or expired at {peer}"
TRANSFER_FAILED: Final = "KV cache transfer failed: {reason}"


class EngineError(Exception):
    """A request was rejected or has failed; the client receives the text unchanged."""


class TransferError(Exception):
    """A KV transfer failed; the text is the reason after the prefix EXECUTOR_FAILED."""
