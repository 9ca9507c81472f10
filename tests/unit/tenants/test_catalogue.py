"""Identification of callers: random catalogues against a slow reference that looks at every table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from kvmesh.buckets.limits import Limit, Scope
from kvmesh.config import MeshConfig, build
from kvmesh.config_sections import Frontend
from kvmesh.errors import MeshError
from kvmesh.tenants.caller import Caller
from kvmesh.tenants.catalogue import Catalogue, classes_of
from kvmesh.tenants.overrides import DELETED, Override

AUTHORITY = {
    "certificate": "a.pem",
    "key": "a.key",
    "client_authority": "a.pem",
}
TRUST = {"certificate": "a.pem", "key": "a.key", "authority": "a.pem"}


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def config(**tables: Any) -> MeshConfig:
    """Return a configuration with client certificates at the frontend."""
    frontend = {**AUTHORITY, **tables.pop("frontend", {})}
    return build({"frontend": frontend, "trust": TRUST, **tables})


def reason(catalogue: Catalogue, bearer: str | None, identities: Sequence[str], named: str | None) -> str:
    """Return the reason of a refusal, or "tenant/key" of the caller."""
    try:
        caller = catalogue.identify(bearer, identities, named)
    except MeshError as error:
        assert not bearer or bearer not in str(error), "an error quotes the key"
        return error.reason
    return f"{caller.tenant.name}/{caller.key}"


def test_without_tenants_every_caller_is_the_anonymous_one() -> None:
    """A mesh without tenants needs no credentials and has no limits; times and lengths are those of the frontend."""
    catalogue = Catalogue(
        MeshConfig(frontend=Frontend(runtime_max_s=33, default_deadline_s=33, max_output_tokens_max=300))
    )
    assert not catalogue.requires_credentials
    caller = catalogue.identify("whatever", ["router.kvmesh.internal"], "acme")
    assert (caller.tenant.name, caller.account.scopes, caller.key) == ("", (), "")
    standard = caller.service_class
    assert (standard.name, standard.priority_class, standard.is_sheddable) == ("standard", 4, False)
    assert (standard.runtime_max_s, standard.default_deadline_s, standard.max_output_tokens) == (33, 33, 300)


def test_the_standard_class_may_be_configured() -> None:
    """Keys that its table leaves out take the frontend's values."""
    found = config(
        classes={"standard": {"priority_class": 2, "runtime_max_s": 30}, "long": {"runtime_max_s": 1800}}
    )
    standard = Catalogue(found).identify(None, (), None).service_class
    assert (standard.priority_class, standard.runtime_max_s, standard.default_deadline_s) == (2, 30, 30)
    assert classes_of(found)["long"].default_deadline_s == 120
    assert found.runtime_longest_s == 1800
    assert MeshConfig().runtime_longest_s == 600


def test_scopes_nest_and_those_without_limits_are_left_out() -> None:
    """Organisation, tenant, key: outermost first, all under the organisation's name."""
    catalogue = Catalogue(
        config(
            organisations={"acme": {"concurrency": 9}},
            tenants={
                "search": {"organisation": "acme", "tokens_per_min": 600, "tokens_burst": 4000},
                "mail": {"organisation": "acme"},
                "alone": {"requests_per_min": 3},
            },
            keys={
                "prod": {"tenant": "search", "sha256": hashed("k1"), "requests_per_min": 60, "burst_s": 5},
                "mail": {"tenant": "mail", "sha256": hashed("k2")},
                "alone": {"tenant": "alone", "sha256": hashed("k3")},
            },
        )
    )
    account = catalogue.identify("k1", (), None).account
    assert account.organisation == "acme"
    assert account.scopes == (
        Scope("organisation:acme", Limit(concurrency=9)),
        Scope("tenant:search", Limit(tokens_per_min=600, tokens_burst=4000, tokens_overrun=8000)),
        Scope("key:prod", Limit(requests_per_min=60, requests_burst=5)),
    )
    assert [each.name for each in catalogue.identify("k2", (), None).account.scopes] == ["organisation:acme"]
    alone = catalogue.identify("k3", (), None).account
    assert alone.organisation == "alone"
    assert alone.scopes == (Scope("tenant:alone", Limit(requests_per_min=3, requests_burst=1)),)


GATES = {
    "tenants": {
        "search": {"identities": ["search.acme"]},
        "edge": {"gateway_identities": ["edge.acme"]},
        "off": {"disabled": True},
    },
    "keys": {
        "search": {"tenant": "search", "sha256": hashed("the-search-key")},
        "edge": {"tenant": "edge", "sha256": hashed("the-edge-key"), "gateway": True},
        "old": {"tenant": "search", "sha256": hashed("the-old-key"), "disabled": True},
        "off": {"tenant": "off", "sha256": hashed("the-off-key")},
    },
}


