"""Error texts of the stock backend. Pure.

A text of TLLM_CHECK or TLLM_THROW has a source position and a stack trace behind it. Sources: model_instance_state.cc at
0c8de69a, utils.cc at 19290813, executorImpl.cpp and llmRequest.h of the same time. The reason of a failed transfer is an
assumption: no such transfer was seen.
"""

from __future__ import annotations

from typing import Final

STOP_WITHOUT_ID: Final = "Trying to stop a request but request ID is not provided"
NO_OUTPUT_LENGTH: Final = "request_output_len is not present in the request"
POPULATING: Final = "Error encountered while populating response: "

_EXECUTOR: Final = "Executor failed process requestId {number} due to the following error: {reason}"
_TRACE: Final = (
    "\n1       0x7f3c0d5a2c81 /opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so(+0x35c81)"
)
_FETCHING: Final = "Encountered an error when fetching new request: "
_FORWARD: Final = "Encountered an error in forwardAsync function: "


def failed(number: int, reason: str) -> str:
    """Return the text of a failure inside the executor."""
    return _EXECUTOR.format(number=number, reason=reason)


def no_input_ids() -> str:
    """Return the text for a request without a prompt."""
    return _thrown("input_ids or encoder_input_features is not present in the request.", "utils.cc:1017")


def queue_full(limit: int) -> str:
    """Return the text for a full queue of the executor."""
    text = f"Maximum queue size of {limit} has been reached, please try again later"
    return _thrown(text, "executorImpl.cpp:1014")


def too_long(prompt: int, longest: int) -> str:
    """Return the reason for a prompt that is too long; the executor finds it."""
    text = (
        f"Prompt length ({prompt}) exceeds maximum input length ({longest}). Set log level to info and check "
        "TRTGptModel logs for how maximum input length is set"
    )
    return _FETCHING + _thrown(text, "llmRequest.h:598")


def failed_check(condition: str, where: str) -> str:
    """Return the text of TLLM_CHECK."""
    return _thrown(f"[TensorRT-LLM][ERROR] Assertion failed: {condition}", where)


def no_handoff() -> str:
    """Return the text for a context_only answer without a handoff."""
    return POPULATING + _thrown(
        "contextParams must be present in the response", "model_instance_state.cc:1281"
    )


def in_forward(reason: str) -> str:
    """Return the reason for a failure in a step."""
    return _FORWARD + reason


def not_in_world() -> str:
    """Return the reason for a handoff of an executor in another MPI world."""
    return in_forward(failed_check("MPI error: rank is not in the communicator", "mpiUtils.cpp:318"))


def _thrown(text: str, where: str) -> str:
    return f"{text} (/workspace/tensorrt_llm/cpp/{where}){_TRACE}"
