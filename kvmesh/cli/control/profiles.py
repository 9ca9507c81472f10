"""`kvmesh profile`: packages that warm replicas up, and registered prefixes. No command prints tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from kvmesh.attach.frames import pack_ids
from kvmesh.bad_option import BadOption
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.output import as_dict, local_time, print_json, say, show
from kvmesh.cli.fitted_table import NONE, Column, FittedTable
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.config import MeshConfig
from kvmesh.control.v1 import warm_up_pb2 as pb
from kvmesh.pools import version_names, version_settings
from kvmesh.tokenizer_digest import TOKENIZER_FILE

TOKENS_MAX: Final = 16_384
"""Tokens of a registered prefix."""

FILE_BYTES_MAX: Final = 4 << 20

NO_PACKAGES: Final = "There is no package yet: the first one is made once a pool has served for a minute."

_PROFILES: Final = (
    Column("package"),
    Column("version", rank=2),
    Column("role", rank=1),
    Column("made", rank=3),
    Column("shapes", justify="right"),
    Column("hashes", rank=5, justify="right"),
    Column("prefixes", rank=4, justify="right"),
    Column("golden", rank=6),
    Column("quarantined", is_text=True, is_rare=True),
)
_PREFIXES: Final = (
    Column("prefix"),
    Column("version"),
    Column("tokens", justify="right"),
    Column("by", rank=1),
    Column("registered", rank=2),
)


async def list_profiles(mesh: FoundMesh, *, as_json: bool) -> int:
    """Print all packages. Return 1 if one that is stored cannot be used."""
    found = await _profiles(mesh)
    if as_json:
        print_json(as_dict(found))
    else:
        show(_profiles_table(found.profiles) if found.profiles else NO_PACKAGES)
        for name, reason in sorted(found.problems.items()):
            say(f'The stored package "{name}" is not used: {reason}.')
    return 1 if found.problems else 0


async def show_profile(mesh: FoundMesh, name: str, *, as_json: bool) -> int:
    """Print one package with its shapes. Raises BadOption for an unknown name."""
    found = await _profiles(mesh)
    profile = next((each for each in found.profiles if each.name == name), None)
    if profile is None:
        names = ", ".join(f'"{each.name}"' for each in found.profiles)
        known = f"allowed are {names}" if names else "there is none yet"
        raise BadOption(f'NAME = "{name}" is no package: {known}.')
    if as_json:
        print_json(as_dict(profile))
        return 0
    prompts = [str(each.prompt_tokens) for each in profile.shapes if each.batch == 1]
    batches = [str(each.batch) for each in profile.shapes if each.batch > 1]
    show(
        _profiles_table([profile]),
        f"Prompt lengths: {', '.join(prompts) or NONE}",
        f"Batch sizes: {', '.join(batches) or NONE}",
        f"Made from the work of the pool {profile.made_from}, revision {profile.revision}.",
        f"Tokens are kept of {profile.prefix_count} prefixes, {profile.prefix_token_count} tokens in all.",
    )
    return 0


async def quarantine(mesh: FoundMesh, request: pb.QuarantineProfileRequest, *, as_json: bool) -> int:
    """Take a package out of use, or into use again."""
    async with ControlClient(mesh) as client:
        answer = await client.write("QuarantineProfile", request, "kvmesh profile list")
    if as_json:
        print_json(as_dict(answer))
        return 0
    would = "would be" if request.validate_only else "is"
    done = f"{would} in use again" if request.lift else f"{would} quarantined: fresh replicas go without it"
    show(f"{request.name} {done}.")
    return 0


async def add_prefix(
    mesh: FoundMesh, request: pb.AddPrefixRequest, block_tokens: int, *, as_json: bool
) -> int:
    """Register a prefix. `block_tokens`: tokens of a KV block of its version."""
    async with ControlClient(mesh) as client:
        answer = await client.write("AddPrefix", request, "kvmesh profile prefix list")
    if as_json:
        print_json(as_dict(answer))
    else:
        done = "Would register" if request.validate_only else "Registered"
        count = answer.prefix.token_count
        show(f'{done} "{request.name}": {count} tokens of {answer.prefix.model_version}.')
        blocks = count // block_tokens
        if not blocks:
            show(f"It is shorter than a KV block of {block_tokens} tokens, so no replica caches it.")
        elif count % block_tokens:
            show(
                f"Replicas cache its first {blocks * block_tokens} tokens: full KV blocks of {block_tokens}."
            )
    return 0


async def list_prefixes(mesh: FoundMesh, *, as_json: bool) -> int:
    """Print the registered prefixes."""
    async with ControlClient(mesh) as client:
        found = await client.read("ListPrefixes", pb.ListPrefixesRequest())
    if as_json:
        print_json(as_dict(found))
    elif not found.prefixes:
        show("No prefix is registered.")
    else:
        table = FittedTable(_PREFIXES)
        for each in found.prefixes:
            table.add_row(
                each.name, each.model_version, str(each.token_count), each.by or NONE, local_time(each.at)
            )
        show(table)
    return 0


async def delete_prefix(mesh: FoundMesh, request: pb.DeletePrefixRequest, *, as_json: bool) -> int:
    """Delete a prefix. Return 1 if there was none."""
    async with ControlClient(mesh) as client:
        answer = await client.write("DeletePrefix", request, "kvmesh profile prefix list")
    if as_json:
        print_json(as_dict(answer))
    elif not answer.was_there:
        say(f'No prefix is named "{request.name}": `kvmesh profile prefix list` lists them.')
    else:
        show(f'{"Would delete" if request.validate_only else "Deleted"} "{request.name}".')
    return 0 if answer.was_there else 1


def prefix_tokens(config: MeshConfig, version: str, text: Path | None, ids: Path | None) -> tuple[str, bytes]:
    """Return the model version, and the tokens of a prefix as 32-bit little-endian integers. Raises BadOption.

    `text`: a file with the prefix as text, which the version's tokenizer encodes. `ids`: a file with a JSON list of ids.
    """
    if (text is None) == (ids is None):
        raise BadOption("Either --text or --token-ids is needed, each with a file.")
    names = version_names(config)
    if version and version not in names:
        allowed = " or ".join(f'"{name}"' for name in names)
        raise BadOption(f'--version = "{version}": allowed is {allowed}.')
    chosen = version or names[0]
    if text is not None:
        tokens = _encoded(version_settings(config, chosen).model_path / TOKENIZER_FILE, text)
    else:
        assert ids is not None
        tokens = _read_ids(ids)
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise BadOption(f"The prefix has {len(tokens)} tokens: allowed are 1 to {TOKENS_MAX}.")
    return chosen, pack_ids(tokens)


def _encoded(tokenizer: Path, text: Path) -> list[int]:
    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises plain Exception
        raise BadOption(f"{tokenizer} is not a tokenizer: {error}.") from error
    tokens: list[int] = encoder.encode(_read(text, "--text"), add_special_tokens=False).ids
    return tokens


def _read_ids(path: Path) -> list[int]:
    try:
        found = json.loads(_read(path, "--token-ids"))
    except ValueError as error:
        raise BadOption(f"--token-ids = {path} is not JSON: {error}.") from error
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 2**31 for each in found):
        raise BadOption(f"--token-ids = {path} must have a list of token ids in 0 to 2147483647.")
    return found


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise BadOption(f"{option} = {path} has over {FILE_BYTES_MAX} bytes, which is the most.")
        return data.decode()
    except OSError as error:
        raise BadOption(f"{option} = {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadOption(f"{option} = {path} is not UTF-8 text.") from error


async def _profiles(mesh: FoundMesh) -> pb.ListProfilesResponse:
    async with ControlClient(mesh) as client:
        found = await client.read("ListProfiles", pb.ListProfilesRequest())
    assert isinstance(found, pb.ListProfilesResponse)
    return found


def _profiles_table(profiles: Sequence[pb.Profile]) -> FittedTable:
    table = FittedTable(_PROFILES, "`kvmesh profile show NAME` and --json have them")
    for each in profiles:
        table.add_row(
            each.name,
            each.model_version,
            each.role,
            local_time(each.made),
            str(len(each.shapes)),
            str(each.hash_count),
            str(each.prefix_count),
            "yes" if each.has_golden else "no",
            each.quarantined or NONE,
        )
    return table
