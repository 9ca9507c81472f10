"""`kvmesh models`: the models of a mesh, and the check of a model's folder before a mesh serves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.models import folder as model_folder
from kvmesh.models.folder import ModelFolder, ModelFolderError
from kvmesh.models.template_budget import TemplateError
from kvmesh.models.template_check import TemplateCheck
from kvmesh.models.tokenizer import ModelTokenizer

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
    facts = Table(show_header=False)
    for name, value in found.items():
        facts.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    console.print(facts)
    return 0


def _facts(folder: ModelFolder, context_tokens: int, text_max: int) -> Mapping[str, Any]:
    """Return what a frontend takes from the folder. Raises ModelFolderError."""
    context = min(context_tokens, folder.context_tokens or context_tokens)
    for source in dict.fromkeys((folder.template, folder.tool_template)):
        if not source:
            continue
        with TemplateCheck.begin(source, folder.named_tokens, context, text_max) as check:
            reason = check.result()
        if reason:
            raise ModelFolderError(f"{folder.path}: the chat template is refused: {reason}.")
    tokenizer = ModelTokenizer(folder, text_max=text_max)
    try:
        ids = tokenizer.run_once(_TEXT)
    except TemplateError:  # the template refuses a conversation without a system turn
        ids = tokenizer.encode(_TEXT)
    defaults = folder.defaults
    given = {
        key: value
        for key in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(defaults, key)) is not None
    }
    return {
        "folder": str(folder.path),
        "vocabulary": tokenizer.vocab_size,
        "detokenizer": tokenizer.decoding,
        "context": folder.context_tokens or "not named",
        "chat template": "yes" if tokenizer.has_template else "no: the model takes texts and token ids alone",
        "end tokens": [f"{each} {tokenizer.token(each)!r}" for each in tokenizer.end_token_ids] or "none",
        "special tokens": len(tokenizer.special_ids),
        "before a text": [tokenizer.token(each) or each for each in tokenizer.text_prefix] or "nothing",
        "sampling defaults": [f"{key} {value:g}" for key, value in given.items()] or "none",
        "sample": f"{_TEXT!r}: {len(ids)} tokens",
    }


def run(work: Any) -> int:
    """Run the coroutine `work` and return its exit status."""
    status: int = asyncio.run(work)
    return status
