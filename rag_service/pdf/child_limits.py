"""The settings a render child needs, in the form that travels to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """`max_mib`: memory at which the parent replaces the child; the rest as in the settings."""

    max_pixels: int
    jpeg_quality: int
    crop_min_pixels: int
    crop_max_side: int
    raster_cache_mib: int
    trust_hidden_text: bool
    max_mib: int
