"""`kvmesh generate`: one request, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Final, TextIO

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from kvmesh.cli.screen import ExplanationTable, attempts_table, candidates_table, reason
from kvmesh.client import Client, GenerateError, MeshUnavailable, Move, RetryPolicy
from kvmesh.config import ConfigError
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.server import channel

OpenChannel = Callable[[str], grpc.aio.Channel]
Explain = Callable[[str], Awaitable[str]]
"""Returns the TLS fault between this process and an address, or an empty text."""
NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
FRONTEND_LOST: Final = "FRONTEND_LOST"
REPLICA_LOST: Final = "REPLICA_LOST"

RETRY_POLICY: Final = RetryPolicy(first_sends_max=6, refusals_max=1, retry_after_max_s=2.0)
"""Retry policy for a user at a terminal: a full or unavailable mesh is reported soon. A stream that runs is kept longer."""

Message = tuple[inference.ChatMessage.Role.ValueType, str]


class RequestFailed(RuntimeError):
    """The mesh refused or lost the request. The text is one sentence; `details` has the same facts for programs."""

    def __init__(self, sentence: str, details: dict[str, Any]) -> None:
        super().__init__(sentence)
        self.details = details


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    finished: inference.Finished
    """Last message of the mesh, of the call that ended the answer."""
    sends: int
    """Number of sends of the request."""
    moves: tuple[Move, ...] = ()
    """Breaks of the stream, each with the frontend where it went on."""
    first_token_s: float = 0.0
    """Seconds from the first send to the first token, as the client saw them."""
    total_s: float = 0.0
    """Seconds from the first send to the end."""


def chat(messages: list[Message]) -> inference.ChatPrompt:
    """Return `messages` (role, content), oldest first, as a prompt."""
    return inference.ChatPrompt(
        messages=[inference.ChatMessage(role=role, content=content) for role, content in messages]
    )


async def stream(
    addresses: Sequence[str],
    request: inference.GenerateRequest,
    deadline_s: float,
    on_response: Callable[[inference.GenerateResponse], None],
    open_channel: OpenChannel = channel,
    key: str = "",
    regions: Mapping[str, Sequence[str]] | None = None,
    prefer: str = "",
) -> Answer:
    """Send `request` to one of the frontends, give every response to `on_response`, return the end of the answer.

    Failover: if the frontend dies, the stream continues at another frontend, and repeated messages are left out.
    `key`: API key, or empty. `regions`, `prefer`: instead of `addresses`, as for `Client`. Raises RequestFailed.
    """
    received = 0
    try:
        made = Client(
            addresses,
            regions=regions,
            prefer=prefer,
            key=key,
            retry_policy=RETRY_POLICY,
            open_channel=open_channel,
        )
        async with made as client:
            began_s = first_s = asyncio.get_running_loop().time()
            answer = client.send(request, deadline_s=deadline_s)
            started = None
            async with answer:
                async for chunk in answer:
                    if started is None:
                        started = answer.started
                        on_response(inference.GenerateResponse(started=started))
                        first_s = asyncio.get_running_loop().time()
                    tokens = inference.Tokens(
                        text=chunk.text, ids=chunk.ids, position=chunk.position, logprobs=chunk.logprobs
                    )
                    for each in chunk.top_logprobs:
                        tokens.top_logprobs.add(ids=each.keys(), logprobs=each.values())
                    received += len(chunk.ids)
                    on_response(inference.GenerateResponse(tokens=tokens))
            assert answer.finish is not None
            on_response(inference.GenerateResponse(finished=answer.finish))
            return Answer(
                answer.finish,
                answer.sends,
                tuple(answer.moves),
                first_s - began_s,
                asyncio.get_running_loop().time() - began_s,
            )
    except GenerateError as error:
        everywhere = [*addresses, *(each for found in (regions or {}).values() for each in found)]
        broke = f" The answer broke off after {received} tokens." if received else ""
        raise RequestFailed(
            _sentence(error, everywhere).rstrip(".") + "." + broke, _details_of(error)
        ) from error
    except ConfigError:
        raise  # already one sentence for the operator
    except ValueError as error:
        raise RequestFailed(f"{error}.", {"text": str(error)}) from error


async def generate(
    addresses: Sequence[str],
    request: inference.GenerateRequest,
    deadline_s: float,
    *,
    as_json: bool,
    out: TextIO = sys.stdout,
    open_channel: OpenChannel = channel,
    key: str = "",
    regions: Mapping[str, Sequence[str]] | None = None,
    prefer: str = "",
    own_region: str = "",
    names: Mapping[str, str] = NO_NAMES,
    explain: Explain | None = None,
) -> int:
    """Run one request; write text or JSON lines to `out`, everything else to stderr. Returns the exit status.

    `regions`, `prefer`: see `stream`. `own_region`: the region of `addresses`, in a mesh with several. `names`: names of
    frontends by address. `explain`: asked for the TLS fault if no frontend answers.
    """
    console = Console(stderr=True)
    started = inference.Started()
    has_text = False
    asked = inference.GenerateRequest()
    asked.CopyFrom(request)
    # The screen names replicas that were lost on the way, asked or not.
    asked.options.explain = request.options.explain or not as_json

    def on_response(response: inference.GenerateResponse) -> None:
        nonlocal has_text
        if response.HasField("started"):
            started.CopyFrom(response.started)
        if as_json:
            line = MessageToDict(response, preserving_proto_field_name=True)
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        elif response.HasField("tokens"):
            out.write(response.tokens.text)
            has_text = has_text or bool(response.tokens.text)
        out.flush()

    try:
        answer = await stream(
            *(addresses, asked, deadline_s, on_response, open_channel, key), regions=regions, prefer=prefer
        )
    except asyncio.CancelledError:
        if has_text and not as_json:
            out.write("\n")  # the next prompt of the shell gets a line of its own
            out.flush()
        console.print("Interrupted: the request is cancelled.", highlight=False, soft_wrap=True)
        raise
    except RequestFailed as failed:
        if as_json:
            out.write(json.dumps({"error": failed.details}, ensure_ascii=False) + "\n")
        elif has_text:
            out.write("\n")
        out.flush()
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        is_lost = failed.details.get("reason") == FRONTEND_LOST
        if is_lost and explain is not None:
            for fault in await _faults((*addresses, *chain(*(regions or {}).values())), explain):
                console.print(fault, markup=False, highlight=False, soft_wrap=True)
        if own_region and is_lost:
            note = f"Region {own_region} may be drained: see `kvmesh region list`. --regions names those of others as well."
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        return 1
    finished = answer.finished
    if as_json and answer.moves:
        out.write(json.dumps({"moves": [asdict(each) for each in answer.moves]}) + "\n")
    if not as_json:
        out.write("\n")
        out.flush()
        way = (*_moved(answer.moves, names), *resumed(finished.explanation.attempts))
        for note in (*way, *_notes(started, finished)):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        if request.options.explain:
            if answer.sends > 1:
                finished.explanation.time_to_first_token.FromNanoseconds(round(answer.first_token_s * 1e9))
                finished.explanation.total.FromNanoseconds(round(answer.total_s * 1e9))
            console.print(ExplanationTable([("this request", finished)]))
            attempts = attempts_table(finished)
            if attempts is not None:
                console.print(attempts)
            candidates = candidates_table(finished)
            if candidates is not None:
                console.print(candidates)
            if reason(finished):
                console.print(
                    reason(finished), markup=False, highlight=False, soft_wrap=not console.is_terminal
                )
            if answer.sends > 1:
                note = (
                    f"The client sent the request {answer.sends} times: attempts are those of the last call, "
                    "and the times to the first token and in total are the client's."
                )
                console.print(note, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    return 0


async def _faults(addresses: Sequence[str], explain: Explain) -> list[str]:
    """Return one sentence for each address with a TLS fault."""
    faults = await asyncio.gather(*map(explain, addresses))
    return [f"{address}: {fault}." for address, fault in zip(addresses, faults, strict=True) if fault]


def run_interruptible(work: Any) -> int:
    """Run the coroutine `work`. Ctrl-C cancels it and returns 130, the usual exit status of an interrupt."""
    try:
        status: int = asyncio.run(work)
    except KeyboardInterrupt:
        return 130
    return status


def _moved(moves: Sequence[Move], names: Mapping[str, str]) -> list[str]:
    """Return one sentence for each break of the stream."""
    return [
        f"{names.get(each.lost, each.lost)} was lost after {each.position} tokens; "
        f"resumed at {names.get(each.address, each.address)} after {each.pause_s:.2f} s."
        for each in moves
    ]


def resumed(attempts: Sequence[inference.AttemptExplanation]) -> list[str]:
    """Return one sentence for each attempt that went on behind tokens of another one."""
    told = []
    for before, each in pairwise(attempts):
        if each.HasField("pause") and each.start_position:
            fault = f"ended by {before.fault}" if before.fault else "was left"
            ended = "was lost" if before.fault == REPLICA_LOST else fault
            told.append(
                f"{before.decode_replica or before.router} {ended} after {each.start_position} tokens; "
                f"resumed at {each.decode_replica or each.router} after {each.pause.ToNanoseconds() / 1e9:.2f} s."
            )
    return told


def _notes(started: inference.Started, finished: inference.Finished) -> list[str]:
    """Return one sentence for each limit of the mesh that shortened a complete answer."""
    notes = []
    if started.is_output_clamped:
        limit = started.max_output_tokens
        notes.append(f"The output limit was lowered to {limit} tokens: the deadline leaves no time for more.")
    if finished.finish_reason == inference.FINISH_REASON_DEADLINE:
        notes.append(f"The answer was cut at the maximum runtime of class {started.service_class}.")
    return notes


def _sentence(error: GenerateError, addresses: Sequence[str]) -> str:
    if isinstance(error, MeshUnavailable) and error.reason == FRONTEND_LOST:
        return f"No frontend answers at {', '.join(addresses)}: {error.message}"
    retry = f" Try again in {error.retry_after_s:.3g} s." if error.retry_after_s is not None else ""
    return f"{error.reason}: {error.message}.{retry}"


def _details_of(error: GenerateError) -> dict[str, Any]:
    """Return the fields of `error` for programs, without the empty ones."""
    details = {
        "code": error.code,
        "reason": error.reason,
        "text": error.message,
        "retry_after_s": error.retry_after_s,
        "quota": error.quota,
        "violations": error.violations,
    }
    return {key: value for key, value in details.items() if value not in (None, "", {})}
