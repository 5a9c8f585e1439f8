"""Access control: the bearer key if one is set, otherwise only programs on this machine.

Without a key, Host and Origin are checked, so that no web page in a browser on this machine can
reach the service under another host name (DNS rebinding).
"""

from __future__ import annotations

import base64
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rag_service.api import problems
from rag_service.config.hosts import is_loopback
from rag_service.config.options import ApiOptions
from rag_service.errors import ConfigurationError, Forbidden, Unauthorized

OPEN_PATHS = frozenset({"/health/live"})
# The token in a webhook's path takes the place of the key.
WEBHOOKS = "/webhooks/runpod/"
# A browser cannot send a bearer key, so these read-only pages also take it as a password.
_BROWSER_PATHS = frozenset({"/", "/docs", "/openapi.json"})
_BOTH_SCHEMES = 'Bearer realm="rag_service", Basic realm="rag_service", charset="UTF-8"'
_HTTP_PORT = 80


def require_safe_binding(api: ApiOptions) -> None:
    """Raise ConfigurationError if the service would listen beyond loopback without a key."""
    if api.key is None and not is_loopback(api.host):
        raise ConfigurationError(
            f"api.host is {api.host}, which other machines can reach, but api.key is not set: "
            "set RAG_SERVICE_API_KEY, or listen on 127.0.0.1."
        )


class AccessControl:
    """Middleware: refuse a request without access before its body is read."""

    def __init__(self, app: ASGIApp, api: ApiOptions) -> None:
        self._app = app
        self._key = api.key.get_secret_value().encode() if api.key else None
        self._hosts = _own_hosts(api)
        self._webhook_hosts = self._hosts | _public_hosts(api)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path = scope["path"]
        if self._key is None:
            hosts = self._webhook_hosts if path.startswith(WEBHOOKS) else self._hosts
            return self._refuse_foreign(headers, hosts)
        if path in OPEN_PATHS or path.startswith(WEBHOOKS) or self._has_key(headers):
            return None
        if path not in _BROWSER_PATHS:
            return problems.error_response(Unauthorized())
        if self._has_password(headers):
            return None
        return problems.error_response(Unauthorized(), {"WWW-Authenticate": _BOTH_SCHEMES})

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._key or b"")
        return same and scheme.lower() == "bearer"

    def _has_password(self, headers: Headers) -> bool:
        """Return whether a browser sent the key as the password, under any name."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        try:
            _, _, password = base64.b64decode(given.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        return hmac.compare_digest(password, self._key or b"") and scheme.lower() == "basic"

    def _refuse_foreign(self, headers: Headers, hosts: frozenset[str]) -> Response | None:
        host = headers.get("host", "").lower()
        if host not in hosts:
            return _forbidden(f"The Host {host!r} is not a name of this service.")
        origin = headers.get("origin")
        if origin is not None and origin.lower().removeprefix("http://") not in self._hosts:
            return _forbidden(f"Pages of the origin {origin!r} may not use this service.")
        return None


def _forbidden(reason: str) -> Response:
    return problems.error_response(Forbidden(f"{reason} {Forbidden.default_message}"))


def _public_hosts(api: ApiOptions) -> frozenset[str]:
    """Return the host of api.public_url: RunPod's Host header, if a proxy passes it on."""
    host = urlsplit(api.public_url or "").netloc.rpartition("@")[2].lower()
    return frozenset({host} if host else ())


def _own_hosts(api: ApiOptions) -> frozenset[str]:
    configured = f"[{api.host}]" if ":" in api.host else api.host
    names = {"localhost", "127.0.0.1", "[::1]", configured.lower()}
    hosts = {f"{name}:{api.port}" for name in names}
    return frozenset(hosts | names) if api.port == _HTTP_PORT else frozenset(hosts)
