"""Tasks: from a table to texts and what to answer, with a public test set apart.

The label set comes from the task and never from rows, so that a node's rows decide nothing that others see.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privet.config import TaskConfig
from privet.data.chats import split_chats
from privet.data.choices import letter_choices
from privet.data.examples import Examples as Examples
from privet.data.hub import HubTable
from privet.data.images import MISSING, REASONS, Picture, fault, pictures
from privet.data.sources import find_table, read_table, resolve_path
from privet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd  # a second to load, and most messages to a node read no table

log = logging.getLogger("privet")

CLIENT = "{client}"
LABEL = "label"
_MOST_PLACES = 5
_NO_NUMBER = frozenset({"", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task's training rows and its public test rows; `dropped` counts the rows left out, by reason."""

    train: Examples
    test: Examples
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnNames:
    """What a node's own table calls the columns and labels of a task; None: what the task calls them.

    Attributes
    ----------
    text_column, pair_column, label_column : str or None
        Columns of the table; `text_column` and `pair_column` count only where the task has them.
    labels : tuple of str or None
        The table's label values in the order of ``task.labels``.
    image_column : str or None
        The column of images or of their files' names, where the task has images.
    image_folder : str or None
        Where such files lie; None: in the table's own folder. A task's folder does not count on a real node.

    Raises
    ------
    ConfigError
        If a label value stands twice; it does not show the values, which are the node's own.
    """

    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    labels: tuple[str, ...] | None = None
    image_column: str | None = None
    image_folder: str | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and len(set(self.labels)) != len(self.labels):
            raise ConfigError("labels is not allowed as it is: a value stands twice")

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the node has named itself."""
        named = (self.text_column, self.pair_column, self.label_column, self.image_column)
        return frozenset(name for name in named if name is not None)

    def fit(self, cfg: TaskConfig) -> TaskConfig:
        """Return the task in the words of this table.

        Raises
        ------
        ConfigError
            If the numbers of labels differ.
        """
        if self.labels is not None and len(self.labels) != len(cfg.labels):
            raise ConfigError(
                f"labels of this node are {len(self.labels)} values and task.labels {len(cfg.labels)}: "
                "one for each, in that order"
            )
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("text_column", "pair_column", "image_column"):
            if getattr(cfg, name) is None:
                own[name] = None
        given = {name: value for name, value in own.items() if value is not None}
        # Whoever chooses the task must not choose a folder of the node.
        given["image_folder"] = self.image_folder if cfg.sees else None
        return dataclasses.replace(cfg, **given)


def load_task(cfg: TaskConfig, column: str | None = None) -> TaskData:
    """Load the one table of a task and set the public test rows apart.

    The test set is `test_path`, or the `test_rows` rows whose text sorts first by SHA-256, whatever the seed
    and the order of the file. No text stands on both sides of that split. With `validation_rows`, that many
    training rows, by another such order, take the place of the test set, whose rows nothing sees then.

    Parameters
    ----------
    cfg : TaskConfig
        The task; its path holds no ``{client}``.
    column : str, optional
        A further column to keep for a partition; ``label`` is the task's label, whatever its
        column is called.

    Raises
    ------
    ConfigError
        When `path` names one file a client, or a package is missing.
    DataError
        One line without row contents when a file or a column is missing, a label has no row, or fewer rows
        are usable than asked for.
    """
    if CLIENT in cfg.path:
        raise ConfigError("task.path with {client} is one file a client: there is no table to split")
    path = find_table(cfg.path)
    rows, dropped = _load(path, cfg, column)
    missing = sorted(set(range(len(cfg.labels))) - set(rows.labels.tolist()))
    if missing:
        raise DataError(
            f"'{path}': no usable row has the label '{cfg.labels[missing[0]]}' of task.labels "
            f"({len(rows)} rows have one of task.labels; left out: {_counts(dropped)})"
        )
    if cfg.test_path is not None:
        train, test = rows, _load_test_table(cfg)
    else:
        train, test = _set_apart(rows, cfg.test_rows or 0, "", "test", path, dropped)
    if cfg.validation_rows is not None:
        train, test = _set_apart(train, cfg.validation_rows, "validation:", "validation", path, dropped)
    if cfg.train_rows is not None:
        if cfg.train_rows > len(train):
            raise DataError(f"task.train_rows = {cfg.train_rows} is not possible: '{path}' has {len(train)}")
        train = _first(train, cfg.train_rows)
    return TaskData(train, test, dict(dropped))


def load_test(cfg: TaskConfig) -> Examples:
    """Load the public test rows only; raises as :func:`load_task` does."""
    if cfg.test_path is None or cfg.validation_rows is not None:
        return load_task(cfg).test
    return _load_test_table(cfg)


def _load_test_table(cfg: TaskConfig) -> Examples:
    folder = cfg.test_image_folder or cfg.image_folder
    return _load(find_table(cfg.test_path or ""), dataclasses.replace(cfg, image_folder=folder), None)[0]


def load_client_file(cfg: TaskConfig, client: int | str) -> Examples:
    """Load one client's own file, where `path` holds ``{client}``.

    A client may lack a label: that is what a real split looks like. `train_rows` is at most, here.

    Parameters
    ----------
    cfg : TaskConfig
        The task.
    client : int or str
        What stands for ``{client}``: a partition number or a node's name.

    Raises
    ------
    ConfigError
        When `path` has no ``{client}``, or the name could leave the folder.
    DataError
        As :func:`load_task`.
    """
    if CLIENT not in cfg.path:
        raise ConfigError("task.path names one table for all clients: write {client} for one file each")
    name = str(client)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or ".." in name:
        raise ConfigError(f"client name {name!r} is not allowed in a path: letters, digits, '.', '_' and '-'")
    rows = _load(find_table(cfg.path.replace(CLIENT, name)), cfg, None)[0]
    return rows if cfg.train_rows is None else _first(rows, min(cfg.train_rows, len(rows)))


@dataclass(frozen=True, eq=False)
class NodeTable:
    """A node's own table as a task sees it; nothing of it but `examples` may go further than the node's own log.

    Attributes
    ----------
    examples : Examples
        The usable rows.
    rows : int
        All rows of the table.
    dropped : dict of str to int
        Rows left out, by reason.
    places : dict of str to list of int
        The first few of them, by reason: data rows, counted from 1.
    """

    examples: Examples
    rows: int
    dropped: dict[str, int]
    places: dict[str, list[int]]

    def lines(self) -> list[str]:
        """Say in a line for each reason how many rows are left out, and where the first ones stand."""
        return [
            f"{count} of {self.rows} rows {reason} are left out (data row {', '.join(map(str, self.places[reason]))}"
            f"{', ...' if count > len(self.places[reason]) else ''})"
            for reason, count in self.dropped.items()
        ]


def load_node_file(
    cfg: TaskConfig, path: str, own: OwnNames | None = None, *, tell: bool = False
) -> Examples:
    """Return the usable rows of :func:`read_node_table`; with `tell`, the node's own log says what is left out."""
    table = read_node_table(cfg, path, own)
    if tell:
        for line in table.lines():
            log.warning("'%s': %s", path, line)
    if len(table.examples) == 0:
        log.warning("'%s' has no usable row for this task; left out: %s", path, _counts(table.dropped))
    return table.examples


