"""Tables that the operator names: strict, one clear sentence per mistake, and printed in a readable form."""

from __future__ import annotations

import pytest

from kvmesh.config import ROOT, ConfigError, MeshConfig, build, describe, parse
from kvmesh.config_keys import keys, shown_key
from kvmesh.tenants.sections import TABLES, TenantTable

HASH = "0" * 64
BASE = f"""
[classes.batch]
priority_class = 1
[organisations.acme]
tokens_per_min = 100_000
[tenants.search]
organisation = "acme"
class = "batch"
[keys.prod]
tenant = "search"
sha256 = "{HASH}"
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[classes.x]\npriority_class = 8",
            "classes.x.priority_class = 8 is out of range: allowed is 0 to 7.",
        ),
        (
            "[classes.x]\npriority_clas = 8",
            "Unknown key classes.x.priority_clas: did you mean classes.x.priority_class?",
        ),
        (
            "[classes.x]\nsheddable = 1",
            "classes.x.sheddable = 1 is not true or false: allowed is true or false.",
        ),
        (
            "[classes.x]\nruntime_max_s = 3601",
            "classes.x.runtime_max_s = 3601 is out of range: allowed is 0 to 3600 s.",
        ),
        (
            "[classes.x]\nruntime_max_s = 0.01",
            "classes.x.runtime_max_s = 0.01 is out of range: allowed is 0 or 0.1 to",
        ),
        ("[classes.x]\nruntime_max_s = 30\ndefault_deadline_s = 31", "allowed are 0.1 to 30 s."),
        ("[classes.x]\ndefault_deadline_s = 601", "allowed are 0.1 to 600 s."),
        (
            "[classes.x]\nkv_headroom = 1.0",
            "classes.x.kv_headroom = 1.0 is out of range: allowed is 0 to 0.9.",
        ),
        ("[classes.X]", '[classes.X] has the invalid name "X": allowed are up to 64 of a-z, 0-9 and -.'),
        (f"[tenants.{'a' * 65}]", "has the invalid name"),
        ('[tenants."a}b"]', 'has the invalid name "a}b"'),
        ("[tenants.other]", 'has the name "other", which is a label of metrics'),
        ("[class.x]", "Unknown section [class]: did you mean [classes]?"),
        ("classes = 3", "classes = 3 is not a section: write [classes] and its keys below it."),
        (
            "[tenants]\nsearch = 3",
            "tenants.search = 3 is not a table: write [tenants.search] and its keys below it.",
        ),
        ("[keys]\nprod = 'kvm_oops'", "keys.prod = (a text) is not a table"),
        ("[tenants.x]\nclass = 'gold'", 'tenants.x.class = "gold" is unknown: allowed are standard.'),
        (
            "[tenants.x]\norganisation = 'b'",
            'tenants.x.organisation = "b" is unknown: the configuration names none',
        ),
        ("[tenants.x]\nweight = 0.0", "tenants.x.weight = 0.0 is out of range: allowed is 0.01 to 1000."),
        ("[tenants.x]\nrequests_per_min = -1", "tenants.x.requests_per_min = -1 is out of range"),
        ("[tenants.x]\ntokens_per_min = inf", "tenants.x.tokens_per_min = inf is out of range"),
        ("[tenants.x]\nconcurrency = 1.5", "tenants.x.concurrency = 1.5 is not a whole number"),
        ("[tenants.x]\ntokens_burst = 5", "tenants.x.tokens_burst = 5 without tenants.x.tokens_per_min"),
        ("[tenants.x]\ntokens_overrun = 5", "tenants.x.tokens_overrun = 5 without tenants.x.tokens_per_min"),
        (
            "[tenants.x]\ntokens_per_min = 5\ntokens_overrun = -1",
            "tenants.x.tokens_overrun = -1 is out of range",
        ),
        ("[tenants.x]\nidentities = 'a'", 'tenants.x.identities = "a" is not a list of texts in quotes'),
        ("[tenants.x]\nidentities = [3]", "tenants.x.identities = [3] is not a list of texts in quotes"),
        (
            "[tenants.x]\nidentities = ['a b']",
            'tenants.x.identities = ["a b"] is out of range: allowed is names of',
        ),
        (
            "[tenants.x]\nidentities = ['a']",
            'tenants.x.identities needs frontend.client_authority, which is ""',
        ),
        (
            f"[tenants.x]\n[keys.k]\nsha256 = '{HASH}'",
            'keys.k.tenant = "" is out of range: allowed is the NAME of',
        ),
        (
            f"[keys.k]\ntenant = 'y'\nsha256 = '{HASH}'",
            'keys.k.tenant = "y" is unknown: the configuration names none',
        ),
        (
            "[tenants.x]\n[keys.k]\ntenant = 'x'",
            'keys.k.sha256 = "" is out of range: allowed is 64 of 0-9 and a-f',
        ),
        (
            "[tenants.x]\n[keys.k]\ntenant = 'x'\nsha256 = 'kvm_oops'",
            "keys.k.sha256 = (not shown) is out of range: allowed is 64 of",
        ),
        (BASE + f"[keys.two]\ntenant = 'search'\nsha256 = '{HASH}'", "is taken by keys.prod.sha256"),
        (BASE + "gateway = true\nconcurrency = 3", "keys.prod.gateway = true beside limits of keys.prod"),
        (
            "[frontend]\nanonymous_tenant = 'x'",
            'frontend.anonymous_tenant = "x" is unknown: allowed are names of',
        ),
        (
            BASE + "[frontend]\nanonymous_tenant = 'x'",
            'frontend.anonymous_tenant = "x" is unknown: allowed are search.',
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_key_value_and_range(text: str, sentence: str) -> None:
    """The message alone is enough to correct the file."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_name_in_certificates_stands_for_one_tenant() -> None:
    """The same if one of the two is a gateway."""
    tls = {"certificate": "a", "key": "b", "client_authority": "c"}
    tenants = {"a": {"identities": ["x.y"]}, "b": {"gateway_identities": ["x.y"]}}
    trust = {"certificate": "a", "key": "b", "authority": "c"}
    with pytest.raises(
        ConfigError, match=r'tenants.b.gateway_identities = "x.y" is taken by tenants.a.identities'
    ):
        build({"frontend": tls, "trust": trust, "tenants": tenants})


