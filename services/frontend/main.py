"""Starts a frontend: config -> build -> serve -> drain."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvmesh import process, service_options
from kvmesh.config import ConfigError
from kvmesh.models.folder import ModelFolderError
from kvmesh.redis_url import BUDGETS_VARIABLE
from kvmesh.service_options import ServiceOptions
from services.frontend.assembly import Frontend
from services.frontend.surface import served_versions


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a frontend until a signal stops it; exits with an error message if it cannot start."""
    status = process.main(
        "frontend",
        lambda: service_options.parse("frontend", arguments, os.environ),
        _serve,
        (ConfigError, ModelFolderError, OSError),
    )
    sys.exit(status)


async def _serve(options: ServiceOptions) -> None:
    versions = served_versions.load(options.config)
    await Frontend(options, versions, os.environ.get(BUDGETS_VARIABLE, "")).serve()
