"""Download a job's document from its URL: https and public addresses only.

The URL comes from outside, and the worker is inside a network. So every address of the host name
is checked, and the connection goes to an address that was checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import httpx

from rag_service.config.options import HandlerOptions
from rag_service.runpod.job_format import UrlDocument
from workers.runpod_handler.faults import (
    DigestMismatch,
    DocumentTooLarge,
    DownloadFailed,
    UrlRefused,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = 3
_CHUNK = 1 << 16
_READ_TIMEOUT_SECONDS = 30.0
# Addresses that translate to IPv4 ones, including private ones (RFC 6052, RFC 8215).
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return all addresses of a host name."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: Address) -> bool:
    """Return whether an address is public; an IPv4 address inside IPv6 is checked as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None:
            return is_public(inner)
        if any(address in network for network in _NAT64):
            return False
    return address.is_global and not address.is_multicast


async def fetch(
    document: UrlDocument,
    handler: HandlerOptions,
    *,
    resolve: Resolve = resolve,
    public: Callable[[Address], bool] = is_public,
    trust: ssl.SSLContext | None = None,
) -> bytes:
    """Return the document's bytes, checked by its sha256.

    Raises UrlRefused, DownloadFailed, DocumentTooLarge, DigestMismatch.
    """
    try:
        async with asyncio.timeout(handler.download_timeout):
            async with _client(trust) as client:
                data = await _follow(client, document.url, handler, resolve, public)
    except TimeoutError as error:
        limit = handler.download_timeout
        raise DownloadFailed(f"The download took longer than {limit:g} s.") from error
    except httpx.HTTPError as error:
        raise DownloadFailed(f"The download failed: {type(error).__name__} {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != document.sha256.lower():
        raise DigestMismatch(f"The content of the URL has another sha256: {found}.")
    return data


def _client(trust: ssl.SSLContext | None) -> httpx.AsyncClient:
    # No proxy from the environment: it would look the name up again.
    return httpx.AsyncClient(
        verify=trust or ssl.create_default_context(), trust_env=False, timeout=_READ_TIMEOUT_SECONDS
    )


async def _follow(
    client: httpx.AsyncClient,
    url: str,
    handler: HandlerOptions,
    resolve: Resolve,
    public: Callable[[Address], bool],
) -> bytes:
    target = httpx.URL(url)
    for _ in range(_REDIRECTS + 1):
        request = await _checked_request(client, target, resolve, public)
        response = await client.send(request, stream=True)
        try:
            if not response.has_redirect_location:
                return await _body(response, handler.max_document_bytes)
            target = target.join(response.headers["Location"])
        finally:
            await response.aclose()
    raise UrlRefused(f"The URL redirects more than {_REDIRECTS} times.")


async def _checked_request(
    client: httpx.AsyncClient,
    url: httpx.URL,
    resolve: Resolve,
    public: Callable[[Address], bool],
) -> httpx.Request:
    """Return a request to a checked address; TLS still verifies the host name."""
    if url.scheme != "https" or not url.host or url.userinfo:
        raise UrlRefused("The document's URL must be https://host/… without user information.")
    address = await _public_address(url, resolve, public)
    host = url.netloc.decode("ascii")
    return client.build_request(
        "GET",
        url.copy_with(host=address),
        headers={"Host": host, "Accept-Encoding": "identity"},
        extensions={"sni_hostname": url.raw_host.decode("ascii")},
    )


async def _public_address(
    url: httpx.URL, resolve: Resolve, public: Callable[[Address], bool]
) -> str:
    try:
        found = await resolve(url.host, url.port or 443)
    except OSError as error:
        raise DownloadFailed(f"The name {url.host} cannot be resolved: {error}") from error
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
    private = [address for address in addresses if not public(address)]
    if private or not addresses:
        raise UrlRefused(f"{url.host} is not a public address.")
    return str(addresses[0])


async def _body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the body as sent: a compressed one could grow beyond the limit."""
    if response.status_code != httpx.codes.OK:
        raise DownloadFailed(f"The URL answered HTTP {response.status_code}.")
    data = bytearray()
    async for chunk in response.aiter_raw(_CHUNK):
        data += chunk
        if len(data) > max_bytes:
            raise DocumentTooLarge(f"The content of the URL has more than {max_bytes} bytes.")
    return bytes(data)
