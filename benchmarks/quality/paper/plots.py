"""The figures as PNG. Needs matplotlib, of the extra `eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

Points = Sequence[tuple[float, float, float, float]]  # x, mean, and the ends of its interval

_DPI = 120
_COLUMNS = 110  # characters a line of token pictures
_CHARACTER = 0.602  # width of DejaVu Sans Mono in units of its size


@dataclass(frozen=True, slots=True)
class Line:
    """A curve with its name; `dashed` for bounds and controls."""

    label: str
    points: Points
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one axis."""

    title: str
    lines: Sequence[Line]
    y_label: str


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token's text, and whether it matters to the question."""

    text: str
    relevant: bool


def plot_panels(path: Path, panels: Sequence[Panel], x_label: str, *, log: bool = False) -> None:
    """Panels side by side; `log`: the x axis is, to the base of 2."""
    figure = Figure(figsize=(6.5 * len(panels), 4.5), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for line in panel.lines:
            x, y, low, high = (list(values) for values in zip(*line.points, strict=True)) if line.points else [[]] * 4
            (drawn,) = axes.plot(
                x, y, linestyle="--" if line.dashed else "-", marker="o", markersize=4, label=line.label
            )
            axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.08, linewidth=0)
        if log:
            ticks = sorted({point[0] for line in panel.lines for point in line.points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_title(panel.title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=_DPI)


def plot_bars(path: Path, bars: Mapping[str, tuple[float, float, float]], title: str, y_label: str) -> None:
    """A bar a name: the value, and the ends of its interval."""
    figure = Figure(figsize=(max(5.0, 1.2 * len(bars)), 4.5), layout="constrained")
    axes = figure.add_subplot()
    values = [value for value, _, _ in bars.values()]
    errors = [[max(0.0, value - low) for value, low, _ in bars.values()]]
    errors.append([max(0.0, high - value) for value, _, high in bars.values()])
    axes.bar(list(bars), values, yerr=errors, capsize=4)
    axes.set_title(title)
    axes.set_ylabel(y_label)
    axes.tick_params(axis="x", labelrotation=30)
    figure.savefig(path, dpi=_DPI)


def plot_tokens(path: Path, tokens: Sequence[ShownToken], panels: Mapping[str, Sequence[bool]]) -> None:
    """The text once a panel, what is selected in red; of the rest what matters in black, what does not in grey."""
    places = _places(tokens)
    rows = max(row for row, _ in places) + 1
    height = (rows + 3) * len(panels)
    figure = Figure(figsize=(12, 0.24 * height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-2, _COLUMNS + 2)
    axes.set_ylim(height, 0)
    size = 12 * 72 / (_COLUMNS + 4) / _CHARACTER
    for number, (title, selected) in enumerate(panels.items()):
        top = number * (rows + 3) + 1.5
        axes.text(0, top, title, fontsize=size * 1.1, fontweight="bold", va="center")
        for token, (row, column), chosen in zip(tokens, places, selected, strict=True):
            color = "red" if chosen else "black" if token.relevant else "darkgrey"
            weight = "bold" if chosen else "normal"
            shown = axes.text(column, top + row + 1.2, _plain(token.text), parse_math=False, va="center")
            shown.set(fontsize=size, color=color, fontweight=weight, fontfamily="DejaVu Sans Mono")
    figure.savefig(path, dpi=_DPI)


def _places(tokens: Sequence[ShownToken]) -> list[tuple[int, int]]:
    """Row and column of every token; a line break in a token ends the row behind it."""
    places, row, column = [], 0, 0
    for token in tokens:
        length = len(_plain(token.text))
        if column and column + length > _COLUMNS:
            row, column = row + 1, 0
        places.append((row, column))
        column += length
        if "\n" in token.text:
            row, column = row + 1, 0
    return places


def _plain(text: str) -> str:
    return text.replace("\n", " ")