def test_a_described_configuration_reads_back() -> None:
    """Every process of a mesh reads the file that `kvmesh up` wrote."""
    config = parse(BASE)
    text = describe(config)
    assert parse(text) == config
    for table in TABLES.values():
        assert f"# [{table.kind}.NAME]" in text
        for attribute, _, allowed in keys(table):
            assert f"# {shown_key(attribute)} = " in text
            assert allowed.about.endswith(".")


def test_the_example_of_the_documentation_is_accepted() -> None:
    """The example has the values that its text describes."""
    page = (ROOT / "docs" / "tenants.md").read_text(encoding="utf-8")
    config = parse(page.partition("```toml\n")[2].partition("```")[0])
    assert list(config.tenants) == ["search", "reports"]


def test_direct_construction_is_checked_like_the_file() -> None:
    """Tests and benches that build tables in code get the same refusals."""
    with pytest.raises(ConfigError, match=r"tenants\.x\.weight = 0"):
        MeshConfig(tenants={"x": TenantTable(weight=0.0)})


def test_bursts_follow_from_rates() -> None:
    """A burst is the amount of burst_s, at least one request; tokens may have a burst of their own."""
    limit = TenantTable(requests_per_min=120, tokens_per_min=120_000, burst_s=5).limit()
    assert (limit.requests_burst, limit.tokens_burst) == (10, 10_000)
    assert TenantTable(tokens_per_min=12_000).limit().tokens_burst == 4096, "room for an ordinary prompt"
    assert TenantTable(tokens_per_min=600).limit().tokens_burst == 600, "no more than a minute's"
    assert TenantTable(requests_per_min=1).limit().requests_burst == 1
    assert TenantTable(tokens_per_min=600, tokens_burst=9000).limit().tokens_burst == 9000
    assert TenantTable(tokens_per_min=600).limit().tokens_overrun == 1200, "two bursts"
    assert TenantTable(tokens_per_min=600, tokens_overrun=50).limit().tokens_overrun == 50
    assert TenantTable(requests_per_min=600).limit().tokens_overrun == 0, "nothing to overrun"
    assert TenantTable().limit().is_none
