"""Pages of other sites do not reach a server without a key, neither by their own name nor by its name."""

from __future__ import annotations

import pytest

from speccompile import Speculator
from speccompile.errors import InvalidOption
from speccompile.serve.app import create_app
from speccompile.serve.hosts import _MACHINE_NAMES
from speccompile.serve.options import ServeOptions
from support import serving
from support.serving import Client

OPTIONS = {"allowed_hosts": ("chat.example.com", "*.example.org"), "allowed_origins": ("https://app.example.net",)}


def status(client: Client, **headers: str) -> int:
    return client.get("/v1/models", headers=headers).status_code


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST.:8000", True),
        ("127.0.0.1:9000", True),
        ("[::1]:8000", True),
        ("192.0.2.7:8000", True),
        ("speccompile:8000", True),
        ("host.docker.internal:8000", True),
        (_MACHINE_NAMES[0], True),
        (f"{_MACHINE_NAMES[0]}.local", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example/localhost", False),
        ("chat.example.com", False),
        ("", False),
    ],
)
def test_only_names_that_public_dns_does_not_have_are_the_servers_own(client: Client, host: str, allowed: bool) -> None:
    assert status(client, Host=host) == (200 if allowed else 403)
    assert client.get("/", headers={"Host": host}).status_code == (200 if allowed else 403)


def test_the_refusal_says_what_to_do(client: Client) -> None:
    error = client.get("/health", headers={"Host": "evil.example"}).json()["error"]
    assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
    error = client.get("/health", headers={"Origin": "http://evil.example"}).json()["error"]
    assert error["code"] == "origin_not_allowed" and "--allowed-origins" in error["message"]


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("localhost:8000", "https://localhost:8000", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://evil.example", False),
        ("localhost:8000", "null", False),
    ],
)
def test_only_pages_of_the_server_itself_may_use_it(client: Client, host: str, origin: str, allowed: bool) -> None:
    assert status(client, Host=host, Origin=origin) == (200 if allowed else 403)


def test_further_names_and_sites_are_options(spec: Speculator) -> None:
    client = Client(serving.service(spec, **OPTIONS))
    for host, expected in (
        ("chat.example.com:8000", 200),
        ("a.example.org", 200),
        ("example.org", 403),
        ("evilexample.org", 403),
        ("localhost", 200),
    ):
        assert status(client, Host=host) == expected, host
    site = OPTIONS["allowed_origins"][0]
    answer = client.get("/v1/models", headers={"Origin": site})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == site
    assert status(client, Origin="https://other.example.net") == 403
    every = Client(serving.service(spec, allowed_hosts=("*",), allowed_origins=("*",)))
    assert status(every, Host="evil.example", Origin="http://any.example") == 200


def test_the_address_that_it_listens_on_is_its_name(spec: Speculator) -> None:
    client = Client(serving.service(spec))
    client.app = create_app(client.service, "gpu.example.com")
    assert status(client, Host="gpu.example.com:8000") == 200 and status(client, Host="evil.example") == 403


def test_a_key_is_enough_and_a_site_may_ask_without_it_whether_it_may_send_it(spec: Speculator) -> None:
    client = Client(serving.service(spec, api_key="secret", allowed_origins=("https://app.example.net",)))
    key = {"Authorization": "Bearer secret"}
    assert status(client, Host="evil.example", Origin="https://evil.example", **key) == 200
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    own = {"Origin": "https://app.example.net", "X-Request-ID": "a-1"}
    answer = client.call("OPTIONS", "/v1/completions", headers=own | asked)
    assert answer.headers["x-request-id"] == "a-1"
    assert answer.status_code == 200 and "authorization" in answer.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_hosts", ("http://a.example",)),
        ("allowed_hosts", ("a.example:80",)),
        ("allowed_hosts", ("",)),
        ("allowed_origins", ("a.example",)),
        ("allowed_origins", ("http://a.example/",)),
    ],
)
def test_a_name_or_a_site_that_cannot_come_is_refused(name: str, value: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOption, match=name):
        ServeOptions(**{name: value})
