"""Access: with a key, without one, from a web page in a browser."""

import pytest
from pydantic import SecretStr

from rag_service.api.app import create_app
from rag_service.errors import ConfigurationError

KEY = "correct horse"
ROUTES = [
    ("GET", "/documents"),
    ("POST", "/documents"),
    ("GET", "/documents/" + "0" * 32),
    ("DELETE", "/documents/" + "0" * 32),
    ("POST", "/reprocess"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
]
WRONG = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer " + KEY + "x"},
    {"authorization": "Bearer " + KEY[:-1]},
    {"authorization": "Basic " + KEY},
    {"authorization": KEY},
    {"authorization": b"Bearer \xff\xfe"},
    {"x-api-key": KEY},
]


@pytest.fixture
def locked(start_api):
    return start_api(api={"key": SecretStr(KEY)})


def test_nothing_is_answered_without_the_key(locked):
    for method, path in ROUTES:
        for headers in WRONG:
            answer = locked.client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")


def test_everything_is_answered_with_the_key(locked):
    headers = {"authorization": f"Bearer {KEY}"}
    for method, path in ROUTES:
        assert locked.client.request(method, path, headers=headers).status_code != 401
    assert locked.client.get("/documents", headers={"authorization": f"bearer {KEY}"}).is_success


def test_liveness_needs_no_key(locked):
    assert locked.client.get("/health/live").json() == {"status": "alive"}


def test_any_host_name_is_accepted_with_a_key(locked):
    headers = {
        "authorization": f"Bearer {KEY}",
        "host": "rag.example",
        "origin": "http://x.example",
    }
    assert locked.client.get("/documents", headers=headers).is_success


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "rag.example", ""])
def test_without_a_key_it_does_not_start_on_other_addresses(settings, host):
    api = settings.api.model_copy(update={"host": host})
    with pytest.raises(ConfigurationError, match=r"api\.key.*RAG_SERVICE_API_KEY"):
        create_app(settings.model_copy(update={"api": api}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_without_a_key_it_starts_on_loopback(settings, host):
    api = settings.api.model_copy(update={"host": host})
    assert create_app(settings.model_copy(update={"api": api}))


def test_without_a_key_only_its_own_host_names_are_answered(api):
    for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
        assert api.client.get("/documents", headers={"host": f"{name}:{api.port}"}).is_success
    for host in ("rag.example", f"rag.example:{api.port}", "127.0.0.1", "localhost:1", ""):
        answer = api.client.get("/documents", headers={"host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), host
        assert "RAG_SERVICE_API_KEY" in answer.json()["detail"]


WEBHOOK = "/webhooks/runpod/a-token"


@pytest.mark.parametrize(
    ("public_url", "host"),
    [
        ("https://rag.example", "rag.example"),
        ("https://rag.example", "RAG.example"),
        ("https://rag.example:8443/rag", "rag.example:8443"),
    ],
)
def test_a_webhook_is_accepted_under_the_public_name_only(start_api, public_url, host):
    """The proxy of public_url passes the Host header on to the service on loopback."""
    api = start_api(api={"public_url": public_url})
    call = lambda path, name: api.client.post(path, headers={"host": name}, json={"id": "x"})  # noqa: E731
    assert call(WEBHOOK, host).json()["code"] == "not_found"
    assert call("/documents", host).status_code == 403
    for stranger in ("evil.example", f"{host}.evil.example", f"evil@{host}", ""):
        assert call(WEBHOOK, stranger).status_code == 403
    assert call(WEBHOOK, f"localhost:{api.port}").json()["code"] == "not_found"


def test_a_webhook_needs_a_local_name_if_no_public_url_is_set(api):
    answer = api.client.post(WEBHOOK, headers={"host": "rag.example"}, json={"id": "x"})
    assert answer.status_code == 403


def test_a_webhook_needs_no_key(locked):
    assert locked.client.post(WEBHOOK, json={"id": "x"}).json()["code"] == "not_found"


def test_without_a_key_pages_of_other_origins_are_refused(api, make_pdf):
    own = f"http://localhost:{api.port}"
    assert api.client.get("/documents", headers={"origin": own}).is_success
    for origin in (
        "http://evil.example",
        "null",
        "http://localhost:1",
        f"https://localhost:{api.port}",
    ):
        answer = api.client.post(
            "/documents", files={"file": make_pdf("a")}, headers={"origin": origin}
        )
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), origin
    assert api.client.get("/documents").json()["documents"] == []


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/"])
def test_a_browser_opens_the_docs_with_the_key_as_password(locked, path):
    refused = locked.client.get(path)
    assert refused.status_code == 401
    assert "Basic realm" in refused.headers["www-authenticate"]
    assert locked.client.get(path, auth=("any name", KEY)).status_code in (200, 307)
    assert locked.client.get(path, auth=("any name", KEY + "x")).status_code == 401
    assert locked.client.get(path, headers={"authorization": "Basic %%%"}).status_code == 401


def test_a_browsers_password_opens_nothing_else(locked):
    """A browser also sends it for a form on another site."""
    for method, path in (("GET", "/documents"), ("POST", "/reprocess"), ("GET", "/metrics")):
        answer = locked.client.request(method, path, auth=("any name", KEY))
        assert answer.status_code == 401, path
        assert "Basic" not in answer.headers["www-authenticate"]
