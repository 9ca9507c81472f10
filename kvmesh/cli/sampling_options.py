"""The sampling options of `kvmesh generate` that need more than a number: biases, token ids, guides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.options import refuse_bytes, refuse_outside

if TYPE_CHECKING:  # at run time the command imports it, so that others start fast
    from kvmesh.inference.v1 import inference_pb2 as pb

INT32_MAX: Final = 2**31 - 1
FILE: Final = "@"
"""Begins the name of a file with the option's text."""

FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="-2 to 2: lowers tokens as often as the output has them."),
]
PresencePenaltyOption = Annotated[
    float | None, typer.Option("--presence-penalty", help="-2 to 2: lowers tokens that the output has.")
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="0.01 to 10: divides tokens of prompt and output; 1: none."),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", help="TOKEN_ID=VALUE, -100 to 100: raises a token; may be repeated."),
]
MinTokensOption = Annotated[
    int | None, typer.Option("--min-tokens", help="Tokens before the output may end.")
]
StopTokenOption = Annotated[
    list[int] | None, typer.Option("--stop-token", help="Token id that ends the output; may be repeated.")
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="End tokens of the model end nothing.")]
JsonSchemaOption = Annotated[
    str, typer.Option("--json-schema", help="The output is JSON of this schema; @FILE reads it from a file.")
]
RegexOption = Annotated[
    str, typer.Option("--regex", help="The whole output matches this; @FILE reads it from a file.")
]
TopLogprobsOption = Annotated[
    int | None,
    typer.Option("--top-logprobs", help="With --json, the most likely tokens at each position, 0 to 20."),
]


def put_ids(sampling: pb.Sampling, biases: Iterable[str], stop_tokens: Iterable[int]) -> None:
    """Put biases (TOKEN_ID=VALUE) and stop tokens into `sampling`. Raises BadOption for what no message can hold."""
    for each in biases:
        token_id, separator, text = each.partition("=")
        value = _number(text)
        if not (separator and token_id.isascii() and token_id.isdigit()) or value is None:
            raise BadOption(f'--logit-bias = "{each}": allowed is TOKEN_ID=VALUE, for example 42=-100.')
        refuse_outside("--logit-bias", int(token_id), 0, INT32_MAX)
        sampling.logit_bias[int(token_id)] = value
    for token in stop_tokens:
        refuse_outside("--stop-token", token, 0, INT32_MAX)
        sampling.stop_token_ids.append(token)


GUIDE_BYTES_MAX: Final = 65_536
"""Longest guide that the mesh takes."""


def put_guide(sampling: pb.Sampling, json_schema: str, regex: str) -> None:
    """Put a guide into `sampling`. Raises BadOption for two guides, and for a file that cannot be read."""
    if json_schema and regex:
        raise BadOption("--json-schema and --regex: one of them is allowed.")
    if json_schema:
        sampling.guide.json_schema = _text("--json-schema", json_schema)
    if regex:
        sampling.guide.regex = _text("--regex", regex)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _text(option: str, given: str) -> str:
    if not given.startswith(FILE):
        refuse_bytes(option, given)
        return given
    path = Path(given.removeprefix(FILE))
    try:
        with path.open("rb") as file:
            text = file.read(GUIDE_BYTES_MAX + 1)
        if len(text) > GUIDE_BYTES_MAX:
            raise BadOption(f"{option} = {given}: {path} has more than {GUIDE_BYTES_MAX} bytes.")
        return text.decode()
    except OSError as error:
        raise BadOption(f"{option} = {given}: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise BadOption(f"{option} = {given}: {path} is not UTF-8 at byte {error.start}.") from None
