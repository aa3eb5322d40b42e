"""The files that ``privet compare`` writes: plots and the page."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from privet.cli import main
from privet.compare import plots
from privet.compare.lines import Line, compare
from privet.compare.plots import _curve, _limits, _look, draw
from privet.compare.statistics import Metric, Spread
from tests.compare.conftest import MakeRun

VOID = {"meta", "img", "br", "source", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed, and collects texts and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def runs(make_run: MakeRun, tmp_path: Path) -> Path:
    for seed, last in enumerate((0.80, 0.84)):
        make_run(f"a{seed}", "method=fedavg", f"seed={seed}", scores=(0.5, 0.7, last))
    make_run("b", "method=ffa_lora", scores=(0.5, 0.6, 0.7))
    make_run("c", "method=fedavg", "privacy=none", scores=(0.6, 0.8, 0.9))
    return tmp_path / "runs"


def test_the_command_writes_table_plots_and_page(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", str(runs), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "82.00 ± 2.83" in text
    assert f"Report: {out / 'report.html'}" in text
    names = {p.name for p in out.iterdir()}
    kinds = ("round", "epsilon", "bytes")
    assert names == {"table.csv", "report.html", *(f"accuracy-by-{kind}.png" for kind in kinds)}
    for kind in kinds:
        assert Image.open(out / f"accuracy-by-{kind}.png").width > 600
    (out / "perplexity-by-round-2.png").write_bytes(b"of an earlier comparison")
    (out / "mine.png").write_bytes(b"not ours")
    assert main(["compare", str(runs), "--out", str(out)]) == 0
    assert {p.name for p in out.iterdir()} == names | {"mine.png"}


def test_out_is_never_a_runs_directory(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--out", str(runs / "b")]) == 2
    assert "is a run's directory" in capsys.readouterr().err
    assert not (runs / "b" / "report.html").exists()


def test_wrong_paths_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_matplotlib_table_and_page_are_there(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    out = tmp_path / "out"
    assert main(["compare", str(runs), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == "privet: the plots need matplotlib: pip install 'privet[report]'\n"
    assert {p.name for p in out.iterdir()} == {"table.csv", "report.html"}
    assert "privet[report]" in Page((out / "report.html").read_text()).text


def test_the_page_is_whole_and_asks_nobody(runs: Path, tmp_path: Path) -> None:
    main(["compare", str(runs), "--out", str(tmp_path / "out")])
    html = (tmp_path / "out" / "report.html").read_text()
    page = Page(html)
    links = [
        v for _, attributes in page.elements for k, v in attributes.items() if k in ("src", "href", "srcset")
    ]
    assert len(links) == 6  # three plots, light and dark
    assert all(str(v).startswith("data:image/png;base64,") for v in links)
    for link in links:
        Image.open(io.BytesIO(base64.b64decode(str(link).partition(",")[2]))).verify()
    assert not re.search(r"url\(|@import|https?://", html)
    policy = next(m for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'; img-src data:;")
    assert all(image["alt"] for image in page.all("img"))
    for words in ("prefers-color-scheme: dark", "@media print"):
        assert words in html


def test_the_page_says_what_was_promised_spent_and_differs(
    make_run: MakeRun, tmp_path: Path, runs: Path
) -> None:
    reply = {"round": 2, "phase": "train", "node": "b", "reason": "timeout: no reply within 3 s"}
    warnings = ["client-1: privacy.delta = 1e-05 is larger than 1/n = 1e-06"]
    rounds: list[dict[str, Any]] = [
        {
            "round": 1,
            "phases": [],
            "eval": {"accuracy": 0.7, "examples": 400},
            "void": False,
            "epsilon_max": 1.0,
        },
        {"round": 2, "phases": [], "eval": None, "void": True, "epsilon_max": 2.0},
    ]
    make_run(
        "d", "method=fedhsip", privacy={"warnings": warnings}, summary={"failures": [reply]}, rounds=rounds
    )
    main(["compare", str(runs), "--out", str(tmp_path / "out")])
    text = Page((tmp_path / "out" / "report.html").read_text()).text
    for words in (
        "Promised epsilon 6, delta 1e-05; spent 5.900, the most of any node and run (RDP accountant).",
        "Neighbouring data sets: add or remove one row.",
        "Choosing hyper-parameters on private data is not in this epsilon.",
        "Not private.",
        *warnings,
        "2: 1 void, 1 failed replies.",
        "round 2, train: b: timeout: no reply within 3 s",
        "101 down per client and round.",
        "train.lr = ",
        "num_hidden_layers: 2",  # the resolved configuration
    ):
        assert words in text, words


def test_nothing_of_a_run_becomes_markup(make_run: MakeRun, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    make_run(
        "a",
        "method=fedavg",
        settings={"seed": evil, "note": evil, evil: evil},
        privacy={
            "warnings": [evil],
            "adjacency": evil,
            "mechanism": evil,
            "nodes": [{"node": evil, "examples": evil}],
        },
        summary={"failures": [{"node": evil, "reason": evil, "round": evil}], "versions": {evil: evil}},
    )
    make_run("b", "method=fedavg", settings={"note": "other", "method": {"name": evil}})
    bad = make_run("c", "method=fedavg")
    (bad / "failure.json").write_text('{"reason": "<script>alert(2)</script>"}')
    (bad / "summary.json").unlink()
    assert main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    html = (tmp_path / "out" / "report.html").read_text()
    page = Page(html)
    assert "<script>alert" not in html
    assert len(page.all("script")) == 1
    assert "<script>alert(2)</script>" in page.text


def test_curves_are_means_with_sample_deviations(runs: Path) -> None:
    line = next(x for x in compare([runs]).lines if len(x.runs) == 2)
    curve = _curve(line, Metric("accuracy"), lambda r: r.bytes_so_far)
    assert curve.x == [4000, 8000, 12000]
    assert [s.mean for s in curve.spread] == pytest.approx([0.5, 0.7, 0.82])
    assert curve.spread[-1].deviation == pytest.approx(
        0.04 / 2**0.5
    )  # of two values: their distance over root 2


def test_lines_differ_in_colour_dash_and_marker() -> None:
    labels = [f"m{i}" for i in range(12)]
    looks = [_look(label, labels, "light") for label in labels]
    assert len({(str(x["linestyle"]), x["marker"]) for x in looks}) == 12  # without any colour
    assert len({x["color"] for x in looks[:7]}) == 7


def test_the_axis_never_blows_noise_up(runs: Path) -> None:
    line = Line(compare([runs]).lines[0].runs, {})
    curve = plots._Curve(line, [1.0, 2.0], [Spread(0.800, None, 1), Spread(0.801, None, 1)])
    low, high = _limits(Metric("accuracy"), [curve], error=2.0)
    assert high - low == pytest.approx(16.0)
    assert low < 80.0 < high
    low, high = _limits(Metric("accuracy"), [curve], error=30.0)
    assert low == 0.0
    assert high < 105


def test_sets_have_their_own_plots_and_runs_without_scores_none(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", "method=fedavg")
    make_run("b", "method=fedavg", "task.test_rows=10", "privacy=none")
    empty = [{"round": 1, "phases": [], "eval": None, "void": False, "epsilon_max": 1.0}]
    make_run("c", "method=fedavg", "task.test_rows=20", rounds=empty, summary={"metrics": None})
    drawn = draw(compare([tmp_path / "runs"]))
    names = sorted([p.name for p in group] for group in drawn)
    assert names == [
        [],
        ["accuracy-by-round-1", "accuracy-by-epsilon-1", "accuracy-by-bytes-1"],
        ["accuracy-by-round-3", "accuracy-by-bytes-3"],
    ]
