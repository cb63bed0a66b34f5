"""What one client can do to the others: its share of the queue, and who it is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from speccompile import Speculator
from speccompile.serve.client_names import client_names
from support import serving
from support.serving import Client

PATH = "/v1/completions"


def test_one_client_cannot_fill_the_queue(client: Client, spec: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, share = spec.engine, serving.WAITING // 2
    monkeypatch.setattr(engine.waiting, "client_limit", share)

    def connected(address: str) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app=client.app, client=(address, 1))
        return httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=120)

    async def ask() -> list[httpx2.Response]:
        async with connected("10.0.0.7") as one, connected("10.0.0.8") as other:
            body = {"prompt": "ab", "max_tokens": 1, "temperature": 0}
            with serving.no_steps(engine):
                many = asyncio.create_task(one.post(PATH, json=body | {"n": share + serving.SLOTS}))
                while len(engine.waiting) < share + serving.SLOTS:
                    await asyncio.sleep(0.001)
                refused = await one.post(PATH, json=body)
                accepted = asyncio.create_task(other.post(PATH, json=body))
                while len(engine.waiting) < share + serving.SLOTS + 1:
                    await asyncio.sleep(0.001)
            too_many = await one.post(PATH, json=body | {"n": share + serving.SLOTS + 1})
            return [await many, await accepted, refused, too_many]

    many, accepted, refused, too_many = asyncio.run(ask())
    assert (many.status_code, accepted.status_code, too_many.status_code) == (200, 200, 400)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "client_queue_full"
    assert too_many.json()["error"]["param"] == "n"
    for answer in (refused, too_many):
        assert "--max-waiting or --max-client-share" in answer.json()["error"]["message"]


def test_each_of_several_keys_is_valid_and_a_client(spec: Speculator) -> None:
    client = Client(serving.service(spec, api_key=["first", "second"]))
    for key, status in (("first", 200), ("second", 200), ("third", 401), ("first second", 401)):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize(
    ("scope", "key", "keys", "name"),
    [
        ({"client": ("10.0.0.7", 5000)}, None, [], "10.0.0.7"),
        ({"client": ("10.0.0.7", 5000)}, 0, [b"one"], "10.0.0.7"),
        ({"client": ("10.0.0.7", 5000)}, 1, [b"one", b"two"], "key 1"),
        ({"client": ("2001:db8:1:2:3::4", 5000)}, None, [], "2001:db8:1:2::/64"),
        ({"client": ("::ffff:10.0.0.7", 5000)}, None, [], "10.0.0.7"),
        ({"client": None}, None, [], "unknown"),
        ({}, None, [], "unknown"),
    ],
)
def test_a_client_is_a_key_or_an_address(scope: dict[str, Any], key: int | None, keys: list[bytes], name: str) -> None:
    first, second = client_names(scope, key, keys), client_names(scope, key, keys)
    assert first[0] == second[0] == name and first[1] != second[1]
