"""Parsing of requests: accepted values, and the errors for others."""

import json
import math
from typing import Any

import numpy as np
import pytest

from engines.contract import request_parsing
from engines.contract.errors import EngineError
from engines.contract.request import ControlRequest, EngineRequest, EventCursor, RequestKind, RequestLimits
from engines.reference.model_repository import ModelFacts, config_pbtxt
from tests.unit.engine.engines import CONFIG

_LIMITS = RequestLimits(vocab_size=100, max_sequence_tokens=50)


def _no_tensor(name: str) -> None:
    """Return no tensor: a request without tensors."""


def _read(
    parameters: str = "", kind: RequestKind = RequestKind.CONTEXT_AND_GENERATION, **tensors: Any
) -> EngineRequest:
    values = {"input_ids": [[1, 2, 3]], "input_lengths": [[3]], "request_output_len": [[4]], **tensors}
    arrays = {name: np.array(value) for name, value in values.items() if value is not None}
    return request_parsing.parse_request(kind, 1, "id", parameters, arrays.get, _LIMITS, 0)


def test_defaults_are_greedy_without_end_token() -> None:
    """Defaults: temperature 0, no end token, no seed."""
    read = _read()
    assert read.prompt.tolist() == [1, 2, 3] and read.prompt.dtype == np.int32
    assert read.sampling.is_greedy and read.end_ids == frozenset() and read.kv_peer is None


def test_the_prompt_ends_at_input_lengths() -> None:
    """Padding after `input_lengths` is not part of the prompt."""
    assert _read(input_lengths=[[2]]).prompt.tolist() == [1, 2]


def test_kv_peer_is_a_request_parameter() -> None:
    """The registered source is a request parameter, not part of the handoff."""
    assert _read('{"kv_peer": "127.0.0.1:7"}').kv_peer == "127.0.0.1:7"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"input_ids": None}, "Required input tensor input_ids is missing"),
        ({"input_lengths": [[0]]}, "Invalid value for input_lengths: 0; allowed: 1..3"),
        ({"input_lengths": [[4]]}, "Invalid value for input_lengths: 4; allowed: 1..3"),
        ({"input_ids": [[1, 2, 100]]}, "Invalid value for input_ids: 100; allowed: 0..99"),
        ({"input_ids": [[1, -1, 3]]}, "Invalid value for input_ids: -1; allowed: 0..99"),
        ({"request_output_len": [[0]]}, "Invalid value for request_output_len: 0; allowed: >= 1"),
        (
            {"request_output_len": [[48]]},
            r"Prompt length \(3\) plus request_output_len \(48\) exceeds .* \(50\)",
        ),
        ({"temperature": [[math.nan]]}, "Invalid value for temperature: nan"),
        ({"temperature": [[-0.5]]}, "Invalid value for temperature: -0.5"),
        ({"temperature": [[math.inf]]}, "Invalid value for temperature: inf"),
        ({"runtime_top_p": [[1.5]]}, "Invalid value for runtime_top_p: 1.5"),
        ({"runtime_top_p": [[math.nan]]}, "Invalid value for runtime_top_p: nan"),
        ({"runtime_top_k": [[-1]]}, "Invalid value for runtime_top_k: -1"),
    ],
)
def test_bad_values_are_named(tensors: dict[str, Any], expected: str) -> None:
    """The error names the field, its value and the allowed range."""
    with pytest.raises(EngineError, match=expected):
        _read(**tensors)


def test_generation_needs_a_handoff() -> None:
    """Without a handoff there is no KV to continue from."""
    with pytest.raises(EngineError, match="context_phase_params must be set"):
        _read(kind=RequestKind.GENERATION_ONLY)


@pytest.mark.parametrize(
    "what",
    [*RequestKind, ControlRequest.KV_EVENTS, ControlRequest.LOAD_REPORT, ControlRequest.RELEASE_HANDOFF],
)
def test_request_type_selects_the_kind(what: RequestKind | ControlRequest) -> None:
    """All documented values are accepted; without the parameter the kind is context_and_generation."""
    assert request_parsing.parse_request_kind(json.dumps({"request_type": what.value}), _no_tensor) is what
    assert request_parsing.parse_request_kind("", _no_tensor) is RequestKind.CONTEXT_AND_GENERATION


def test_unknown_request_type_is_rejected() -> None:
    """Generating instead would hide a misspelling."""
    with pytest.raises(EngineError, match="Invalid value for request_type: contextonly"):
        request_parsing.parse_request_kind('{"request_type": "contextonly"}', _no_tensor)


def test_after_resumes_a_subscription() -> None:
    """Absent or empty: the subscription starts with a snapshot. Malformed values are named in the error."""
    assert (
        request_parsing.parse_event_cursor("") is None
        and request_parsing.parse_event_cursor('{"after": ""}') is None
    )
    assert request_parsing.parse_event_cursor('{"after": "boot:17"}') == EventCursor("boot", 17)
    for text in ("boot", ":3", "boot:", "boot:-1", "boot:1.5"):
        with pytest.raises(EngineError, match=f"after: {text}; allowed: <boot_id>:<event_id>"):
            request_parsing.parse_event_cursor(json.dumps({"after": text}))


def test_stop_is_a_tensor() -> None:
    """The contract is that of TensorRT-LLM's model."""
    assert (
        request_parsing.parse_request_kind("", lambda name: np.array([[True]]) if name == "stop" else None)
        is ControlRequest.STOP
    )


def test_config_pbtxt_has_the_limits_for_clients() -> None:
    """Clients read limits and capabilities from the model's configuration."""
    text = config_pbtxt(CONFIG, ModelFacts(4096, 2048, "127.0.0.1:1", 1))
    for line in (
        'parameters { key: "tokens_per_block" value { string_value: "8" } }',
        'parameters { key: "max_sequence_tokens" value { string_value: "2048" } }',
        'input { name: "seed" data_type: TYPE_UINT64 dims: [1] optional: true }',
        'output { name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] }',
        "max_batch_size: 1",
    ):
        assert line in text
