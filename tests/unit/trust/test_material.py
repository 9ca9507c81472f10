"""Files that a peer would refuse are refused first, with one sentence; a renewal is used whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmesh.config import ConfigError
from kvmesh.trust.material import CertificateReloader, Files, Material, read
from tests.certificates import Folder

NAME = "router.kvmesh.internal"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Another authority with certificates for the same names."""
    return Folder(tmp_path_factory.mktemp("other"))


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """The mesh's authority."""
    return Folder(tmp_path / "own")


def test_good_files_are_accepted(own: Folder) -> None:
    """Matching certificate, key and authority are read, with the names and the expiry of the certificate."""
    material = read(own.files("router"), NAME)
    assert material.names == (NAME,)
    assert material.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert b"PRIVATE" in material.key and "PRIVATE" not in repr(material)
    assert material.expires_s > 1.7e9


def _no_certificate(own: Folder, other: Folder) -> None:
    (own.path / "router.pem").unlink()


def _no_authority(own: Folder, other: Folder) -> None:
    (own.path / "authority.pem").unlink()


def _key_of_another(own: Folder, other: Folder) -> None:
    (own.path / "router.key").write_bytes((own.path / "decode.key").read_bytes())


def _no_pem(own: Folder, other: Folder) -> None:
    (own.path / "router.pem").write_text("certificate")


def _empty_authority(own: Folder, other: Folder) -> None:
    (own.path / "authority.pem").write_text("")


def _cut_certificate(own: Folder, other: Folder) -> None:
    path = own.path / "router.pem"
    path.write_bytes(path.read_bytes()[:200])


def _other_authority(own: Folder, other: Folder) -> None:
    own.take_from(other, "router")


def _over(own: Folder, other: Folder) -> None:
    own.expire("router")


def _other_role(own: Folder, other: Folder) -> None:
    for suffix in ("pem", "key"):
        (own.path / f"router.{suffix}").write_bytes((own.path / f"prefill.{suffix}").read_bytes())


BAD: list[tuple[Callable[[Folder, Folder], None], str, str]] = [
    (_no_certificate, "trust.certificate", "No such file"),
    (_no_authority, "trust.authority", "No such file"),
    (_key_of_another, "trust.key", "does not belong to trust.certificate"),
    (_no_pem, "trust.certificate", "allowed are PEM files"),
    (_cut_certificate, "trust.certificate", "allowed are PEM files"),
    (_empty_authority, "trust.authority", "allowed is a PEM file"),
    (_other_authority, "trust.certificate", "is not accepted by trust.authority"),
    (_over, "trust.certificate", "expired"),
    (
        _other_role,
        "trust.certificate",
        "is for prefill.kvmesh.internal: allowed is one for router.kvmesh.internal",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "key", "words"), BAD, ids=[spoil.__name__.strip("_") for spoil, _, _ in BAD]
)
def test_files_that_a_peer_would_refuse_are_refused_with_one_sentence(
    own: Folder, other: Folder, spoil: Callable[[Folder, Folder], None], key: str, words: str
) -> None:
    """The sentence has key, path and allowed values."""
    spoil(own, other)
    with pytest.raises(ConfigError) as refused:
        read(own.files("router"), NAME)
    text = str(refused.value)
    assert key in text and words in text and str(own.path) in text
    assert text.endswith(".") and "\n" not in text


def test_an_encrypted_key_is_refused_without_a_prompt(own: Folder) -> None:
    """A process has no terminal for a prompt."""
    (own.path / "router.key").write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIHeMEkGCSqGSIb3DQEFDTA8\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    with pytest.raises(ConfigError, match="without a password"):
        read(own.files("router"), NAME)


def test_a_renewal_is_used_when_the_files_changed(own: Folder) -> None:
    """Unchanged files are not read again; renewed files are used from the next check on."""
    reloader = CertificateReloader(own.files("router"), NAME)
    before = reloader.current()
    assert reloader.current() is before
    own.renew("router")
    after = reloader.current()
    assert after.certificate != before.certificate and after is reloader.current()


@pytest.mark.parametrize(
    ("spoil", "key", "words"), BAD, ids=[spoil.__name__.strip("_") for spoil, _, _ in BAD]
)
def test_after_an_unusable_renewal_the_old_material_stays_in_use(
    own: Folder,
    other: Folder,
    spoil: Callable[[Folder, Folder], None],
    key: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason is logged once; the next good renewal is used."""
    reloader = CertificateReloader(own.files("router"), NAME)
    before = reloader.current()
    authority = (own.path / "authority.pem").read_bytes()
    spoil(own, other)
    with caplog.at_level(logging.ERROR):
        assert [reloader.current() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1 and words in caplog.text
    (own.path / "authority.pem").write_bytes(authority)
    own.renew("router")
    assert reloader.current() != before


def test_a_half_written_renewal_is_not_used(own: Folder) -> None:
    """Key and certificate are replaced one after the other; in between the old pair stays in use."""
    reloader = CertificateReloader(own.files("router"), NAME)
    before = reloader.current()
    seen: list[Material] = []
    old_certificate = (own.path / "router.pem").read_bytes()
    own.renew("router")
    new_certificate = (own.path / "router.pem").read_bytes()
    (own.path / "router.pem").write_bytes(old_certificate)
    seen.append(reloader.current())
    (own.path / "router.pem").write_bytes(new_certificate)
    seen.append(reloader.current())
    assert seen[0] == before and seen[1].certificate == new_certificate


def test_files_swapped_by_a_link_are_detected(own: Folder, tmp_path: Path) -> None:
    """Mounted secrets are renewed by changing a link."""
    first, second = tmp_path / "first", Folder(tmp_path / "second")
    own.path.rename(first)
    link = tmp_path / "current"
    link.symlink_to(first)
    files = Files(*(str(link / name) for name in ("router.pem", "router.key", "authority.pem")))
    reloader = CertificateReloader(files, NAME)
    before = reloader.current()
    (tmp_path / "next").symlink_to(second.path)
    (tmp_path / "next").replace(link)
    assert reloader.current().authority != before.authority
