"""Pictures of an audit: how well the losses tell rows apart, and where they lie."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from privet.audit.membership import Floats, roc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (5.0, 4.0)
_DPI = 150
_INSIDE, _OUTSIDE = "#2a6f97", "#c8553d"


def draw(scores: Mapping[str, Floats]) -> dict[str, bytes]:
    """Return PNG files by name: the ROC curves of the losses, and their histograms.

    Parameters
    ----------
    scores : mapping of str to array
        ``members`` and ``others``; ``included`` and ``left out`` where there were canaries.

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    pairs = {"training rows against test rows": (scores["members"], scores["others"])}
    if "included" in scores:
        pairs["canaries"] = (scores["included"], scores["left out"])
    pairs = {name: pair for name, pair in pairs.items() if all(len(values) for values in pair)}
    files = {"roc.png": _roc(pairs)}
    for (name, pair), file in zip(pairs.items(), ("losses.png", "canaries.png"), strict=False):
        files[file] = _histogram(name, *pair)
    return files


def _roc(pairs: Mapping[str, tuple[Floats, Floats]]) -> bytes:
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
    for (name, pair), colour in zip(pairs.items(), (_INSIDE, _OUTSIDE), strict=False):
        axes.plot(*roc(*pair), label=name, color=colour, drawstyle="steps-post")
    axes.set(xlabel="false positives", ylabel="true positives", title="Told apart by the loss")
    axes.legend(frameon=False, loc="lower right")
    return _png(figure)


def _histogram(name: str, inside: Floats, outside: Floats) -> bytes:
    figure = _figure()
    axes = figure.add_subplot()
    bins = np.histogram_bin_edges(np.concatenate([inside, outside]), 40).tolist()
    labels = ("included", "left out") if name == "canaries" else ("trained on", "not trained on")
    for values, label, colour in zip((inside, outside), labels, (_INSIDE, _OUTSIDE), strict=True):
        axes.hist(values, bins, density=True, histtype="step", label=label, color=colour, linewidth=1.5)
    axes.set(xlabel="loss", ylabel="density", title=name[0].upper() + name[1:])
    axes.legend(frameon=False)
    return _png(figure)


def _figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
