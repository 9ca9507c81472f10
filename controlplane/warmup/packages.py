"""Packages: what warms a replica of one version, role and engine build up. Pure.

A package has shapes, golden tokens and hashes of hot prefixes. It has token ids only of prefixes that an operator
registered, or that at least TENANTS_MIN tenants sent: no prompt of a user is written down. A package is input that may
crash its consumer. So it is checked when it is read, and quarantined after boots of two replicas ended with it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

import msgspec
import xxhash

from controlplane.rollouts.document import DOCUMENT_BYTES_MAX
from controlplane.warmup.jobs import Shape
from controlplane.warmup.references import ReferenceKey, Tokens
from kvmesh.attach.frames import pack_ids
from kvmesh.snapshot.content import REVISION_MAX

TENANTS_MIN: Final = 5
"""Tenants that must have sent a prefix before its tokens may be kept."""

PREFIXES_MAX: Final = 64
PREFIX_TOKENS_MAX: Final = 65_536
"""Tokens of all prefixes of a package."""

TOKEN_ID_MAX: Final = (1 << 31) - 1

SHAPE_MAX: Final = (1 << 31) - 1
"""Largest length and batch of a stored shape."""

HASHES_MAX: Final = 4096

PACKAGE_BYTES_MAX: Final = DOCUMENT_BYTES_MAX
"""The store reads no larger document."""

STALE_S: Final = 86_400.0
"""A package that is older is not used."""

MADE_MAX_S: Final = 253_402_300_799.0
"""Latest Unix time of a package: the end of the year 9999, as in protobuf's Timestamp."""

TEXT_CHARACTERS_MAX: Final = 300
"""Longest version, digest, pool and reason."""

PACKAGES_MAX: Final = 64
"""Packages that are kept. Those of the future are dropped first, then those that were made earliest."""

WallClock: TypeAlias = Callable[[], float]
"""Returns Unix time in seconds."""

FORMAT: Final = 1
"""Version of the form. A package of another one is not used."""


class PackageError(ValueError):
    """A package cannot be used. The text names the field, the value and the allowed range."""


class ShapeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shape, as it is stored."""

    prompt_tokens: int
    batch: int = 1


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Unknown keys are ignored, because a later release may write more."""

    name: str
    """Name: version, role and a digest of version, role and engine build."""
    revision: int = 1
    form: int = FORMAT
    model_version: str = ""
    role: str = ""
    engine_digest: str = ""
    made_s: float = 0.0
    """Unix time at which it was made."""
    made_from: str = ""
    """Pool whose work it describes."""
    shapes: tuple[ShapeRow, ...] = ()
    hashes: tuple[int, ...] = ()
    """Hashes of the last block of hot prefixes, the heaviest first. They cannot be turned into tokens."""
    prefixes: tuple[tuple[int, ...], ...] = ()
    """Token ids of registered prefixes, and of those that at least TENANTS_MIN tenants sent."""
    golden: Tokens = ()
    """Golden tokens of the version: synthetic prompts, so no user's."""
    quarantined: str = ""
    """Reason of the quarantine. Empty: it may be used."""

    def __repr__(self) -> str:
        return f"Package({self.name}, revision {self.revision}, {len(self.shapes)} shapes, {len(self.prefixes)} prefixes)"

    @property
    def key(self) -> ReferenceKey:
        """Version and engine build."""
        return ReferenceKey(self.model_version, self.engine_digest)

    def token_prefixes(self) -> tuple[bytes, ...]:
        """Return the prefixes as 32-bit little-endian token ids."""
        return tuple(pack_ids(ids) for ids in self.prefixes)

    def shape_list(self) -> tuple[Shape, ...]:
        """Return the shapes."""
        return tuple(Shape(each.prompt_tokens, each.batch) for each in self.shapes)


NO_PACKAGE: Final = Package(name="")


def package_name(role: str, key: ReferenceKey) -> str:
    """Return the name of the package of a version, role and engine build."""
    digest = xxhash.xxh3_64_hexdigest("\0".join((str(FORMAT), role, *key)).encode())[:8]
    safe = "".join(each if each.isalnum() or each in "._-" else "-" for each in key.model_version)[:32]
    return f"{safe}.{role}.{digest}"


def decode(name: str, data: bytes) -> Package:
    """Return the package in `data`. Raises PackageError."""
    if len(data) > PACKAGE_BYTES_MAX:
        raise PackageError(f"the package has {len(data)} bytes; up to {PACKAGE_BYTES_MAX} are allowed")
    try:
        package = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PackageError(f"no package: {error}"[:200]) from error
    package = msgspec.structs.replace(package, quarantined=printable(package.quarantined))
    check(name, package)
    return package


def printable(text: str) -> str:
    """Return `text` without control characters, cut at TEXT_CHARACTERS_MAX."""
    return "".join("?" if unicodedata.category(each) == "Cc" else each for each in text[:TEXT_CHARACTERS_MAX])


