"""Images of rows: where they are, told apart by a key, and decoded only when a batch needs them.

A cell holds a file's name below a folder, the bytes of an encoded image, or the datasets library's ``{bytes, path}``.
No name leads out of the folder. What is wrong with a row's image is said by the row's number, and never by its cell.
"""

from __future__ import annotations

import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from privet.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

log = logging.getLogger("privet")

MISSING = "without an image"
OUTSIDE = "with an image outside of the image folder"
ABSENT = "with an image file that is not there"
UNREADABLE = "with an image that cannot be read"
REASONS = (OUTSIDE, ABSENT, UNREADABLE)


@dataclass(frozen=True)
class Picture:
    """One row's image, not decoded.

    Attributes
    ----------
    key : str
        The file's name below the image folder, or the SHA-256 of the bytes: equal for equal images of a table.
    file : Path or None
        Where it lies.
    data : bytes or None
        The encoded image itself.
    place : str
        The table and the row's number in it, counted from 1, for messages.
    lenient : bool
        Whether an image that cannot be decoded after all is grey instead of an error: on a real node no row may make
        the others fail.
    """

    key: str
    file: Path | None
    data: bytes | None
    place: str
    lenient: bool = False

    @property
    def stamp(self) -> str:
        """What changes with the image: its hash, or the file's name, size and time."""
        if self.file is None:
            return self.key
        try:
            facts = self.file.stat()
        except OSError:
            return self.key
        return f"{self.key}:{facts.st_size}:{facts.st_mtime_ns}"

    def open(self) -> Image:
        """Return the image in RGB, upright.

        Raises
        ------
        DataError
            If it cannot be decoded and is not `lenient`; the text names the row, and is for this machine only.
        """
        from PIL import Image, ImageOps

        try:
            with Image.open(self.source()) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except _decoding_errors():
            if not self.lenient:
                raise DataError(f"{self.place}: the image cannot be decoded") from None
            log.warning("%s: the image cannot be decoded: it is taken as grey", self.place)
            return Image.new("RGB", (8, 8), (128, 128, 128))

    def source(self) -> Path | io.BytesIO:
        """Return what Pillow opens."""
        return self.file if self.file is not None else io.BytesIO(self.data or b"")


def fault(picture: Picture) -> str | None:
    """Return what is wrong with an image as far as its first bytes tell, one of `REASONS`; None: nothing."""
    from PIL import Image

    if picture.file is not None and not picture.file.is_file():
        return ABSENT
    try:
        with Image.open(picture.source()):
            return None
    except _decoding_errors():
        return UNREADABLE


def pictures(column: pd.Series, table: str, folder: Path | None, *, lenient: bool) -> list[Picture | str]:
    """Return every cell's image, or what is wrong with the cell: `MISSING` or `OUTSIDE`.

    Parameters
    ----------
    column : pandas.Series
        n cells.
    table : str
        Names the table in messages.
    folder : Path or None
        Where files lie; None: nowhere.
    lenient : bool
        See :class:`Picture`.

    Raises
    ------
    DataError
        If cells name files and there is no folder, unless `lenient`.
    """
    root = None if folder is None else folder.resolve()
    found: list[Picture | str] = []
    for number, cell in enumerate(column, start=1):
        name, data = _parts(cell)
        place = f"'{table}': data row {number}"
        if data is not None:
            found.append(Picture(f"sha256:{hashlib.sha256(data).hexdigest()}", None, data, place, lenient))
        elif name is None:
            found.append(MISSING)
        elif root is None:
            if not lenient:
                raise DataError(f"'{table}' names image files: set task.image_folder to where they are")
            found.append(ABSENT)
        else:
            file = _below(root, name)
            found.append(OUTSIDE if file is None else Picture(name, file, None, place, lenient))
    return found


def _parts(cell: Any) -> tuple[str | None, bytes | None]:
    """Return the file name or the bytes that a cell has; neither where it has no image."""
    if isinstance(cell, dict):  # as the datasets library stores images
        data = cell.get("bytes")
        return _parts(data if data is not None else cell.get("path"))
    if isinstance(cell, (bytes, bytearray, memoryview)):
        return None, bytes(cell) or None
    if isinstance(cell, str) and cell.strip():
        return cell.strip(), None
    return None, None


def _below(root: Path, name: str) -> Path | None:
    """Return a file below the folder, links followed; None where it would be elsewhere."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        return None
    try:
        file = (root / pure).resolve()
    except (OSError, RuntimeError):  # a loop of links
        return None
    return file if file.is_relative_to(root) else None


def _decoding_errors() -> tuple[type[Exception], ...]:
    from PIL import Image

    # Pillow's readers raise what they like for damaged bytes; a bomb is an image of more pixels than anyone has.
    return (
        OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, KeyError, OverflowError,
        MemoryError, NotImplementedError, ArithmeticError, AttributeError, Image.DecompressionBombError,
    )  # fmt: skip
