"""The command `kvmesh engine ...`: what an engine needs on a host with GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.bad_option import BadOption
from kvmesh.roles import ENGINE_KINDS, TENSORRT_LLM

engine = typer.Typer(help="Prepare engines for hosts with GPUs.", no_args_is_help=True)


@engine.callback()
def _of_every_command() -> None:
    """Prepare engines for hosts with GPUs."""


@engine.command()
def repository(
    config: Annotated[
        Path,
        typer.Option("--config", help="The llm.yaml: keys of TensorRT-LLM's LLM(...), and a table kvmesh."),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder to write, for tritonserver --model-repository.")],
    kind: Annotated[str, typer.Option("--engine", help="Engine kind of the model.")] = TENSORRT_LLM,
) -> None:
    """Write a model repository for tritonserver in NVIDIA's container. It needs neither kvmesh nor a mesh there."""
    writers = {name: each.repository for name, each in ENGINE_KINDS.items() if each.repository}
    if kind not in writers:
        raise BadOption(f'--engine = "{kind}" has no model repository: allowed is {", ".join(writers)}.')
    command = [sys.executable, "-m", writers[kind], "--config", str(config), "--to", str(to)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
