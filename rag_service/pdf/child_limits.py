"""The settings that a render child needs, as they are passed to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """`max_mib`: the most resident memory; the others as in PdfOptions."""

    max_pixels: int
    jpeg_quality: int
    crop_min_pixels: int
    crop_max_side: int
    raster_cache_mib: int
    trust_hidden_text: bool
    max_mib: int
