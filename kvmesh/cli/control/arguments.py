"""Options that the commands of the control plane share."""

from __future__ import annotations

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Override the checks that the refusal without --force names.")
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check only: print the result and what --force would override; change nothing."
    ),
]
CheckOnlyOption = Annotated[bool, typer.Option("--dry-run", help="Check only; change nothing.")]
ReasonOption = Annotated[str, typer.Option(help="Reason, for people; up to 200 characters.")]
RolloutArgument = Annotated[
    str,
    typer.Argument(help="Id of a rollout; default: the running one, else the last one.", metavar="[ROLLOUT]"),
]
ProcessArgument = Annotated[
    str, typer.Argument(help="Name of a process, as `kvmesh replicas list` shows it.", metavar="NAME")
]
