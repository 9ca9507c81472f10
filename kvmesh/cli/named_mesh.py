"""The mesh that a command works on through Redis, and the run of such a command."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import typer

from kvmesh.cli.found_mesh import found_mesh
from kvmesh.config import MeshConfig


def named_mesh(path: Path | None, data_dir: Path | None) -> tuple[MeshConfig, str]:
    """Return the configuration and the URL of Redis: those given, else those of the mesh that runs here."""
    found = found_mesh(path, data_dir, os.environ)
    return found.config, found.redis_url


def run_command(work: Coroutine[Any, Any, int]) -> None:
    """Run a command and exit with its status. The command prints its own errors, so warnings of RedisLink are muted."""
    logging.disable(logging.WARNING)
    try:
        raise typer.Exit(asyncio.run(work))
    finally:
        logging.disable(logging.NOTSET)
