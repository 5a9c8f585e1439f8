"""The types of option values, with their validation."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from rag_service.config.hosts import is_loopback
from rag_service.config.units import parse_bytes, parse_mebibytes, parse_seconds
from rag_service.states import LAYOUT_LABELS

# A larger number is a typing error: no server batches that many requests, no machine has that
# many forks.
_MAX_AT_ONCE = 1024
# sun_path holds 104 bytes on macOS and 108 on Linux, the final NUL included.
LONGEST_SOCKET_PATH = 103


def require_rising(section: str, **values: float) -> None:
    """Raise ValueError, naming the keys, if one of the values is not below the next."""
    for (low, small), (high, large) in pairwise(values.items()):
        if small >= large:
            raise ValueError(
                f"{section}.{low} ({small:g}) must be below {section}.{high} ({large:g})"
            )


def _expand_home(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) else value


def _check_count_or_auto(value: Any) -> Any:
    """Raise one error for the whole union; pydantic gives one for each member."""
    text = str(value).strip()
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= _MAX_AT_ONCE):
        return value
    raise ValueError(f"must be a whole number from 1 to {_MAX_AT_ONCE}, or auto")


def _normalise_url(url: str) -> str:
    """Return the URL without a slash at its end, so that an address has one spelling."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.port == 0:
        raise ValueError("port 0 is not valid")
    return url.rstrip("/")


def _normalise_server_url(url: str) -> str:
    """Return the URL without /v1; the server's state is stored and shown under this spelling."""
    if "@" in urlsplit(url).netloc:
        raise ValueError(
            "must contain no user and password; a bearer token belongs in GLMOCR_API_KEY"
        )
    return _normalise_url(url).removesuffix("/v1")


def _check_private_url(url: str) -> str:
    """Refuse plain HTTP beyond loopback, because tokens are sent to this address."""
    parts = urlsplit(_normalise_url(url))
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError("must begin with https:// (http:// is allowed for loopback only)")
    return url.rstrip("/")


def _check_secret_url(url: SecretStr) -> SecretStr:
    _check_private_url(url.get_secret_value())
    return url


def _check_token(token: SecretStr) -> SecretStr:
    """Refuse what no HTTP header can contain. The message does not show the token."""
    text = token.get_secret_value()
    if not (text.isascii() and text.isprintable() and text == text.strip()):
        raise ValueError("must consist of visible ASCII characters, without spaces around them")
    return token


def _check_endpoint_id(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError("must be the endpoint's id (letters and digits), not a URL or path")
    return name


def _check_socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ValueError(f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes")
    return path


def _check_label(name: str) -> str:
    if name not in LAYOUT_LABELS:
        raise ValueError(f"{name!r} is not a label; the labels are: {', '.join(LAYOUT_LABELS)}")
    return name


Folder = Annotated[Path, BeforeValidator(_expand_home)]
SocketPath = Annotated[Folder, AfterValidator(_check_socket_path)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
Mebibytes = Annotated[int, BeforeValidator(parse_mebibytes), Field(ge=1)]
Forks = Annotated[int, Field(ge=1, le=_MAX_AT_ONCE)]
CountOrAuto = Annotated[Count | Literal["auto"], BeforeValidator(_check_count_or_auto)]
Url = Annotated[str, AfterValidator(_normalise_url)]
ServerUrl = Annotated[str, AfterValidator(_normalise_server_url)]
PrivateUrl = Annotated[str, AfterValidator(_check_private_url)]
# Validated inside the secret: an error message must not show the address.
SecretPrivateUrl = Annotated[SecretStr, AfterValidator(_check_secret_url)]
# Sent in the header Authorization.
Token = Annotated[SecretStr, AfterValidator(_check_token)]
EndpointId = Annotated[str, AfterValidator(_check_endpoint_id)]
Labels = list[Annotated[str, AfterValidator(_check_label)]]
