"""Draws the steps of a probe as an SVG plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rag_service.ocr.probe.findings import Step, with_throughput

_WIDTH, _PANEL, _LEFT, _TOP, _GAP = 640, 180, 70, 50, 40
_RIGHT = _WIDTH - 20
_CURVES = (("pages/s", "pages_per_second", "#1b6ca8"), ("p95, seconds", "p95", "#b5461f"))
_STYLE = "text{font:12px sans-serif;fill:#333}.axis{stroke:#bbb}.curve{fill:none;stroke-width:2}"


def draw(title: str, steps: Sequence[Step]) -> str:
    """Draw throughput and latency over the number in flight, on a logarithmic axis."""
    measured = with_throughput(steps)
    height = _TOP + len(_CURVES) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24">{escape(title)}, by requests in flight</text>',
    ]
    for number, (name, field, colour) in enumerate(_CURVES):
        points = [(step.in_flight, float(getattr(step, field))) for step in measured]
        parts += _panel(points, name, colour, _TOP + number * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(points: Sequence[tuple[int, float]], name: str, colour: str, top: int) -> list[str]:
    bottom = top + _PANEL
    highest = max((value for _, value in points), default=0.0) or 1.0
    widest = max(1.0, math.log2(max((count for count, _ in points), default=1)))
    placed = [
        (
            _LEFT + (_RIGHT - _LEFT) * math.log2(count) / widest,
            bottom - (_PANEL - 20) * value / highest,
        )
        for count, value in points
    ]
    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return [
        f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_RIGHT}" y2="{bottom}"/>',
        f'<line class="axis" x1="{_LEFT}" y1="{top}" x2="{_LEFT}" y2="{bottom}"/>',
        f'<text x="{_LEFT + 6}" y="{top + 10}">{escape(name)}</text>',
        f'<text x="{_LEFT - 8}" y="{top + 24}" text-anchor="end">{highest:.3g}</text>',
        f'<text x="{_LEFT - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<polyline class="curve" stroke="{colour}" points="{curve}"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed),
        *(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{count}</text>'
            for (count, _), (x, _) in zip(points, placed, strict=True)
        ),
    ]
