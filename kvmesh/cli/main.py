"""The console script `kvmesh`: reads the command line, runs the command, prints each mistake as one sentence.

Exit status: 0 done, 1 the mesh or the request failed, 2 the command or the
configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvmesh import __version__
from kvmesh.bad_option import BadOption
from kvmesh.cli.conformance_command import conformance
from kvmesh.cli.control import replica_commands
from kvmesh.cli.control.event_commands import events
from kvmesh.cli.control.profile_commands import profile
from kvmesh.cli.control.region_commands import region
from kvmesh.cli.control.rollout_commands import rollout
from kvmesh.cli.control.shadow_commands import shadow
from kvmesh.cli.control.snapshot_commands import freeze, snapshot
from kvmesh.cli.engine_commands import engine
from kvmesh.cli.found_mesh import first_mesh
from kvmesh.cli.mesh_file import DataDirUnusable, MeshBusy, NoMesh, read_meshes
from kvmesh.cli.options import (
    AuthorityOption,
    CertificateOption,
    ConfigOption,
    DataDirOption,
    PrivateKeyOption,
    ServerNameOption,
    data_dir_of,
    refuse_bytes,
    refuse_outside,
    settings_given,
    settings_of,
)
from kvmesh.cli.processes import PortInUse
from kvmesh.cli.redis_choice import named_redis, with_redis
from kvmesh.cli.replica_commands import replicas
from kvmesh.cli.sampling_options import (
    FrequencyPenaltyOption,
    IgnoreEosOption,
    JsonSchemaOption,
    LogitBiasOption,
    MinTokensOption,
    PresencePenaltyOption,
    RegexOption,
    RepetitionPenaltyOption,
    StopTokenOption,
    TopLogprobsOption,
    put_guide,
    put_ids,
)
from kvmesh.cli.tenant_commands import tenants
from kvmesh.config import RUNTIME_MAX_S, ConfigError, describe
from kvmesh.redis_binary import RedisMissing
from kvmesh.redis_url import VARIABLE

app = typer.Typer(
    help="Serve large language models behind one gRPC API.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


MISTAKES: Final = (*(BadOption, ConfigError, DataDirUnusable, MeshBusy, NoMesh, PortInUse, RedisMissing),)
"""Mistakes that the operator can correct: one sentence, exit status 2."""

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write that only the operator can correct."""

API_KEY: Final = "KVMESH_API_KEY"
"""Environment variable with the API key. Other users of the machine can read arguments, but not the environment."""

DEADLINE_S_MIN: Final = 0.001
INT32_MAX: Final = (1 << 31) - 1
UINT64_MAX: Final = (1 << 64) - 1
"""Ranges of the request's fields. The frontend checks every narrower limit."""
app.add_typer(tenants, name="tenants")
app.add_typer(replicas, name="replicas")
app.add_typer(region, name="region")
app.add_typer(rollout, name="rollout")
app.add_typer(shadow, name="shadow")
app.add_typer(snapshot, name="snapshot")
app.add_typer(profile, name="profile")
app.add_typer(engine, name="engine")
replica_commands.add_to(replicas)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        try:
            app(args=None if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()
    except MISTAKES as mistake:
        sys.stderr.write(f"{mistake}\n")
        sys.exit(2)
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EPIPE):
            raise
        _give_stdout_up()
        if error.errno != errno.EPIPE:  # a closed pipe is not an error: the reader has enough
            sys.stderr.write(f"Cannot write the output: {error.strerror}.\n")
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvmesh {__version__}\n")
        raise typer.Exit


