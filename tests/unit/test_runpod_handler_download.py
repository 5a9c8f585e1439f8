"""Documents by URL, from a real HTTPS server on loopback that counts as public here."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rag_service.config.loader import load_settings
from rag_service.errors import RagServiceError
from rag_service.runpod.job_format import UrlDocument
from workers.runpod_handler.document_download import fetch, is_public
from workers.runpod_handler.faults import (
    DigestMismatch,
    DocumentTooLarge,
    DownloadFailed,
    UrlRefused,
)

CONTENT = b"%PDF-1.7 the document"
NAME = "files.example.org"


@dataclass
class Site:
    """The server's port, its requests, and the certificate to trust."""

    port: int
    trust: ssl.SSLContext
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def document(self, path: str, *, host: str = NAME, content: bytes = CONTENT) -> UrlDocument:
        digest = hashlib.sha256(content).hexdigest()
        return UrlDocument(url=f"https://{host}:{self.port}{path}", sha256=digest)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a self-signed certificate of NAME, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "site.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def site(certificate: Path) -> Iterator[Site]:
    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append((self.path, self.headers["Host"]))
            place, _, target = self.path.partition("?")
            self.send_response({"/ok": 200, "/big": 200, "/to": 302}.get(place, 403))
            body = {"/ok": CONTENT, "/big": bytes(5000)}.get(place, b"")
            if place == "/to":
                self.send_header("Location", target)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    site = Site(server.server_port, ssl.create_default_context(cafile=str(certificate)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()


def get(site: Site, document: UrlDocument, addresses: Sequence[str] = ("127.0.0.1",)) -> bytes:
    """Fetch with NAME at these addresses; only 127.0.0.1 counts as public too."""

    async def resolve(host: str, _: int) -> Sequence[str]:
        if host == "gone.example.org":
            raise OSError("no such name")
        return list(addresses) if host == NAME else [host.strip("[]")]

    def public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return str(address) == "127.0.0.1" or is_public(address)

    handler = load_settings().handler.model_copy(update={"max_document_bytes": 1000})
    return asyncio.run(fetch(document, handler, resolve=resolve, public=public, trust=site.trust))


def test_a_document_is_fetched_under_its_name(site: Site) -> None:
    assert get(site, site.document("/ok")) == CONTENT
    assert site.asked == [("/ok", f"{NAME}:{site.port}")]


def test_a_redirect_is_followed(site: Site) -> None:
    assert get(site, site.document("/to?/ok")) == CONTENT


@pytest.mark.parametrize(
    "target", ["http://{name}/ok", "https://10.0.0.1/ok", "https://[fd00::1]/ok", "file:///etc"]
)
def test_a_redirect_is_checked_like_the_url_itself(site: Site, target: str) -> None:
    with pytest.raises(UrlRefused):
        get(site, site.document("/to?" + target.format(name=NAME)))
    assert len(site.asked) == 1


def test_the_number_of_redirects_is_limited(site: Site) -> None:
    with pytest.raises(UrlRefused, match="redirects more than 3 times"):
        get(site, site.document("/to?" + "/to?" * 5 + "/ok"))


def test_one_private_address_of_a_name_is_enough_to_refuse_it(site: Site) -> None:
    with pytest.raises(UrlRefused, match="not a public address"):
        get(site, site.document("/ok"), ["127.0.0.1", "192.168.1.7"])
    assert site.asked == []


@pytest.mark.parametrize(
    ("path", "content", "error"),
    [
        ("/big", bytes(5000), DocumentTooLarge),
        ("/ok", b"another document", DigestMismatch),
        ("/forbidden", CONTENT, DownloadFailed),
    ],
)
def test_the_downloaded_content_is_checked(
    site: Site, path: str, content: bytes, error: type[RagServiceError]
) -> None:
    with pytest.raises(error):
        get(site, site.document(path, content=content))


def test_the_certificate_must_match_the_name(site: Site) -> None:
    with pytest.raises(DownloadFailed, match="certificate"):
        get(site, site.document("/ok", host="127.0.0.1"))


def test_an_unknown_name_is_a_failed_download(site: Site) -> None:
    with pytest.raises(DownloadFailed, match="cannot be resolved"):
        get(site, site.document("/ok", host="gone.example.org"))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1"])
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fd00::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1",
        "2001:0:4136:e378:8000:63bf:f5ff:fffe",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
