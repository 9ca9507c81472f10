"""Output of the commands, and their exit status: 0 done, 1 failed or refused, 130 interrupted."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Iterable
from datetime import UTC, datetime
from typing import Any, Final

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import RenderableType

from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.fitted_table import output_console

INTERRUPTED: Final = 130
"""The usual exit status after Ctrl-C."""


def run(work: Coroutine[Any, Any, int], *, as_json: bool) -> None:
    """Run a command and exit with its status. A failure is printed as sentences, with --json also as an object.

    The command prints its own errors, so warnings of RedisLink are muted.
    """
    logging.disable(logging.WARNING)
    try:
        status = asyncio.run(work)
    except ControlFailed as failed:
        if as_json:
            print_json({"error": {"sentences": failed.sentences, **failed.details}})
        for sentence in failed.sentences:
            say(sentence)
        status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)
    raise typer.Exit(status)


def say(text: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(f"{text}\n")


def print_json(value: Any) -> None:
    """Print `value` as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def as_dict(message: Message) -> dict[str, Any]:
    """Return `message` with every field by its name in the proto, also those with their default."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def show(*parts: RenderableType) -> None:
    """Print tables and lines to stdout, without markup. A line is not broken at the width of the terminal."""
    console = output_console()
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def say_overridden(checks: Iterable[str], *, is_forced: bool) -> None:
    """Print each check that --force overrode, or would override."""
    for check in checks:
        say(f"{'Overridden by --force' if is_forced else '--force would override'}: {check.rstrip('.')}.")


def local_time(at: Timestamp) -> str:
    """Return a time for tables, in the time zone of this machine; "-" without one."""
    return f"{datetime.fromtimestamp(at.seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}" if at.seconds else "-"