@app.callback()
def _of_every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve large language models behind one gRPC API."""


@app.command()
def up(
    regions: Annotated[
        str,
        typer.Option(
            help="Start a small mesh for each of these regions, with commas: eu,us. Each has its own Redis."
        ),
    ] = "",
    restart: Annotated[
        bool, typer.Option("--restart", help="Start a process again that dies, instead of stopping the mesh.")
    ] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Start a small mesh and keep it until Ctrl-C."""
    from kvmesh.cli.up import up as run_up
    from kvmesh.cli.up_regions import up_regions

    settings = settings_given(config)
    redis = named_redis(settings, os.environ)
    if regions:
        folder = data_dir_of(settings, data_dir)
        raise typer.Exit(
            asyncio.run(up_regions(settings, regions, folder, Console(), redis, restarts=restart))
        )
    work = run_up(
        *(with_redis(settings, redis), data_dir_of(settings, data_dir), Console()),
        redis_source=redis.source,
        restarts=restart,
    )
    raise typer.Exit(asyncio.run(work))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")] = "-",
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's message.")] = False,
    system: Annotated[str, typer.Option(help="System message; implies --chat.")] = "",
    model: Annotated[str, typer.Option(help="Model to ask; default: the first one of `kvmesh models`.")] = "",
    max_output_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this probability mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends the output; may be repeated.")
    ] = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    logit_bias: LogitBiasOption = None,
    min_tokens: MinTokensOption = None,
    stop_token: StopTokenOption = None,
    ignore_eos: IgnoreEosOption = False,
    json_schema: JsonSchemaOption = "",
    regex: RegexOption = "",
    top_logprobs: TopLogprobsOption = None,
    session: Annotated[
        str,
        typer.Option(
            help="Name of the conversation, for session affinity. The mesh keeps no history: send all messages again, "
            "and the prefix cache finds their text."
        ),
    ] = "",
    deadline: Annotated[
        float,
        typer.Option(
            help="Deadline of the request in seconds.",
            show_default="the maximum runtime of its service class",
        ),
    ] = RUNTIME_MAX_S,
    explain: Annotated[bool, typer.Option("--explain", help="Show how the request was served.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every response as a JSON line.")] = False,
    address: Annotated[
        str, typer.Option(help="Frontends as host:port, with commas. Default: those of the running mesh.")
    ] = "",
    regions: Annotated[
        str,
        typer.Option(
            help="Instead of --address, frontends by region: eu=host:port,host:port;us=host:port. With --prefer."
        ),
    ] = "",
    prefer: Annotated[
        str, typer.Option(help="Home region, one of --regions. The others serve while it is lost.")
    ] = "",
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    private_key: PrivateKeyOption = None,
    server_name: ServerNameOption = "",
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Send one prompt and stream the answer. An API key is read from $KVMESH_API_KEY."""
    from kvmesh.cli import generate as command
    from kvmesh.cli.dial import Dial
    from kvmesh.cli.frontend_tls import explain_plain, frontend_tls
    from kvmesh.cli.regions_option import regions_given
    from kvmesh.inference.v1 import inference_pb2 as inference
    from kvmesh.server import channel

    for option, text in (
        ("--system", system),
        ("--session", session),
        ("--model", model),
        *(("--stop", one) for one in stop or ()),
    ):
        refuse_bytes(option, text)
    refuse_outside("--deadline", deadline, DEADLINE_S_MIN, RUNTIME_MAX_S, " s")
    refuse_outside("--seed", seed, 0, UINT64_MAX)
    refuse_outside("--max-output-tokens", max_output_tokens, 1, INT32_MAX, " tokens")
    refuse_outside("--top-k", top_k, -INT32_MAX, INT32_MAX)
    refuse_outside("--min-tokens", min_tokens, 0, INT32_MAX, " tokens")
    refuse_outside("--top-logprobs", top_logprobs, 0, INT32_MAX)
    text = _prompt(prompt)
    request = inference.GenerateRequest(session_id=session, model=model)
    if chat or system:
        scene = [(inference.ChatMessage.ROLE_SYSTEM, system)] if system else []
        request.chat.CopyFrom(command.chat([*scene, (inference.ChatMessage.ROLE_USER, text)]))
    else:
        request.text = text
    for name, value in (
        ("temperature", temperature),
        ("top_p", top_p),
        ("top_k", top_k),
        ("seed", seed),
        ("frequency_penalty", frequency_penalty),
        ("presence_penalty", presence_penalty),
        ("repetition_penalty", repetition_penalty),
        ("min_tokens", min_tokens),
        ("ignore_eos", ignore_eos or None),
    ):
        if value is not None:
            setattr(request.sampling, name, value)
    request.sampling.stop.extend(stop or ())
    put_ids(request.sampling, logit_bias or (), stop_token or ())
    put_guide(request.sampling, json_schema, regex)
    request.options.top_logprobs = top_logprobs or 0
    if max_output_tokens is not None:
        request.limits.max_output_tokens = max_output_tokens
    request.options.explain = explain
    if top_logprobs and not as_json:
        raise BadOption(f"--top-logprobs = {top_logprobs} needs --json, which shows them.")
    settings = settings_given(config)
    if regions and address:
        raise BadOption(f'--regions = "{regions}" and --address = "{address}": one of them is allowed.')
    if prefer and not regions:
        raise BadOption(f'--prefer = "{prefer}" needs --regions NAME=HOST:PORT;NAME=HOST:PORT.')
    by_region = regions_given(regions, prefer) if regions else None
    targets, own_region = address.split(",") if address else list[str](), ""
    names = dict[str, str]()
    open_channel: command.OpenChannel = channel
    is_addressed = bool(address or regions)
    tls = frontend_tls(authority, certificate, private_key, server_name, is_addressed=is_addressed)
    if tls is not None:
        open_channel = tls.channel
    elif not is_addressed:
        mesh = first_mesh(data_dir_of(settings, data_dir))
        targets = mesh.addresses_of("frontend")
        of_mesh = settings_of(mesh)
        own_region = of_mesh.region.name if of_mesh.regions else ""
        names = {each.address: each.name for each in mesh.processes if each.role == "frontend"}
        open_channel = partial(Dial(of_mesh).channel, role="frontend")
    work = command.generate(
        *(targets, request, deadline),
        as_json=as_json,
        open_channel=open_channel,
        key=os.environ.get(API_KEY, ""),
        regions=by_region,
        prefer=prefer,
        own_region=own_region,
        names=names,
        explain=tls.explain if tls else explain_plain if is_addressed else None,
    )
    raise typer.Exit(command.run_interruptible(work))


@app.command()
def models(
    check: Annotated[
        Path | None,
        typer.Option(help="Read this model's folder as a mesh would, and say what was found. Needs no mesh."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    address: Annotated[
        str, typer.Option(help="Frontends as host:port, with commas. Default: those of the running mesh.")
    ] = "",
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    private_key: PrivateKeyOption = None,
    server_name: ServerNameOption = "",
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the models of a mesh, or check a model's folder. An API key is read from $KVMESH_API_KEY."""
    from kvmesh.cli import models as command
    from kvmesh.cli.dial import Dial
    from kvmesh.cli.frontend_tls import explain_plain, frontend_tls
    from kvmesh.server import channel

    settings = settings_given(config)
    if check is not None:
        context, text_max = settings.engine.max_sequence_tokens, settings.frontend.message_bytes_max
        raise typer.Exit(command.check(check, context, text_max, Console(), as_json=as_json))
    targets = address.split(",") if address else list[str]()
    open_channel: command.OpenChannel = channel
    tls = frontend_tls(authority, certificate, private_key, server_name, is_addressed=bool(address))
    if tls is not None:
        open_channel = tls.channel
    elif not address:
        mesh = first_mesh(data_dir_of(settings, data_dir))
        targets = mesh.addresses_of("frontend")
        open_channel = partial(Dial(settings_of(mesh)).channel, role="frontend")
    key = os.environ.get(API_KEY, "")
    work = command.models(
        *(targets, Console()),
        open_channel=open_channel,
        key=key,
        as_json=as_json,
        explain=tls.explain if tls else explain_plain if address else None,
    )
    raise typer.Exit(command.run(work))


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print health and all metrics as JSON.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show health and load of every process of the running mesh."""
    from kvmesh.cli.dial import Dial
    from kvmesh.cli.status import status_of_all as run_status

    settings = settings_given(config)
    meshes = read_meshes(data_dir_of(settings, data_dir))
    redis_url = named_redis(settings, os.environ).url
    work = run_status(
        meshes,
        Console(),
        as_json=as_json,
        dials={region: Dial(settings_of(mesh)) for region, mesh in meshes.items()},
        redis_url=redis_url,
    )
    raise typer.Exit(asyncio.run(work))


app.command()(events)
app.command()(freeze)
app.command()(conformance)


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="host:port of a service's gRPC, or of a Triton server's.")],
    model: Annotated[str, typer.Option(help="Model that the Triton server must have loaded.")] = "",
    role: Annotated[
        str,
        typer.Option(
            help="Role of the service, required with TLS: frontend, router, prefill, decode, control or xds."
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="The mesh's kvmesh.toml, read with --role; default ./kvmesh.toml.")
    ] = None,
) -> None:
    """Ask one process whether it serves; exit status 0 if it does, else 1."""
    from kvmesh.cli.health import main as run_health

    options = (("--model", model), ("--role", role), ("--config", str(config or "")))
    raise typer.Exit(
        run_health([*(f"{option}={value}" for option, value in options if value), "--", address])
    )


@app.command(
    "replay",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def replay_trace(context: typer.Context) -> None:
    """Simulate a trace offline, to find the number of prefill replicas and compare placements."""
    from kvmesh.cli.replay import replay

    raise typer.Exit(replay(context.args))


@app.command("config")
def show_config(config: ConfigOption = None) -> None:
    """Print the configuration in force: every key, its meaning and its range."""
    settings = settings_given(config)
    sys.stdout.write(describe(with_redis(settings, named_redis(settings, os.environ))))


@app.command("certificates")
def make_certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; certificates in it are renewed.")],
    roles: Annotated[str, typer.Option(help="Roles, with commas; default: all.")] = "",
    days: Annotated[int, typer.Option(help="Lifetime of the certificates in days.")] = 30,
    config: ConfigOption = None,
) -> None:
    """Make an authority and certificates, to try mutual TLS."""
    from kvmesh.cli.certificates import certificates, section
    from kvmesh.trust.names import CERTIFICATE_ROLES

    wanted = [role.strip() for role in roles.split(",") if role.strip()] or CERTIFICATE_ROLES
    for path in certificates(folder, settings_given(config).mesh.name, wanted, days=days):
        sys.stderr.write(f"{path}\n")
    sys.stdout.write(section(folder.resolve()))


@app.command()
def demo() -> None:
    """Start a mesh, run and explain a dialogue, kill two processes in the middle of an answer, stop the mesh."""
    from kvmesh.cli.demo import run

    raise typer.Exit(run(Console(), is_redis_named=VARIABLE in os.environ))


def _give_stdout_up() -> None:
    """Discard buffered output, so that the interpreter does not write it again at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _prompt(prompt: str) -> str:
    if prompt != "-":
        refuse_bytes("The prompt", prompt)
        return prompt
    try:
        # The last line end comes from the shell and is not part of the prompt.
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadOption(
            f"The prompt on stdin is not UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from error


if __name__ == "__main__":
    main()
