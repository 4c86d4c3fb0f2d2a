"""Charts as inline SVG: lines, points and small intervals.

Owns scales, ticks and marks. Colours, dashes and fonts are the page's style sheet (classes ``s0`` to ``s7``), so that
one picture serves light and dark. Everything is escaped, and every chart says in words what it shows. Must not know
what is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 24, 44  # above the plot there is room for one line of text
STYLES = 8
MOST_POINTS = 400  # of a line
_MARKED = 40  # lines with at most so many points show each of them


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line; ``style`` is the number of its colour and dashes, ``points`` are (x, y), with gaps where y is None."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: int = 0
    marked: bool = True


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What the axes say; ``x_range`` and ``y_range`` are stretched to round numbers unless ``exact``."""

    x: str
    y: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("x_range", "y_range"):
            object.__setattr__(self, name, _apart(*getattr(self, name)))

    @property
    def x_ticks(self) -> list[float]:
        return ticks(*self.x_range, most=6)

    @property
    def y_ticks(self) -> list[float]:
        return ticks(*self.y_range, most=6)

    def across(self, x: float) -> float:
        low, high = self.x_range
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers between two values: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def nice(low: float, high: float) -> tuple[float, float]:
    """The range, stretched to the next round numbers."""
    low, high = _apart(low, high)
    step = ticks(low, high, most=6)
    width = step[1] - step[0] if len(step) > 1 else high - low
    return math.floor(low / width + 1e-9) * width, math.ceil(high / width - 1e-9) * width


def _apart(low: float, high: float) -> tuple[float, float]:
    """The range; around values that are equal up to rounding one that can be divided into steps."""
    size = max(1.0, abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    half = max(0.5, 1e-6 * size)
    return low - half, high + half


def line_chart(lines: Sequence[Line], axes: Axes, *, label: str, rule: tuple[float, str] | None = None) -> Markup:
    """Lines over common axes; ``rule``: a vertical line at an x, and what it marks."""
    drawn = Markup("").join(_line(line, axes) for line in lines)
    mark = Markup("") if rule is None else _rule(*rule, axes)
    return _svg(_grid(axes) + mark + drawn, label)


def point_chart(points: Sequence[tuple[float, float, float]], axes: Axes, *, label: str, line: Line | None) -> Markup:
    """Points of (x, y, radius), and a line to compare them with."""
    circle = Markup('<circle class="point" cx="{}" cy="{}" r="{}"/>')
    drawn = Markup("").join(circle.format(_at(axes.across(x)), _at(axes.up(y)), _at(radius)) for x, y, radius in points)
    compared = Markup("") if line is None else _line(line, axes)
    return _svg(_grid(axes) + compared + drawn, label)


def interval(value: float | None, low: float | None, high: float | None, *, top: float = 1.0) -> Markup:
    """A small picture of an estimate on a scale from 0; the numbers stand beside it, so it is not read aloud."""
    if value is None or low is None or high is None:
        return Markup("")
    left, right, middle = (4 + 112 * max(0.0, min(1.0, number / top)) for number in (low, high, value))
    return Markup(
        '<svg class="interval" viewBox="0 0 120 16" aria-hidden="true" focusable="false">'
        '<line class="scale" x1="4" y1="8" x2="116" y2="8"/><line class="range" x1="{0}" y1="8" x2="{1}" y2="8"/>'
        '<line class="value" x1="{2}" y1="2" x2="{2}" y2="14"/></svg>'
    ).format(_at(left), _at(right), _at(middle))


def sample(style: int) -> Markup:
    """A piece of a line, for legends."""
    return Markup(
        '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true" focusable="false">'
        '<line class="line s{}" x1="1" y1="4" x2="27" y2="4"/></svg>'
    ).format(style % STYLES)


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most ``MOST_POINTS`` of them, evenly spread, the last one among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(place * step)] for place in range(MOST_POINTS)]


def text_of(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _svg(content: Markup, label: str) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, content
    )


def _grid(axes: Axes) -> Markup:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = Markup("")
    for value in axes.y_ticks:
        y = axes.up(value)
        drawn += Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, _at(y), right, _at(y))
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 7, _at(y + 4), text_of(value)
        )
    for value in axes.x_ticks:
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _at(axes.across(value)), bottom + 17, text_of(value)
        )
    drawn += Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, bottom, right, bottom)
    drawn += Markup('<text class="name" x="{}" y="{}" text-anchor="end">{}</text>').format(right, HEIGHT - 8, axes.x)
    middle = (TOP + bottom) / 2
    return drawn + Markup(
        '<text class="name" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(_at(middle), axes.y)


def _line(line: Line, axes: Axes) -> Markup:
    points = thinned(line.points)
    placed = [None if y is None else (_at(axes.across(x)), _at(axes.up(y))) for x, y in points]
    steps, pen = [], "M"
    for place in placed:
        if place is not None:
            steps.append(f"{pen}{place[0]} {place[1]}")
        pen = "M" if place is None else "L"
    drawn = Markup('<path class="line s{}" d="{}"/>').format(line.style % STYLES, "".join(steps))
    if line.marked and len(points) <= _MARKED:
        dot = Markup('<circle class="mark s{}" cx="{}" cy="{}" r="3"/>')
        drawn += Markup("").join(dot.format(line.style % STYLES, *place) for place in placed if place is not None)
    return drawn


def _rule(x: float, name: str, axes: Axes) -> Markup:
    """The name stands above the plot, where no line can be."""
    across = axes.across(x)
    anchor, shift = ("end", 4) if across > WIDTH / 2 else ("start", -4)
    return Markup(
        '<line class="rule" x1="{0}" y1="{1}" x2="{0}" y2="{2}"/>'
        '<text class="note" x="{3}" y="{4}" text-anchor="{5}">{6}</text>'
    ).format(_at(across), TOP, HEIGHT - BOTTOM, _at(across + shift), TOP - 10, anchor, name)


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
