"""Lines over time as an SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLOURS = ("#1b6ca8", "#c7522a", "#3a7d44", "#7a4b94", "#8c8c8c")
TICKS = 5

Points = Sequence[tuple[float, float]]


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Points]) -> str:
    """An SVG of the named series over common axes from 0."""
    most_x = max((x for points in series.values() for x, _ in points), default=1.0) or 1.0
    most_y = max((y for points in series.values() for _, y in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / most_x * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, TOP - 18, title, size=14),
        _text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 10, x_name),
        _text(8, TOP - 4, y_name),
    ]
    for step in range(TICKS + 1):
        x, y = most_x * step / TICKS, most_y * step / TICKS
        across, up = place(x, 0), place(0, y)
        parts.append(f'<path d="M{LEFT} {up[1]:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(across[0] - 10, HEIGHT - BOTTOM + 16, f"{x:g}"))
        parts.append(_text(8, up[1] + 4, f"{y:.3g}"))
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 18 * number, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#222") -> str:
    shown = escape(words)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}">{shown}</text>'
