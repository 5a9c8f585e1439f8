"""The part of the OpenAI chat protocol that this server supports: requests, errors, tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from workers.servers.cpu_ocr.request_picture import RequestPicture, UnreadablePicture, from_data_uri

# A free choice, as nothing is generated: the largest picture and its text fit.
MAX_MODEL_LEN = 131072
BYTES_PER_TOKEN = 4
PIXELS_PER_TOKEN = 28 * 28


class RequestRefused(Exception):
    """A request that cannot be answered, in the form of OpenAI's errors."""

    def __init__(
        self, status: int, message: str, code: str, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        }


class ImageUrl(BaseModel):
    url: str


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


MessagePart = Annotated[ImagePart | TextPart, Field(discriminator="type")]


class Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | list[MessagePart]


class ChatRequest(BaseModel):
    """The fields that the server uses; others, such as sampling parameters, are ignored."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    stream: bool | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A checked request: the picture, the token limit of its text, the tokens of the prompt."""

    picture: RequestPicture
    max_tokens: int
    prompt_tokens: int


def parse(body: bytes, model: str, max_pixels: int) -> ReadingRequest:
    """Check a request's body. Raises RequestRefused with the status and code of the fault."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise RequestRefused(400, _explain(error), "invalid_request") from error
    if request.model not in (None, model):
        raise RequestRefused(
            404, f"The model {request.model!r} is not served, only {model}.", "model_not_found"
        )
    if request.stream:
        raise RequestRefused(
            400, "Streaming is not supported: leave out `stream`.", "stream_unsupported"
        )
    parts = [p for m in request.messages if isinstance(m.content, list) for p in m.content]
    prompt = "".join(p.text for p in parts if isinstance(p, TextPart))
    picture = _picture([p.image_url.url for p in parts if isinstance(p, ImagePart)], max_pixels)
    asked = request.max_completion_tokens or request.max_tokens
    return ReadingRequest(
        picture=picture,
        max_tokens=asked or MAX_MODEL_LEN,
        prompt_tokens=count_tokens(prompt) + picture_tokens(picture),
    )


def _picture(urls: list[str], max_pixels: int) -> RequestPicture:
    if len(urls) != 1:
        what = "no picture" if not urls else f"{len(urls)} pictures"
        raise RequestRefused(
            400, f"The request contains {what}, not exactly one.", "invalid_image_count"
        )
    try:
        return from_data_uri(urls[0], max_pixels)
    except UnreadablePicture as error:
        raise RequestRefused(400, str(error), "invalid_image") from error


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else first["msg"]


def count_tokens(text: str) -> int:
    """Count the tokens of a text. Without a tokenizer, four bytes of UTF-8 are one token."""
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)


def picture_tokens(picture: RequestPicture) -> int:
    """Count the tokens of a picture as vision models do: one for each patch of 28 x 28 pixels."""
    return math.ceil(picture.width * picture.height / PIXELS_PER_TOKEN)


def cut(text: str, max_tokens: int) -> tuple[str, Literal["stop", "length"]]:
    """Cut the text to max_tokens, never within a character. Return it and the finish reason."""
    if count_tokens(text) <= max_tokens:
        return text, "stop"
    kept = text.encode()[: max_tokens * BYTES_PER_TOKEN].decode(errors="ignore")
    return kept, "length"
