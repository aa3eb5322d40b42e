"""Comparing runs: from run directories to a table, plots and a page (``privet compare``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def text_table(paths: Sequence[Path | str]) -> str:
    """Return the terminal's table of runs, given as run directories or as folders that hold runs.

    Raises
    ------
    PrivetError
        If a path does not exist, or none holds a run.
    """
    from privet.compare.lines import compare
    from privet.compare.table import text_table as table_of

    return table_of(compare([Path(p) for p in paths]))
