"""How the project's pictures look: one style, drawn for light and for dark pages.

Figures are drawn at the size they are shown at in a README (about 800 pixels wide), with units on
the axes and labels on the lines themselves. matplotlib comes with the extra `plots`.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours of a page.

    Attributes:
      name: "light" or "dark".
      paper, ink, faint: background, text and axes, grid lines.
      ours, base, third, fourth: lines and bars: the idea, what it replaces, and further ones.
    """

    name: str
    paper: str
    ink: str
    faint: str
    ours: str
    base: str
    third: str
    fourth: str


LIGHT = Theme("light", "#ffffff", "#1f2328", "#d8dee4", "#0b6bcb", "#c2410c", "#2f7d4f", "#7a5cc0")
DARK = Theme("dark", "#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#f0883e", "#56d364", "#bc8cff")


def check_can_draw() -> None:
    """Refuses with the way out where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib; install the extra: pip install -e '.[plots]'")


@contextlib.contextmanager
def page(theme: Theme, width: float = 8.0, height: float = 4.0) -> Iterator[Any]:
    """A figure of `width` x `height` inches in the theme's colours."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "figure.facecolor": theme.paper, "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper, "text.color": theme.ink,
        "axes.labelcolor": theme.ink, "axes.edgecolor": theme.ink, "xtick.color": theme.ink,
        "ytick.color": theme.ink, "grid.color": theme.faint, "grid.linewidth": 0.6,
        "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False, "axes.titlesize": 11, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "font.size": 10, "lines.linewidth": 2,
        "legend.frameon": False, "svg.fonttype": "none",
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save(
    draw: Callable[[Any, Theme], None],
    folder: Path,
    name: str,
    size: tuple[float, float],
    themes: tuple[Theme, ...] = (LIGHT, DARK),
) -> list[Path]:
    """Draws a picture for each theme, `NAME-light.png` and so on; for one alone `NAME.png`.

    Args:
      draw: fills a figure in a theme's colours.
      folder: where to.
      name: of the files.
      size: width and height in inches.
      themes: which ones.
    """
    paths = []
    for theme in themes:
        path = folder / (f"{name}-{theme.name}.png" if len(themes) > 1 else f"{name}.png")
        with page(theme, *size) as figure:
            draw(figure, theme)
            # No time and no version in the file: the same rows give the same bytes.
            figure.savefig(path, dpi=120, metadata={"Software": None})
        paths.append(path)
    return paths
