"""Converts pictures of pages to a model's input."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from rag_service.layout.layout_model import BadPicture

if TYPE_CHECKING:
    from rag_service.layout.layout_model import Pixels


def decode(jpeg: bytes, width: int, height: int) -> Pixels:
    """Return the JPEG stretched to width x height, in RGB. Raises BadPicture."""
    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            # The decoder itself halves pictures that are far too large, without losing sharpness.
            image.draft("RGB", (width, height))
            small = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(f"the picture cannot be read as a JPEG: {error}") from error
    return np.asarray(small)
