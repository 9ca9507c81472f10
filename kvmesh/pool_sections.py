"""Configuration tables of pools and model versions, with names that the operator chooses. Pure.

Each table is checked by itself and against the others. `kvmesh.pools` resolves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from kvmesh.config_keys import NAME, NAME_WORDS, Allowed, ConfigError, Mistakes, Table, refuse_unknown_name

COSTS: Final = ("step_s", "prefill_s", "prefill_token_s", "prefill_token2_s", "block_transfer_s")
"""Keys of [engine] and of [versions.NAME] that only the hashed arithmetic uses."""

COLD: Final = ("cold_s", "cold_runs")
"""Further such keys. Engines get them only if cold_s is above 0: those of release 0.1.0 do not know the options."""

ENGINE_ADDRESSES: Final = Allowed(
    "Addresses of `external` engines (gRPC). `kvmesh up` starts a replica for each, whatever `replicas` says.",
    pattern=r"[^\s:]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}",
    words='a list of addresses such as ["10.1.0.4:8001"]',
)


POOLS_MAX: Final = 64
"""Most pools of a mesh: each snapshot lists all of them (kvmesh.snapshot.content)."""


class VersionTable(Table, frozen=True, kw_only=True):
    kind: ClassVar[str] = "versions"
    about: ClassVar[str] = (
        "A model version. Its name is part of frames, resume tokens and block hashes. Without a version, engine.salt is "
        "the name of the only one."
    )

    salt: Annotated[
        str,
        Allowed(
            "Salt of the engines of this version; empty takes engine.salt. With `hashed`, equal salts give equal tokens.",
            pattern=r"(?:\S{1,64})?",
            words="empty or 1 to 64 characters without spaces",
        ),
    ] = ""
    model: Annotated[
        str,
        Allowed(
            "Name of the model for clients; empty takes mesh.model. Versions of one model replace each other by rollouts.",
            pattern=r"(?:[A-Za-z0-9][A-Za-z0-9._/-]{0,127})?",
            words="empty or 1 to 128 letters, digits and ._/-, a letter or digit first",
        ),
    ] = ""
    model_dir: Annotated[
        str,
        Allowed(
            "Folder with tokenizer and weights; relative paths start at the repository, empty takes mesh.model_dir."
        ),
    ] = ""
    step_s: Annotated[float | None, Allowed("Absent takes engine.step_s.", 0, 10, "s")] = None
    prefill_s: Annotated[float | None, Allowed("Absent takes engine.prefill_s.", 0, 10, "s")] = None
    prefill_token_s: Annotated[float | None, Allowed("Absent takes engine.prefill_token_s.", 0, 1, "s")] = (
        None
    )
    prefill_token2_s: Annotated[float | None, Allowed("Absent takes engine.prefill_token2_s.", 0, 1, "s")] = (
        None
    )
    block_transfer_s: Annotated[float | None, Allowed("Absent takes engine.block_transfer_s.", 0, 1, "s")] = (
        None
    )
    cold_s: Annotated[float | None, Allowed("Absent takes engine.cold_s.", 0, 60, "s")] = None
    cold_runs: Annotated[int | None, Allowed("Absent takes engine.cold_runs.", 0, 100, "runs")] = None
    llm_config: Annotated[
        str, Allowed("File llm.yaml of this version's `tensorrt_llm` engines; empty takes engine.llm_config.")
    ] = ""
    faults: Annotated[
        str, Allowed("Faults of the `hashed` engines of this version, for tests; empty: none.")
    ] = ""
    golden: Annotated[
        str,
        Allowed("File with the golden token sets; relative paths start at the repository, empty: none."),
    ] = ""


class PoolTable(Table, frozen=True, kw_only=True):
    kind: ClassVar[str] = "pools"
    about: ClassVar[str] = (
        "A pool: routers, prefill and decode replicas that serve one model version together. Without a pool there is one, "
        "`default`, with router.replicas, prefill.replicas and decode.replicas."
    )

    version: Annotated[
        str,
        Allowed(
            "Model version of the pool; empty takes the only version.",
            pattern=rf"(?:{NAME})?",
            words=f"empty or the NAME of a [versions.NAME], {NAME_WORDS}",
        ),
    ] = ""
    routers: Annotated[int, Allowed("Routers of the pool that `kvmesh up` starts.", 0, 16)] = 1
    prefill: Annotated[int, Allowed("Prefill replicas of the pool that `kvmesh up` starts.", 0, 64)] = 1
    decode: Annotated[int, Allowed("Decode replicas of the pool that `kvmesh up` starts.", 0, 64)] = 1
    prefill_engines: Annotated[tuple[str, ...], ENGINE_ADDRESSES] = ()
    decode_engines: Annotated[tuple[str, ...], ENGINE_ADDRESSES] = ()


TABLES: Final[Mapping[str, type[Table]]] = {table.kind: table for table in (PoolTable, VersionTable)}


def validate(
    pools: Mapping[str, PoolTable], versions: Mapping[str, VersionTable], *, arithmetic: str
) -> None:
    """Raise ConfigError if a table is wrong, names an unknown version, or has faults that `arithmetic` does not know."""
    if len(pools) > POOLS_MAX:
        raise ConfigError(f"The configuration has {len(pools)} pools: allowed are 0 to {POOLS_MAX}.")
    given: tuple[Mapping[str, Table], ...] = (pools, versions)
    mistakes = Mistakes()
    for tables in given:
        for name, table in tables.items():
            with mistakes.noted():
                table.validate(name)
    for name, version in versions.items():
        with mistakes.noted():
            _check_version(name, version, arithmetic)
    for name, pool in pools.items():
        if pool.version or len(versions) > 1:
            with mistakes.noted():
                refuse_unknown_name(f"pools.{name}.version", pool.version, versions)
    mistakes.refuse()
    if len(versions) > 1 and not pools:
        raise ConfigError(
            f"The configuration has {len(versions)} versions ({', '.join(sorted(versions))}) and no [pools.NAME]: "
            "allowed is one version without pools."
        )


def _check_version(name: str, version: VersionTable, arithmetic: str) -> None:
    if version.faults and arithmetic != "hashed":
        raise ConfigError(
            f'versions.{name}.faults = "{version.faults}" needs engine.arithmetic = "hashed": it is "{arithmetic}", '
            "for which no faults are allowed."
        )
    if version.cold_s and arithmetic != "hashed":
        raise ConfigError(
            f'versions.{name}.cold_s = {version.cold_s:g} needs engine.arithmetic = "hashed": it is "{arithmetic}", '
            "for which allowed is 0 s."
        )
