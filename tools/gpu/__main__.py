"""The commands: `python -m tools.gpu pack --to FILE`, `run [--cpu]`, `page RECORD --write PAGE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.gpu.python_versions import OWN_PYTHON, PYTHONS

app = typer.Typer(add_completion=False, help="Prove the mesh on a GPU host without a network.")


@app.command()
def pack(
    to: Annotated[Path, typer.Option(help="Archive to write: its name ends with .tar.xz, or with .tar.")],
    python: Annotated[str, typer.Option(help="Version of the host's Python.")] = OWN_PYTHON,
    preset: Annotated[int, typer.Option(min=0, max=9, help="Compression of .tar.xz.")] = 6,
) -> None:
    """Write the archive: Triton, Redis, the mesh and its packages."""
    from tools.gpu import archive
    from tools.gpu.distributions import Missing

    if python not in PYTHONS:
        _refuse(f'python = "{python}" is not possible: allowed is {" or ".join(PYTHONS)}')
    if to.suffixes[-2:] != [".tar", ".xz"] and to.suffix != ".tar":
        _refuse(f'to = "{to}" is not possible: allowed are names that end with .tar.xz or .tar')
    try:
        size = archive.pack(to, python, preset)
    except (Missing, OSError) as error:
        _refuse(f"cannot pack: {error}")
    commit = archive.commit()
    typer.echo(f"{to}: {size / 1e6:.0f} MB, for Python {python}, of commit {commit}")
    if commit.endswith(archive.WITH_CHANGES):
        typer.echo('Tracked files differ from that commit. So the record of a run says "with changes".')


@app.command()
def run(
    cpu: Annotated[bool, typer.Option("--cpu", help="Rehearse with the tiny shape on the CPU.")] = False,
    arithmetic: Annotated[
        str, typer.Option(help="torch, or hashed for a rehearsal without PyTorch.")
    ] = "torch",
    to: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    only: Annotated[str, typer.Option(help="Phases to run, separated by commas; empty: all.")] = "",
) -> None:
    """Start two engines, time them, check them, and measure the mesh in front."""
    from tools.gpu.host import CannotRun, ask_host, plan_for
    from tools.gpu.page import page
    from tools.gpu.proof import LIMITS_S, Proof

    if arithmetic not in ("torch", "hashed") or (arithmetic == "hashed" and not cpu):
        _refuse(f'arithmetic = "{arithmetic}" is not possible: allowed is torch, and hashed with --cpu')
    chosen = tuple(only.split(",")) if only else tuple(LIMITS_S)
    if unknown := [name for name in chosen if name not in LIMITS_S]:
        _refuse(f'only = "{unknown[0]}" is not possible: allowed are {", ".join(LIMITS_S)}')
    host = ask_host()
    try:
        plan = plan_for(host, is_cpu=cpu, arithmetic=arithmetic)
    except CannotRun as error:
        _refuse(f"cannot run: {error}")
    record = Proof(plan, host, to.resolve(), chosen).run()
    (to / "gpu-run.md").write_text(page(record), encoding="utf-8")
    typer.echo(f"results in {to}")
    if not all(phase["passed"] for phase in record["phases"].values()):
        raise typer.Exit(1)


@app.command()
def page(
    record: Annotated[Path, typer.Argument(help="The file run.json of a host.")],
    write: Annotated[Path, typer.Option(help="Page to write, and its .json beside it.")],
) -> None:
    """Write the page of a run."""
    from bench import pages
    from tools.gpu import page as made

    try:
        loaded = json.loads(record.read_text(encoding="utf-8"))
        text = made.page(loaded)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse(f"{record} is no record of a run: {error!r}")
    pages.write(
        write, pages.with_notes(text.splitlines(), pages.old(write)), json.dumps(loaded, indent=1) + "\n"
    )


def _refuse(reason: str) -> None:
    typer.echo(reason, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    sys.exit(app())
