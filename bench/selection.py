"""What `--only` of a command means: some of the names there are, by commas."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def selected(only: str, names: Iterable[str]) -> list[str]:
    """Return the names in `only`, all of `names` if it is empty. Raises typer.BadParameter for one that is not there."""
    allowed = list(names)
    chosen = [name.strip() for name in only.split(",") if name.strip()] or allowed
    unknown = [name for name in chosen if name not in allowed]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not there; allowed are {', '.join(allowed)}", param_hint="--only"
        )
    return chosen
