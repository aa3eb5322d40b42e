"""``privet compare``: read the runs, print the table, write the CSV, the plots and the page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from privet.atomic import write_atomic
from privet.compare import plots as drawing
from privet.compare.lines import compare
from privet.compare.page import page
from privet.compare.runs import MARKS
from privet.compare.table import csv_table, text_table
from privet.errors import PrivetError


def report(paths: Sequence[Path], out: Path) -> int:
    """Print the table of runs and write ``table.csv``, the plots and ``report.html`` into a folder.

    Files of an earlier comparison in that folder are replaced. Without matplotlib the plots are left out, and one
    line says so.

    Raises
    ------
    PrivetError
        If a path holds no run, or the folder cannot be written or is a run's.
    """
    comparison = compare(paths)
    print(text_table(comparison))
    if any((out / mark).exists() for mark in MARKS):
        raise PrivetError(f"--out {out} is a run's directory: name another folder")
    drawn = None
    if drawing.can_draw():
        drawn = drawing.draw(comparison)
    else:
        print(f"privet: {drawing.MISSING}", file=sys.stderr)
    files = {"table.csv": csv_table(comparison).encode(), "report.html": page(comparison, drawn).encode()}
    files |= {f"{plot.name}.png": plot.light for group in drawn or () for plot in group}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (p for kind in ("round", "epsilon", "bytes") for p in out.glob(f"*-by-{kind}*.png")):
            if old.name not in files:
                old.unlink()
        for name, data in files.items():
            write_atomic(out / name, data)
    except OSError as error:
        raise PrivetError(f"--out {out} cannot be written: {error.strerror}") from None
    print(f"\nReport: {out / 'report.html'}")
    return 0
