"""`kvmesh models`: the models of a mesh, and the check of a model's folder before a mesh serves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.models import folder as model_folder
from kvmesh.models.folder import ModelFolder, ModelFolderError
from kvmesh.models.template_budget import TemplateError
from kvmesh.models.template_check import TemplateCheck
from kvmesh.models.tokenizer import Conversation, ModelTokenizer

OpenChannel = Callable[[str], grpc.aio.Channel]
CALL_S: Final = 5.0
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_COLUMNS: Final = (
    Column("model"),
    Column("versions", is_text=True, text_min=8),
    Column("context"),
    Column("output"),
    Column("serves"),
    Column("may use", is_text=True, text_min=16),
)
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty")
_TEXT: Final = "Check: 12 tokens, naïve café, 東京, 🚀."


async def models(
    addresses: Sequence[str],
    console: Console,
    *,
    open_channel: OpenChannel,
    key: str = "",
    as_json: bool = False,
    explain: Callable[[str], Awaitable[str]] | None = None,
) -> int:
    """Print the models that the first frontend that answers knows. Returns the exit status.

    `explain` returns the TLS fault of an address that does not answer, or an empty text.
    """
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    fault = "no frontend is known"
    for address in addresses:
        try:
            async with open_channel(address) as channel:
                stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
                found = await stub.ListModels(pb.ListModelsRequest(), timeout=CALL_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            found_fault = await explain(address) if explain and error.code() is _UNAVAILABLE else ""
            fault = f"{address}: {found_fault or from_rpc_error(error).message or error.code().name}"
            continue
        _show(found, console, as_json=as_json)
        return 0
    Console(stderr=True).print(f"No frontend answers: {fault}.", markup=False, soft_wrap=True)
    return 1


def _show(found: pb.ListModelsResponse, console: Console, *, as_json: bool) -> None:
    if as_json:
        rows = [MessageToDict(each, preserving_proto_field_name=True) for each in found.models]
        console.file.write(json.dumps({"models": rows}, ensure_ascii=False) + "\n")
        return
    console.print(table(found))


def table(found: pb.ListModelsResponse) -> FittedTable:
    """Return the table of the models."""
    made = FittedTable(_COLUMNS, is_listed=True)
    for each in found.models:
        made.add_row(
            each.model,
            ", ".join(each.versions),
            f"{each.context_token_count:,}",
            f"{each.default_max_output_tokens:,} to {each.max_output_tokens:,}",
            "yes" if each.serving else "no",
            ", ".join(each.capabilities) or "nothing more",
        )
    return made


def check(folder: Path, context_tokens: int, text_max: int, console: Console, *, as_json: bool) -> int:
    """Read a model's folder as a frontend would, and print what was found. Returns the exit status."""
    try:
        found = _facts(model_folder.read(folder), context_tokens, text_max)
    except ModelFolderError as error:
        if as_json:
            console.file.write(json.dumps({"error": str(error)}, ensure_ascii=False) + "\n")
        else:
            Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    if as_json:
        console.file.write(json.dumps(found, ensure_ascii=False) + "\n")
        return 0
    rows = Table(show_header=False)
    for name, text in _rows(found):
        rows.add_row(name, Text(text))
    console.print(rows)
    if found["conversation"]:
        head = f"This text as a conversation of one user turn ({len(found['conversation_ids'])} tokens):"
        console.print(f"{head}\n{found['conversation']}", markup=False, highlight=False, soft_wrap=True)
    for warning in found["warnings"]:
        console.print(f"Warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _facts(folder: ModelFolder, context_tokens: int, text_max: int) -> Mapping[str, Any]:
    """Return what a frontend takes from the folder, as JSON has it. Raises ModelFolderError."""
    context = min(context_tokens, folder.context_tokens or context_tokens)
    for source in dict.fromkeys((folder.template, folder.tool_template)):
        if not source:
            continue
        with TemplateCheck.begin(source, folder.named_tokens, context, text_max) as check:
            reason = check.result()
        if reason:
            raise ModelFolderError(f"{folder.path}: the chat template is refused: {reason}.")
    tokenizer = ModelTokenizer(folder, text_max=text_max)
    rendered = ""
    warnings = []
    if not tokenizer.has_template:
        warnings.append("The folder has no chat template: the model takes texts and token ids, no messages.")
    else:
        try:
            rendered = tokenizer.render(Conversation([{"role": "user", "content": _TEXT}]))
        except TemplateError as error:
            warnings.append(f"The chat template refuses a conversation of one user turn: {error}.")
    if not tokenizer.end_token_ids:
        warnings.append("The folder names no end token: an output ends at its longest length or a stop text.")

    def named(ids: Iterable[int]) -> list[Mapping[str, Any]]:
        return [{"id": each, "token": tokenizer.token(each)} for each in ids]

    return {
        "folder": str(folder.path),
        "vocabulary": tokenizer.vocab_size,
        "detokenizer": tokenizer.decoding,
        "context": folder.context_tokens,
        "end_tokens": named(tokenizer.end_token_ids),
        "special_tokens": len(tokenizer.special_ids),
        "text_prefix": named(tokenizer.text_prefix),
        "sampling_defaults": {
            key: each for key in _DEFAULTS if (each := getattr(folder.defaults, key)) is not None
        },
        "text": _TEXT,
        "text_ids": tokenizer.encode(_TEXT),
        "conversation": tokenizer.readable(rendered) or None,
        "conversation_ids": tokenizer.encode_rendered(rendered) if rendered else None,
        "warnings": warnings,
    }


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of a folder: name, text."""

    def named(tokens: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{each['id']} {each['token']}" for each in tokens)

    defaults = found["sampling_defaults"].items()
    yield "folder", found["folder"]
    yield "vocabulary", f"{found['vocabulary']:,} tokens, {found['special_tokens']:,} of them special"
    yield "detokenizer", found["detokenizer"]
    yield "context", f"{found['context']:,} tokens" if found["context"] else "not named"
    yield "end tokens", named(found["end_tokens"]) or "none"
    yield "sampling defaults", ", ".join(f"{key} {value}" for key, value in defaults) or "none"
    yield "before a text", named(found["text_prefix"]) or "nothing"
    yield "a text", f"{found['text']} ({len(found['text_ids'])} tokens)"


def run(work: Any) -> int:
    """Run the coroutine `work` and return its exit status."""
    status: int = asyncio.run(work)
    return status
