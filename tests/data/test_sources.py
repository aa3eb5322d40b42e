"""Reading tables: each format, and every way a file can be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privet.data.sources import read_table, resolve_path
from privet.errors import ConfigError, DataError

SECRET = "patient Miller"


def refused(path: Path, columns: list[str] | None = None) -> str:
    """The one line with which a file is refused; no cell of it may appear."""
    with pytest.raises(DataError) as caught:
        read_table(path, columns)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "ndjson", "json", "parquet"])
def test_every_format_reads_the_same_rows(tmp_path: Path, suffix: str) -> None:
    frame = pd.DataFrame({"text": ["first, with comma", "zweite Zeile", "naïve"], "label": ["a", "b", "a"]})
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "tsv":
        frame.to_csv(path, index=False, sep="\t")
    elif suffix in ("jsonl", "ndjson"):
        frame.to_json(path, orient="records", lines=True)
    elif suffix == "json":
        frame.to_json(path, orient="records")
    else:
        frame.to_parquet(path)
    read = read_table(path, ["label", "text"])
    assert list(read.columns) == ["label", "text"]
    assert read["text"].tolist() == frame["text"].tolist()


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a", "label": 1}, {"text": "b", "label": 0}]',
        '{"0": {"text": "a", "label": 1}, "1": {"text": "b", "label": 0}}',
        '{"text": ["a", "b"], "label": [1, 0]}',
    ],
    ids=["records", "object of records", "object of columns"],
)
def test_json_layouts(table, content: str) -> None:
    assert read_table(table(content, "t.json"))["label"].tolist() == [1, 0]


def test_csv_keeps_what_the_file_says(table) -> None:
    frame = read_table(table("\ufefftext,label\nNA,007\nnull,1.0\n,\n"))
    assert frame["text"].tolist() == ["NA", "null", ""]
    assert frame["label"].tolist() == ["007", "1.0", ""]


def test_undecodable_bytes_are_replaced(table, tmp_path: Path) -> None:
    assert read_table(table(b"text,label\ncaf\xe9,no\n"))["text"].tolist() == ["caf\ufffd"]
    assert read_table(table(b'{"text": "caf\xe9"}\n', "t.jsonl"))["text"].tolist() == ["caf\ufffd"]
    broken = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet")["text"].tolist() == [b"caf\xe9"]


def test_utf16_spreadsheet_export(table) -> None:
    assert read_table(table("text,label\nnaïve,no\n".encode("utf-16")))["text"].tolist() == ["naïve"]


def test_tsv_quotes_are_ordinary(table) -> None:
    frame = read_table(table('text\tlabel\n"an open quote\tno\nnext\tyes\n', "t.tsv"))
    assert frame["text"].tolist() == ['"an open quote', "next"]


def test_missing_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(tmp_path / "absent.csv") == f"there is no file '{tmp_path / 'absent.csv'}'"
    monkeypatch.chdir(tmp_path)
    assert refused(Path("absent.csv")).endswith("give an absolute path")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in refused(tmp_path / "folder.csv")


def test_unknown_suffix(table) -> None:
    assert "(allowed: .csv, .tsv, .jsonl, .ndjson, .json, .parquet)" in refused(table("x", "t.xlsx"))


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.parquet"])
def test_empty_file(table, name: str) -> None:
    assert refused(table("", name)).endswith("is empty")


def test_header_without_rows(table) -> None:
    assert refused(table("text,label\n")).endswith("has no rows")
    assert refused(table("[]", "t.json"), ["text"])


def test_missing_column_names_the_nearest(table, tmp_path: Path) -> None:
    path = table("text,sentiment\na,no\n")
    assert "unknown column 'sentimnt' - did you mean 'sentiment'?" in refused(path, ["text", "sentimnt"])
    pd.DataFrame({"text": ["a"], "sentiment": ["no"]}).to_parquet(tmp_path / "t.parquet")
    assert "did you mean 'sentiment'?" in refused(tmp_path / "t.parquet", ["sentimnt"])


def test_malformed_files_name_the_line_and_no_cell(table) -> None:
    assert "line 3 has 3 cells, the header 2" in refused(table(f"text,label\na,no\n{SECRET}, sick,yes\n"))
    assert "more cells than its header: line 2 has 3, the header 2" in refused(
        table(f"text,label\n{SECRET}, sick,yes\nb,c,no\n")
    )
    assert "data row 2 is never closed" in refused(table(f'text,label\na,no\n"{SECRET},yes\nb,no\n'))
    assert "line 2 is not valid JSON" in refused(table(f'{{"text": "a"}}\n{{"text": "{SECRET}\n', "t.jsonl"))
    assert "line 1 is not a JSON object" in refused(table(f'["{SECRET}"]\n', "t.jsonl"))
    assert "not valid JSON: line 1" in refused(table(f'[{{"text": "{SECRET}]', "t.json"))
    assert "is not a table" in refused(table(f'"{SECRET}"', "t.json"))
    assert "different lengths" in refused(table('{"text": ["a"], "label": []}', "t.json"))
    assert "not valid JSON" in refused(table("[" * 100_000, "t.json"))
    assert "not a readable Parquet file" in refused(table(SECRET, "t.parquet"))


def test_parquet_column_twice(tmp_path: Path) -> None:
    pq.write_table(
        pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "t.parquet"
    )
    assert "column 'text' stands twice" in refused(tmp_path / "t.parquet", ["text"])


def test_package_path_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carrier" / "sub").mkdir(parents=True)
    (tmp_path / "carrier" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "carrier" / "sub" / "t.csv").write_text("text\na\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_path("package:carrier/sub/t.csv") == tmp_path / "carrier" / "sub" / "t.csv"
    assert "carrier" not in sys.modules
    with pytest.raises(ConfigError, match=r"has no file 'sub/other.csv'"):
        resolve_path("package:carrier/sub/other.csv")


def test_package_paths_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nosuchpackage', which is not installed .*privet\[demo\]"):
        resolve_path("package:nosuchpackage/t.csv")
    for path in ("package:", "package:json/../secret.csv", "package:/etc/passwd", "package:a.b/t.csv"):
        with pytest.raises(ConfigError, match="is not allowed"):
            resolve_path(path)
    with pytest.raises(ConfigError, match="is not installed"):
        resolve_path("package:__main__/t.csv")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert resolve_path("~/t.csv") == Path("/somewhere/t.csv")
    with pytest.raises(ConfigError, match="is not allowed: there is no such user's home folder"):
        resolve_path("~nosuchuser/t.csv")


def test_a_datasets_folder_is_read_with_the_names_of_its_labels(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=["no", "yes"]), "n": Value("int64")}
    )
    data = Dataset.from_dict({"text": ["a", None, "c"], "label": [1, 0, None], "n": [1, None, 3]}, features)
    data.save_to_disk(str(tmp_path / "one"))
    frame = read_table(tmp_path / "one", ["label", "text"])
    assert frame["label"].tolist() == ["yes", "no", ""]
    assert frame["text"].fillna("-").tolist() == ["a", "-", "c"]
    data.select([2, 0]).save_to_disk(str(tmp_path / "some"))
    assert read_table(tmp_path / "some")["text"].tolist() == ["c", "a"]
    assert "unknown column 'labl' - did you mean 'label'?" in refused(tmp_path / "one", ["labl"])
    DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    assert "several splits" in refused(tmp_path / "splits")
    for file in (tmp_path / "one").glob("*.arrow"):
        file.write_bytes(SECRET.encode())
    assert "is not a readable datasets folder" in refused(tmp_path / "one")
