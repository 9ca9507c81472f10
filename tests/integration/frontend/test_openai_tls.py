"""TLS and mutual TLS of the HTTP port, by the openai package. The certificate is that of the gRPC port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.certificates import Folder
from tests.integration.frontend.conftest import Serving, serving_frontend
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.integration.frontend.test_generate import PROMPT

CLIENT = "search.acme.example"


@pytest.fixture
async def router(pool: Pool) -> AsyncIterator[str]:
    """The address of a router."""
    async with serving_router(pool, "router-0") as address:
        yield address


def client(serving: Serving, folder: Folder, certificate: str = "") -> openai.AsyncOpenAI:
    """Return a client that trusts the authority of `folder`, and shows `certificate`. It sends no key."""
    context = ssl.create_default_context(cafile=folder.files("frontend").authority)
    context.check_hostname = False
    if certificate:
        own = folder.files(certificate)
        context.load_cert_chain(own.certificate, own.key)
    return openai.AsyncOpenAI(
        base_url=f"https://{serving.http_address}/v1",
        api_key="none",
        default_headers={"Authorization": ""},
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=context),
    )


def certificate_of(folder: Folder) -> dict[str, Any]:
    files = folder.files("frontend")
    return {"certificate": files.certificate, "key": files.key}


async def ids(aio: openai.AsyncOpenAI) -> list[int]:
    answer = await aio.completions.create(
        model="reference", prompt=PROMPT, max_tokens=8, extra_body={"return_token_ids": True}
    )
    return list(getattr(answer.choices[0], "token_ids", ()))


async def test_the_certificate_of_a_client_is_its_identity(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "certificates", roles=["frontend"])
    for name in (CLIENT, "stranger.example"):
        folder.sign(name)
    files = folder.files("frontend")
    tables = {"trust": folder.section(), "tenants": {"search": {"identities": [CLIENT]}}}
    section: dict[str, Any] = {"client_authority": files.authority, **certificate_of(folder)}
    async with serving_frontend(tables=tables, **section) as made:
        async with client(made, folder, CLIENT) as aio:
            assert (await aio.models.list()).data
        async with client(made, folder, "stranger.example") as aio:
            with pytest.raises(openai.AuthenticationError) as caught:
                await aio.models.list()
            assert caught.value.code == "CREDENTIALS_UNKNOWN"
        async with client(made, folder) as aio:
            with pytest.raises(openai.APIConnectionError):
                await aio.models.list()


async def test_a_renewed_certificate_is_shown_to_the_next_connection(tmp_path: Path, router: str) -> None:
    old, new = Folder(tmp_path / "old", roles=["frontend"]), Folder(tmp_path / "new", roles=["frontend"])
    section: dict[str, Any] = certificate_of(old)
    async with serving_frontend(**section) as made, client(made, old) as aio:
        made.route([("router-0", router)])
        await made.until_up(1)
        assert await ids(aio) == oracle(PROMPT, 8)
        async with client(made, new) as trusting_new:
            with pytest.raises(openai.APIConnectionError):
                await trusting_new.models.list()
            old.take_from(new, "frontend")
            assert await ids(trusting_new) == oracle(PROMPT, 8)
        assert await ids(aio) == oracle(PROMPT, 8), "the open connection goes on"