@pytest.mark.parametrize(
    ("bearer", "identities", "named", "answer"),
    [
        (None, [], None, "CREDENTIALS_MISSING"),
        ("", [], None, "CREDENTIALS_UNKNOWN"),
        ("the-search-kez", [], None, "CREDENTIALS_UNKNOWN"),
        (None, ["stranger"], None, "CREDENTIALS_UNKNOWN"),
        ("the-search-key", [], None, "search/search"),
        ("the-search-key", [], "search", "search/search"),
        ("the-search-key", [], "edge", "TENANT_UNKNOWN"),
        ("the-search-key", ["edge.acme"], "edge", "TENANT_UNKNOWN"),
        ("the-old-key", [], None, "TENANT_DISABLED"),
        ("the-off-key", [], None, "TENANT_DISABLED"),
        ("wrong", ["search.acme"], None, "CREDENTIALS_UNKNOWN"),
        (None, ["stranger", "search.acme"], None, "search/"),
        (None, ["search.acme"], "edge", "TENANT_UNKNOWN"),
        (None, ["edge.acme"], "search", "search/"),
        (None, ["edge.acme"], None, "edge/"),
        ("the-edge-key", [], None, "edge/edge"),
        ("the-edge-key", [], "search", "search/"),
        ("the-edge-key", [], "nobody-there", "TENANT_UNKNOWN"),
        ("the-edge-key", [], "", "TENANT_UNKNOWN"),
        ("the-edge-key", [], "off", "TENANT_DISABLED"),
    ],
)
def test_credentials(bearer: str | None, identities: list[str], named: str | None, answer: str) -> None:
    """A key precedes a certificate. Only gateways name other tenants. A wrong key never falls back."""
    assert reason(Catalogue(config(**GATES)), bearer, identities, named) == answer


def test_a_caller_cannot_probe_for_tenants() -> None:
    """The refusals for existing and unknown tenants are identical."""
    catalogue = Catalogue(config(**GATES))
    messages = set()
    for named in ("edge", "nobody-there"):
        with pytest.raises(MeshError) as caught:
            catalogue.identify("the-search-key", (), named)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_the_anonymous_tenant_pays_for_calls_without_credentials() -> None:
    """A wrong key is still refused, because it is a mistake of the caller."""
    catalogue = Catalogue(config(**GATES, frontend={"anonymous_tenant": "search"}))
    assert reason(catalogue, None, [], None) == "search/"
    assert reason(catalogue, None, ["stranger"], None) == "search/"
    assert reason(catalogue, "wrong", [], None) == "CREDENTIALS_UNKNOWN"
    assert reason(catalogue, None, [], "edge") == "TENANT_UNKNOWN"


def random_tables(rng: random.Random) -> dict[str, Any]:
    """Return tables of a small catalogue with frequent name collisions."""
    names = ["acme", "b", "c-1", "dd", "e"]
    organisations = {name: limits(rng) for name in rng.sample(names, rng.randint(0, 2))}
    identities = [f"id-{n}.x" for n in range(8)]
    rng.shuffle(identities)
    tenants: dict[str, Any] = {}
    for name in rng.sample(names, rng.randint(1, 5)):
        tenants[name] = {
            **limits(rng),
            "organisation": rng.choice(["", *organisations]),
            "disabled": rng.random() < 0.2,
            "identities": [identities.pop()] if rng.random() < 0.4 else [],
            "gateway_identities": [identities.pop()] if identities and rng.random() < 0.2 else [],
            "weight": rng.choice([1.0, 2.5]),
        }
    keys: dict[str, Any] = {}
    for number in range(rng.randint(0, 6)):
        gateway = rng.random() < 0.3
        keys[f"k{number}"] = {
            **({} if gateway else limits(rng)),
            "tenant": rng.choice(list(tenants)),
            "sha256": hashed(f"secret-{number}"),
            "gateway": gateway,
            "disabled": rng.random() < 0.2,
        }
    anonymous = rng.choice(["", *tenants])
    return {
        "organisations": organisations,
        "tenants": tenants,
        "keys": keys,
        "frontend": {"anonymous_tenant": anonymous},
    }


