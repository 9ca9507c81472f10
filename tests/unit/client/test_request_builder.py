"""The options of the request builder, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.client.request_builder import Options, build_request
from kvmesh.inference.v1 import inference_pb2 as pb


def test_every_option_reaches_its_field() -> None:
    """No option is left out, and none takes another's field."""
    given: Options = {
        "max_output_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "seed": 2**64 - 1,
        "stop": ("a", "b"),
        "priority": -7,
        "ttft_timeout_s": 1.5,
        "session_id": "s",
        "idempotency_key": "k",
        "logprobs": True,
        "explain": True,
        "model": "m",
    }
    assert given.keys() | {"prompt_tokens", "messages"} == Options.__annotations__.keys()
    wanted = pb.GenerateRequest(
        text="x",
        sampling=pb.Sampling(temperature=0.5, top_p=0.25, top_k=4, seed=2**64 - 1, stop=("a", "b")),
        limits=pb.Limits(max_output_tokens=3, priority=-7),
        session_id="s",
        idempotency_key="k",
        options=pb.GenerateOptions(logprobs=True, explain=True),
        model="m",
    )
    wanted.limits.ttft_timeout.FromMilliseconds(1500)
    assert build_request("x", **given) == wanted
    assert list(build_request(prompt_tokens=[1, 2]).tokens.ids) == [1, 2]
    assert [each.content for each in build_request(messages=[("user", "hi")]).chat.messages] == ["hi"]


def test_an_unknown_option_is_named() -> None:
    """A misspelt option must not silently take the default of 256 tokens."""
    wrong: Any = {"max_tokens": 10}
    with pytest.raises(TypeError, match=r"max_tokens is not an option.*max_output_tokens"):
        build_request("x", **wrong)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("temperature", "a", "0 to 10"),
        ("top_k", 1.5, "0 to 1000000"),
        ("max_output_tokens", 2**31, "1 or more"),
        ("stop", "abc", "sequence"),
        ("session_id", 5, "str"),
        ("ttft_timeout_s", "soon", "0.001 to 3600"),
        ("ttft_timeout_s", float("nan"), "0.001 to 3600"),
        ("logprobs", "yes", "bool"),
    ],
)
def test_a_value_that_no_message_can_carry_is_named(name: str, value: object, allowed: str) -> None:
    """The error has field, value and range."""
    given: Any = {name: value}
    with pytest.raises(ValueError, match=f"^{name} is {value!r}: .*{allowed}.* is allowed"):
        build_request("x", **given)


def test_exactly_one_prompt_is_required() -> None:
    """No prompt and two prompts are errors."""
    with pytest.raises(ValueError, match="none of prompt"):
        build_request()
    with pytest.raises(ValueError, match="prompt and prompt_tokens of"):
        build_request("x", prompt_tokens=[1])
    wrong: Any = [("robot", "x")]
    with pytest.raises(ValueError, match="role is 'robot': system, user, assistant"):
        build_request(messages=wrong)