def read_node_table(cfg: TaskConfig, path: str, own: OwnNames | None = None) -> NodeTable:
    """Load a real node's own table; it may hold no row that the task selects.

    Every row is kept or left out by itself, or as a repetition of an equal row, label included: adding or
    removing one row of the table changes the result by at most one row, as the accounting needs. `train_rows`,
    under which one row would let in another, is refused. No row's cell makes the whole table fail either, or
    whoever chooses the task could ask by it what stands in a row.

    Parameters
    ----------
    cfg : TaskConfig
        The task.
    path : str
        The node's table.
    own : OwnNames, optional
        The node's own names for columns and labels; they go before the task's.

    Raises
    ------
    ConfigError
        If `train_rows` or `canaries` is set, or the node's labels do not fit the task's.
    DataError
        As :func:`load_task`, but for a table without a usable row; also for a path that cannot be, so that
        what names the node's files is told from what may be shown to a server.
    """
    if cfg.train_rows is not None:
        raise ConfigError(
            "task.train_rows is for simulations: on a node's own table one row would replace another"
        )
    if cfg.canaries is not None:
        raise ConfigError("task.canaries is for simulations: nothing is planted among a node's own rows")
    own = own or OwnNames()
    places: dict[str, list[int]] = {}
    examples, dropped = _load(
        _own_path(path), own.fit(cfg), None, node=True, named=own.columns, places=places
    )
    return NodeTable(examples, len(examples) + sum(dropped.values()), dict(dropped), places)