def limits(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.4:
        found["requests_per_min"] = rng.choice([1.0, 600.0])
    if rng.random() < 0.4:
        found["tokens_per_min"] = 6000.0
    if rng.random() < 0.3:
        found["concurrency"] = rng.randint(1, 9)
    if found:
        found["burst_s"] = rng.choice([1.0, 10.0])
    return found


def twin(tables: dict[str, Any], bearer: str | None, identities: list[str], named: str | None) -> str:
    """Return the same answer as `reason`, by looking at every table."""
    tenant, key_name, is_gateway = "", "", False
    if bearer is not None:
        for name, key in tables["keys"].items():
            if hashed(bearer) == key["sha256"]:
                if key["disabled"]:
                    return "TENANT_DISABLED"
                tenant, key_name, is_gateway = key["tenant"], name, key["gateway"]
        if not tenant:
            return "CREDENTIALS_UNKNOWN"
    else:
        for identity in reversed(identities):
            for name, found in tables["tenants"].items():
                for kind in ("identities", "gateway_identities"):
                    if identity in found[kind]:
                        tenant, is_gateway = name, kind.startswith("gateway")
        if not tenant:
            tenant = tables["frontend"]["anonymous_tenant"]
        if not tenant:
            return "CREDENTIALS_UNKNOWN" if identities else "CREDENTIALS_MISSING"
    if named is not None and named != tenant:
        if not is_gateway:
            return "TENANT_UNKNOWN"
        if tables["tenants"][tenant]["disabled"]:
            return "TENANT_DISABLED"
        if named not in tables["tenants"]:
            return "TENANT_UNKNOWN"
        tenant, key_name = named, ""
    return "TENANT_DISABLED" if tables["tenants"][tenant]["disabled"] else f"{tenant}/{key_name}"


def test_any_catalogue_answers_like_the_reference() -> None:
    """All combinations of keys, names, gateways, disabled tables and the anonymous tenant."""
    for seed in range(100):
        rng = random.Random(seed)
        tables = random_tables(rng)
        catalogue = Catalogue(config(**tables))
        for _ in range(40):
            bearer = rng.choice([None, None, *(f"secret-{n}" for n in range(7))])
            identities = rng.sample([f"id-{n}.x" for n in range(10)], rng.choice([0, 0, 1, 2]))
            named = rng.choice([None, None, "acme", "b", "c-1", "nobody"])
            asked = (bearer, identities, named)
            assert reason(catalogue, *asked) == twin(tables, *asked), f"{seed=} {asked}"


def test_overrides_equal_the_same_configuration() -> None:
    """An override of a table gives the same catalogue as the same value in the file."""
    for seed in range(60):
        rng = random.Random(seed)
        tables = random_tables(rng)
        overrides, changed = {}, msgspec.json.decode(msgspec.json.encode(tables))
        kinds = (("organisation", "organisations"), ("tenant", "tenants"), ("key", "keys"))
        for kind, section in kinds:
            for name, table in tables[section].items():
                if rng.random() < 0.5 or table.get("gateway"):
                    continue
                changes = limits(rng)
                if kind != "organisation":
                    changes["disabled"] = rng.random() < 0.5
                overrides[f"{kind}:{name}"] = Override(version=1, changes=changes)
                changed[section][name].update(changes)
        catalogue, wanted = Catalogue(config(**tables), overrides), Catalogue(config(**changed))
        assert catalogue.problems == ()
        assert catalogue.tenants == wanted.tenants, f"{seed=}"
        for number in range(6):
            secret = f"secret-{number}"
            assert reason(catalogue, secret, [], None) == reason(wanted, secret, [], None), f"{seed=}"
            assert account(catalogue, secret) == account(wanted, secret), f"{seed=}"


def account(catalogue: Catalogue, bearer: str) -> Caller | None:
    try:
        return catalogue.identify(bearer, (), None)
    except MeshError:
        return None


def test_a_name_in_the_trust_section_is_not_a_tenant() -> None:
    """Certificates of the mesh itself belong to no tenant."""
    catalogue = Catalogue(config(**GATES))
    assert reason(catalogue, None, ["router.kvmesh.internal"], None) == "CREDENTIALS_UNKNOWN"


@pytest.mark.parametrize(
    ("is_in_file", "answer"), [(False, "CREDENTIALS_UNKNOWN"), (True, "TENANT_DISABLED")]
)
def test_a_deleted_key_identifies_no_caller(is_in_file: bool, answer: str) -> None:
    """The same at a frontend with the key in its file; the override is then one reported problem at most."""
    keys = {"k": {"tenant": "a", "sha256": hashed("kvm_x")}}
    settings = config(tenants={"a": {}}, **({"keys": keys} if is_in_file else {}))
    catalogue = Catalogue(settings, {"key:k": Override(version=1, changes=dict(DELETED))})
    assert reason(catalogue, "kvm_x", [], None) == answer
    assert len(catalogue.problems) == is_in_file


def test_a_region_enforces_its_share_of_every_limit() -> None:
    """Rates shrink, bursts stay whole, and concurrency never becomes 0, which would mean no limit."""
    limits = {"requests_per_min": 60, "tokens_per_min": 6000, "concurrency": 3}
    found = config(tenants={"search": limits}, organisations={"search": {"concurrency": 10}})
    whole = Catalogue(found).caller("search")
    part = Catalogue(found, share=0.3).caller("search")
    assert whole is not None and part is not None
    (above, limit), (part_above, part_limit) = whole.account.scopes, part.account.scopes
    assert (part_above.limit.concurrency, above.limit.concurrency) == (3, 10)
    assert part_limit.limit.requests_per_min == pytest.approx(18)
    assert part_limit.limit.tokens_per_min == pytest.approx(1800)
    assert part_limit.limit.concurrency == 1
    assert part_limit.limit.tokens_burst == limit.limit.tokens_burst
    assert part_limit.limit.requests_burst == limit.limit.requests_burst
    assert part_limit.limit.tokens_overrun == limit.limit.tokens_overrun


@pytest.mark.parametrize("regions", [2, 3, 10])
def test_shares_of_all_regions_never_let_more_run_than_the_limit_and_one_for_each(regions: int) -> None:
    """Concurrency is rounded up in each region, so N regions admit at most limit + N - 1."""
    for concurrency in range(1, 200):
        part = Limit(concurrency=concurrency).scaled(1 / regions).concurrency
        assert concurrency <= part * regions <= concurrency + regions - 1