def check(name: str, package: Package) -> None:
    """Raise PackageError unless `package` may be used under `name`."""
    wanted = package_name(package.role, package.key)
    if name != package.name or name != wanted:
        raise PackageError(
            f"name is {package.name[:64]!a}; {wanted!a} is needed for its version, role and build"
        )
    if package.form != FORMAT:
        raise PackageError(f"form is {package.form}; {FORMAT} is read here")
    if package.role not in ("prefill", "decode"):
        raise PackageError(f'role is {package.role[:16]!a}; "prefill" or "decode" is allowed')
    for field in ("model_version", "engine_digest", "made_from", "quarantined"):
        text: str = getattr(package, field)
        if text != printable(text):
            raise PackageError(f"{field} has over {TEXT_CHARACTERS_MAX} characters, or a control character")
    if len(package.prefixes) > PREFIXES_MAX:
        raise PackageError(f"prefixes has {len(package.prefixes)} entries; up to {PREFIXES_MAX} are allowed")
    if sum(map(len, package.prefixes)) > PREFIX_TOKENS_MAX:
        raise PackageError(f"prefixes has too many tokens; up to {PREFIX_TOKENS_MAX} are allowed")
    if any(not 0 <= each <= TOKEN_ID_MAX for ids in package.prefixes for each in ids):
        raise PackageError(f"prefixes has a token id out of range; 0 to {TOKEN_ID_MAX} is allowed")
    if any(not ids or any(not 0 <= each <= TOKEN_ID_MAX for each in ids) for ids in package.golden):
        raise PackageError(
            f"golden has a prompt without tokens or a token id out of range; 0 to {TOKEN_ID_MAX} is allowed"
        )
    if any(
        not 1 <= part <= SHAPE_MAX for each in package.shapes for part in (each.prompt_tokens, each.batch)
    ):
        raise PackageError(
            f"shapes has an entry out of range; 1 to {SHAPE_MAX} tokens and prompts are allowed"
        )
    if not 1 <= package.revision <= REVISION_MAX:
        raise PackageError(f"revision is {package.revision}; 1 to {REVISION_MAX} is allowed")
    if not 0.0 <= package.made_s <= MADE_MAX_S:
        raise PackageError(f"made_s is {package.made_s:g}; 0 to {MADE_MAX_S:.0f} s is allowed")
    if len(package.hashes) > HASHES_MAX or any(not 0 <= each < 2**64 for each in package.hashes):
        raise PackageError(f"hashes has over {HASHES_MAX} entries, or one that is no 64-bit number")


def encode(package: Package) -> bytes:
    """Return the package as JSON. Raises PackageError if it is too large."""
    data = msgspec.json.encode(package)
    if len(data) > PACKAGE_BYTES_MAX:
        raise PackageError(f"the package has {len(data)} bytes; up to {PACKAGE_BYTES_MAX} are allowed")
    return data


class Packages:
    """The packages that this process knows. `wall` returns Unix time."""

    def __init__(self, wall: WallClock) -> None:
        self._wall = wall
        self._packages: dict[str, Package] = {}
        self.problems: dict[str, str] = {}
        """Stored packages that cannot be used, with the reason."""

    def ordered(self) -> list[Package]:
        """Return all packages by name."""
        return [self._packages[name] for name in sorted(self._packages)]

    def named(self, name: str) -> Package | None:
        """Return a package. None: there is none of that name."""
        return self._packages.get(name)

    def usable(self, role: str, key: ReferenceKey) -> Package | None:
        """Return the package for a fresh replica. None: there is none, it is stale, or it is quarantined."""
        found = self._packages.get(package_name(role, key))
        if found is None or found.quarantined:
            return None
        age_s = self._wall() - found.made_s
        return found if -STALE_S <= age_s <= STALE_S else None

    def learn(self, stored: Mapping[str, bytes]) -> None:
        """Take the stored packages. A higher revision counts. One that cannot be read stays out, with its reason."""
        self.problems = {}
        for name, data in stored.items():
            try:
                found = decode(name, data)
            except PackageError as error:
                self.problems[name] = str(error)
                continue
            known = self._packages.get(name)
            if known is None or found.revision > known.revision:
                self._packages[name] = found
        self._trim()

    def adopt(self, package: Package) -> Package:
        """Keep `package` as the next revision of its name, and return it."""
        known = self._packages.get(package.name)
        revision = max(package.revision, known.revision + 1 if known is not None else 1)
        made = msgspec.structs.replace(package, revision=revision)
        self._packages[package.name] = made
        self._trim()
        return made

    def quarantine(self, name: str, reason: str) -> Package | None:
        """Take a package out of use; return its next revision. None: there is none of that name."""
        known = self._packages.get(name)
        if known is None:
            return None
        return self.adopt(msgspec.structs.replace(known, quarantined=printable(reason)))

    def unwritten(self, stored: Mapping[str, bytes]) -> Iterable[Package]:
        """Return the packages that `stored` lacks, or has in an earlier revision."""
        for package in self.ordered():
            data = stored.get(package.name)
            if data is None:
                yield package
                continue
            try:
                if decode(package.name, data).revision < package.revision:
                    yield package
            except PackageError:
                yield package

    def _trim(self) -> None:
        latest_s = self._wall() + STALE_S  # a later one is not used, so it goes first
        by_age = sorted(
            self._packages.values(), key=lambda each: (each.made_s <= latest_s, each.made_s, each.name)
        )
        for package in by_age[: max(0, len(by_age) - PACKAGES_MAX)]:
            del self._packages[package.name]


_decoder: Final = msgspec.json.Decoder(Package)