def count_rows(path: str) -> int:
    """Return the rows of a node's table before any task selects among them."""
    return len(read_table(_own_path(path)))


def _own_path(path: str) -> Path:
    try:
        return resolve_path(path)
    except ConfigError as err:
        raise DataError(str(err)) from None


def snapshot(examples: Examples) -> str:
    """Return the SHA-256 over texts, pairs, labels, answers and images in their order: equal exactly for equal rows.

    An image's file counts by its name, size and time.
    """
    digest = hashlib.sha256()
    more = [] if examples.targets is None else [examples.targets]
    if examples.images is not None:
        more.append([image.stamp for image in examples.images])
    for texts in (examples.texts, examples.pairs, *more):
        digest.update(b"none" if texts is None else b"%d" % len(texts))
        for text in texts or ():
            raw = text.encode()
            digest.update(b":%d:" % len(raw))  # the length, so that no two lists of texts read the same
            digest.update(raw)
    digest.update(np.ascontiguousarray(examples.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


# --- from cells to examples ----------------------------------------------------------------------


def _load(
    path: Path | HubTable,
    cfg: TaskConfig,
    column: str | None,
    *,
    node: bool = False,
    named: Collection[str] = (),
    places: dict[str, list[int]] | None = None,
) -> tuple[Examples, Counter[str]]:
    """Read, filter and convert; the counter says why how many rows were left out, `places` which ones came first.

    On a real `node` no row may decide over another, unequal one, and no usable row is an answer too. Columns
    that the node has not `named` itself are the server's choice.
    """
    if column == LABEL and cfg.generates:
        raise ConfigError(
            f"federation.partition.column = {LABEL} is not possible with task.kind={cfg.kind}: name a column"
        )
    column = cfg.label_column if column == LABEL else column
    answer = cfg.label_column
    second = cfg.choices_column or cfg.pair_column
    texts = [name for name in (cfg.text_column, second) if name is not None]
    wanted = [name for name in (*texts, answer, column) if name is not None]
    further = [*(cfg.minimum or {}), *([cfg.image_column] if cfg.image_column else [])]
    chosen = [name for name in (*wanted, *further) if name not in named] if node else []
    frame = read_table(path, [*wanted, *further], lenient=chosen)
    if answer is None:
        frame, answer = split_chats(frame, texts[0], path, strict=not node)
        wanted.append(answer)
    if cfg.choices_column is not None:
        frame, answer = letter_choices(frame, cfg.choices_column, answer)
        wanted.append(answer)
    images = _pictures(frame, cfg, path, lenient=node)
    if column is not None and column not in (*texts, answer):
        told_by = frame[cfg.text_column] if cfg.text_column else [getattr(i, "key", i) for i in images]
        frame = frame.assign(**{column: _one_value(frame[column], told_by)})
    minimum = cfg.minimum or {}
    cells = {name: np.array(_cells(frame[name], path, strict=not node), dtype=object) for name in wanted}
    grades = {name: _numbers(frame[name], path, strict=not node) for name in minimum}

    index = {value: i for i, value in enumerate(cfg.labels)}
    unknown = 0 if cfg.generates else -1
    codes = np.array([index.get(value.strip(), unknown) for value in cells[answer]], dtype=np.int64)
    rows = np.arange(len(frame))
    dropped: Counter[str] = Counter()

    def keep(mask: np.ndarray, reason: str) -> None:
        nonlocal rows
        if not mask.all():
            dropped[reason] += int((~mask).sum())
            if places is not None:
                seen = places.setdefault(reason, [])
                seen += (rows[~mask][: _MOST_PLACES - len(seen)] + 1).tolist()
            rows = rows[mask]

    keep(_filled(cells[answer][rows]), "without an answer" if cfg.generates else "without a label")
    keep(codes[rows] >= 0, "with a label not in task.labels")
    # A second text of a prompt may be empty.
    for name in [n for n in texts if n == cfg.text_column or not cfg.generates]:
        keep(_filled(cells[name][rows]), "without a text")
    if cfg.sees:
        keep(np.array([images[i] != MISSING for i in rows], dtype=bool), MISSING)
        faults = _faults([images[i] for i in rows])
        if not node:
            _refuse_faults(faults, rows, path)
        for reason in REASONS:
            mask = faults != reason
            faults = faults[mask]
            keep(mask, reason)
    for name, least in minimum.items():
        keep(~(grades[name][rows] < least), "below task.minimum")  # NaN: not graded, so not below
    if cfg.deduplicate:
        same = [*texts, answer] if node or cfg.generates else texts
        seen_images = [np.array([images[i].key for i in rows], dtype=object)] if cfg.sees else []
        keep(
            ~_repeated([*(cells[name][rows] for name in same), *seen_images]),
            "with the text of an earlier row",
        )
    if len(rows) == 0 and not node:
        raise DataError(f"'{path}' has no usable row; left out: {_counts(dropped)}")

    columns = None
    if column is not None:
        columns = np.array([value.strip() for value in cells[column][rows]], dtype=object)
        if blank := int((columns == "").sum()):
            raise DataError(
                f"'{path}': column '{column}' is empty in {blank} rows, so no client would get them"
            )
    first = [""] * len(rows) if cfg.text_column is None else cells[cfg.text_column][rows].tolist()
    pairs = None if second is None else cells[second][rows].tolist()
    targets = cells[answer][rows].tolist() if cfg.generates else None
    kept = [images[i] for i in rows] if cfg.sees else None
    return Examples(first, pairs, codes[rows], columns, targets, kept), dropped


def _pictures(frame: pd.DataFrame, cfg: TaskConfig, path: Path | HubTable, *, lenient: bool) -> list[Any]:
    """Return the images of all rows, or what is wrong with a cell; nothing where the task has none."""
    if cfg.image_column is None:
        return []
    own = None if isinstance(path, HubTable) else path if path.is_dir() else path.parent
    folder = own if cfg.image_folder is None else resolve_path(cfg.image_folder)
    return list(pictures(frame[cfg.image_column], str(path), folder, lenient=lenient))


def _faults(images: Sequence[Picture | str]) -> np.ndarray:
    """Return what is wrong with every row's image; an image of several rows is opened once."""
    distinct = {image.key: image for image in images if not isinstance(image, str)}
    known = {key: fault(image) for key, image in distinct.items()}
    return np.array([i if isinstance(i, str) else known[i.key] for i in images], dtype=object)


def _refuse_faults(faults: np.ndarray, rows: np.ndarray, path: Path | HubTable) -> None:
    """Refuse a table by the first of its rows whose image is no good."""
    wrong = np.flatnonzero(faults != None)  # noqa: E711 - element by element
    if len(wrong):
        raise DataError(
            f"'{path}': data row {rows[wrong[0]] + 1} is one {faults[wrong[0]]} ({len(wrong)} such rows in all)"
        )


def _one_value(cells: Iterable[Any], told_by: Iterable[str]) -> list[Any]:
    """Return the cells of a column with one value of each list, by a hash of the row's text or image and the list.

    Topics of a question, or objects in an image: a row with several goes to one of them, the same in every process.
    """
    chosen = []
    for cell, text in zip(cells, told_by, strict=True):
        if isinstance(cell, (list, tuple, np.ndarray)):
            values = list(cell)
            key = hashlib.sha256(f"value:{text}:{values}".encode("utf-8", "replace")).digest()
            cell = values[int.from_bytes(key[:8], "big") % len(values)] if values else None
        chosen.append(cell)
    return chosen


def _filled(cells: np.ndarray) -> np.ndarray:
    return np.fromiter((cell.strip() != "" for cell in cells), dtype=bool, count=len(cells))


def _repeated(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return where a row equals an earlier one in all columns, (n,) bool."""
    first: dict[tuple[str, ...], int] = {}
    rows = zip(*columns, strict=True)
    return np.array([first.setdefault(row, i) != i for i, row in enumerate(rows)], dtype=bool)


def _cells(column: pd.Series, path: Path | HubTable, *, strict: bool = True) -> list[str]:
    """Return the cells as texts that a tokenizer accepts; a missing cell is the empty text.

    A list or an object is an error where `strict`, and else a missing cell.
    """
    values = column.astype(object).where(column.notna(), "").tolist()
    texts = [value if type(value) is str else _cell(value) for value in values]
    if strict and (wrong := texts.count(None)) > 0:
        raise DataError(f"'{path}': column '{column.name}' holds lists or objects in {wrong} rows, not texts")
    out = ["" if text is None else text for text in texts]
    try:
        "".join(out).encode()
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair, which no encoder accepts
        out = [text.encode("utf-8", "replace").decode() for text in out]
    return out


def _cell(value: Any) -> str | None:
    """Return a cell that is no text as one, as its file would spell it; None for a list or an object."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))  # a column of whole numbers with a gap arrives as floats
    if isinstance(value, (list, tuple, dict, set, np.ndarray)):
        return None
    return str(value)


def _numbers(column: pd.Series, path: Path | HubTable, *, strict: bool = True) -> np.ndarray:
    """Return the cells as float64, (n,), NaN where a cell is missing.

    What is no number is an error where `strict`, and else below every number.
    """
    import pandas as pd

    values = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    doubtful = np.flatnonzero(np.isnan(values))
    cells = _cells(column.iloc[doubtful], path, strict=strict)
    wrong = np.array([cell.strip().lower() not in _NO_NUMBER for cell in cells], dtype=bool)
    if strict and wrong.any():
        raise DataError(
            f"'{path}': column '{column.name}' of task.minimum is no number in {int(wrong.sum())} rows"
        )
    values[doubtful[wrong]] = -np.inf
    return values


def _counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} rows {reason}" for reason, count in dropped.items()) or "none"


# --- which rows ----------------------------------------------------------------------------------


def _by_hash(texts: Sequence[str], prefix: str = "") -> np.ndarray:
    """Return the order of the texts by SHA-256, (n,) int64; equal texts keep their order."""
    keys = [hashlib.sha256((prefix + text).encode()).digest() for text in texts]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _first(examples: Examples, count: int) -> Examples:
    """Keep `count` rows by a hash order that is independent of the test split's, in their old order."""
    return examples.take(np.sort(_by_hash(examples.keys, "train:")[:count]))


def _set_apart(
    examples: Examples, count: int, prefix: str, name: str, path: Path | HubTable, dropped: Counter[str]
) -> tuple[Examples, Examples]:
    """Split off the `count` rows that sort first by hash; no text, or image, of theirs is left among the others."""
    keys = examples.keys
    order = _by_hash(keys, prefix)
    apart = examples.take(np.sort(order[:count]))
    public = set(apart.keys)
    rest = [i for i in np.sort(order[count:]) if keys[i] not in public]
    if overlap := len(examples) - len(apart) - len(rest):
        dropped[f"with the {'text' if examples.images is None else 'image'} of a {name} row"] += overlap
    if not rest:
        raise DataError(
            f"task.{name}_rows = {count} leaves no row to train on: '{path}' has {len(examples)} usable rows"
        )
    return examples.take(rest), apart
