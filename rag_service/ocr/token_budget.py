"""The number of tokens that the answer about a picture may have."""

from __future__ import annotations

# docling-glm-ocr's figure for dense text, and its floor.
_TOKENS_PER_MEGAPIXEL = 2500
_LEAST = 256
# GLM-OCR sees one vision token per 28 x 28 pixels.
_PIXELS_PER_TOKEN = 28 * 28
_PROMPT_TEXT_TOKENS = 64
_SPARE = 64


def answer_budget(
    width: int, height: int, *, ceiling: int, max_model_len: int | None, token_factor: float = 1.0
) -> int:
    """Return max_tokens: by the area times `token_factor`, within the ceiling and the context."""
    pixels = width * height
    budget = max(_LEAST, int(pixels / 1e6 * _TOKENS_PER_MEGAPIXEL * token_factor))
    if max_model_len is not None:
        prompt = pixels // _PIXELS_PER_TOKEN + _PROMPT_TEXT_TOKENS
        budget = min(budget, max(_LEAST, max_model_len - prompt - _SPARE))
    return min(budget, ceiling)
