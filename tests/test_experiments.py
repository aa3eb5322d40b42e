"""Recipes: each is complete, every run of the small ones can be planned, and one of each kind of task runs."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from privet import experiments, runner, sweep
from privet.cli import main
from privet.config import compose
from privet.errors import ConfigError
from privet.experiments import Recipe
from tests.conftest import Outcome, write_table

NAMES = experiments.names()
SMALL = [name for name in NAMES if name.endswith("_small")]
# Weights that a fresh checkout has not got.
STAND_INS = {"smollm2": "tiny_causal", "captioner": "tiny_vision"}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `data/` as the recipes' headers ask for it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    for name in ("sst2", "mnli", "e2e", "gsm8k", "coco"):
        (folder / name).mkdir(parents=True)
    texts = list(csv.DictReader(write_table(tmp_path / "texts.csv", 360).open()))
    for name, rows in (("train", texts[:300]), ("dev", texts[300:])):
        lines = [f"{row['text']}\t{int(row['label'] == 'yes')}" for row in rows]
        (folder / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
        labels = ["entailment", "neutral", "contradiction"]
        pairs = [
            {"text_a": r["text"], "text_b": r["text"], "label": labels[i % 3]} for i, r in enumerate(rows)
        ]
        (folder / "mnli" / f"{name}.json").write_text(json.dumps(pairs))
    for name, rows in (("trainset", 620), ("testset_w_refs", 8)):
        with (folder / "e2e" / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["mr", "ref"])
            writer.writerows([f"name[{i}]", f"{i} is a place."] for i in range(rows))
    questions = [
        {"question": f"How much is {i} and 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
        for i in range(460)
    ]
    (folder / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for split, count in (("train", 24), ("val", 6)):
        write_images(folder / "coco", split, count)
    return tmp_path


def write_images(folder: Path, split: str, count: int) -> None:
    from PIL import Image

    (folder / f"{split}2017").mkdir()
    images, captions = [], []
    for i in range(count):
        Image.new("RGB", (12, 10), (10 * i, 90, 200 - 5 * i)).save(folder / f"{split}2017" / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png"})
        captions += [
            {"id": 2 * i + k, "image_id": i, "caption": f"colour number {i}, again {k}"} for k in range(2)
        ]
    (folder / f"captions_{split}2017.json").write_text(
        json.dumps({"images": images, "annotations": captions})
    )


def given(recipe: Recipe) -> list[str]:
    """A stand-in for the recipe's model where that has to be made or fetched first, and one seed."""
    stand_in = STAND_INS.get(recipe.settings.get("model", ""))
    more = [f"model={stand_in}", "model.lora.rank=2"] if stand_in else []
    return [*more, "seed=1"] if any("seed" in product for product in recipe.sweep) else more


def combinations(name: str, *more: str) -> list[sweep.Combination]:
    recipe = experiments.load(name)
    _, blocks = experiments.unfold([f"experiment={name}", *given(recipe), *more])
    found, errors = sweep.expand(blocks)
    assert errors == []
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_a_person_has_to_know(name: str) -> None:
    text = experiments.source(name).read_text()
    recipe = experiments.load(name)
    for part in ("Paper", "Open", "Needs", "Launch"):
        assert len(re.findall(rf"^# {part}:", text, re.MULTILINE)) == 1, part
    assert recipe.title.endswith(".")
    assert recipe.needs
    assert (recipe.command or f"experiment={name}") in text
    assert name.removesuffix("_small") in NAMES
    assert f"{name.removesuffix('_small')}_small" in NAMES
    for used in re.findall(r"runs/(\w+)/", text) + re.findall(r"see (\w+)\.", text):
        assert used in (name, name.removesuffix("_small"))
    if recipe.command:
        module = recipe.command.split()[2]
        assert Path(*module.split(".")).with_suffix(".py").name in {
            p.name for p in Path("benchmarks").glob("*.py")
        }


def one_at_a_time(recipe: Recipe) -> Iterator[list[str]]:
    """Yield the overrides of every product's first run, and of those that differ from it in one value."""
    for product in recipe.sweep or ({},):
        first = {**recipe.settings, **{key: values[0] for key, values in product.items()}}
        yield _overrides(first)
        for key, values in product.items():
            for value in values[1:]:
                yield _overrides({**first, key: value})


def _overrides(settings: dict[str, str]) -> list[str]:
    # Without privacy a sweep leaves out what belongs to it.
    public = settings.get("privacy") == "none"
    return [f"{k}={v}" for k, v in settings.items() if not (public and k.startswith("privacy."))]


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_recipe_is_valid(name: str) -> None:
    recipe = experiments.load(name)
    for overrides in one_at_a_time(recipe) if not recipe.command else []:
        compose(overrides)


def test_the_small_recipes_can_be_planned(data: Path) -> None:
    """The first run of each, by what `--dry-run` plans with."""
    runs = {}
    for recipe in (experiments.load(name) for name in SMALL):
        if not recipe.command:
            settings = dict(text.split("=", 1) for text in next(one_at_a_time(recipe)))
            overrides = [*(f"{k}={v}" for k, v in settings.items()), *given(recipe)]
            runs[recipe.name] = runner.absolute(overrides, compose(overrides))[0]
    plans = runner.check(list(runs.values())).plans
    assert {name: p.error for name, p in zip(runs, plans, strict=True) if p.error} == {}


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("fedhsip_table1_small", ["method=ffa_lora", "privacy=dp", "privacy.epsilon=6", "model=tiny_random"]),
        ("fedhsip_table3_small", ["method=fedhsip", "task.writing.rows=4"]),
        ("fedask_13b_small", ["method=fedask", "privacy=dp"]),
        ("fedrand_table4_small", ["method=fedrand"]),
    ],
)
def test_one_of_each_kind_of_task_runs(
    name: str, choice: list[str], data: Path, run: Callable[..., Outcome]
) -> None:
    rounds = 3 if "fedhsip" in choice[0] else 2
    found = combinations(
        name, *choice, f"federation.rounds={rounds}", "train.local_steps=1", "train.batch_size=4"
    )
    outcome = run(*found[0].overrides, nodes=found[0].config.federation.clients, bare=True)
    assert outcome.error is None
    assert outcome.json("summary.json")["status"] == "completed"
    assert outcome.json("summary.json")["metrics"]
    assert [r["void"] for r in outcome.rounds] == [False] * rounds


# --- what stands on the command line ---------------------------------------------------------------


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(experiments, "FOLDER", tmp_path)
    (tmp_path / "one.yaml").write_text(
        "# One.\nsettings: {task: tweets, model: tiny_random, train.lr: 0.5, task.labels: [a b, c]}\n"
    )
    (tmp_path / "many.yaml").write_text(
        """# Many.
# Needs:     nothing
settings: {model: tiny_random, method: fedrand, privacy: none}
sweep:
  - method.rho: [0.3, 0.5]
    seed: [1, 2]
  - method.normalise: [false]
    seed: [1, 2]
  - method.rho: [0.5]
    seed: [2]
"""
    )
    (tmp_path / "command.yaml").write_text("# A command.\ncommand: python -m benchmarks.lemma1\n")
    return tmp_path


def test_what_a_recipe_stands_for(recipes: Path) -> None:
    texts = experiments.single(["experiment=one", "train.lr=2", "seed=7"])
    assert texts == ["task=tweets", "model=tiny_random", "task.labels=['a b',c]", "train.lr=2", "seed=7"]
    config = compose(texts)
    assert (config.train.lr, config.seed, config.task.labels) == (2.0, 7, ("a b", "c"))


def test_a_sweep_is_the_union_of_its_products(recipes: Path) -> None:
    found, errors = sweep.expand(experiments.unfold(["experiment=many"])[1])
    assert errors == []
    assert [c.name for c in found] == [
        "method.rho=0.3,seed=1",
        "method.rho=0.3,seed=2",
        "method.rho=0.5,seed=1",
        "method.rho=0.5,seed=2",
        "method.normalise=false,seed=1",
        "method.normalise=false,seed=2",
    ]
    methods = [c.config.method.params for c in found[::2]]
    assert [(m["rho"], m["normalise"]) for m in methods] == [(0.3, True), (0.5, True), (0.5, False)]
    (left,) = sweep.expand(
        experiments.unfold(["experiment=many", "seed=3", "method.rho=0.5", "method.normalise=true"])[1]
    )[0]
    assert (left.config.seed, left.name) == (3, "method.rho=0.5,seed=3")


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (
            [],
            [
                "fedavg 0.1 -",
                "fedavg 0.5 -",
                "fedsvd 0.1 -",
                "fedsvd 0.5 -",
                "fedhsip 0.1 5",
                "fedhsip 0.5 5",
            ],
        ),
        (["method=fedavg"], ["fedavg 0.1 -", "fedavg 0.5 -"]),
        (["method=fedhsip", "train.lr=0.5"], ["fedhsip 0.5 5"]),
        (["method=fedhsip,fedsvd"], ["fedsvd 0.1 -", "fedsvd 0.5 -", "fedhsip 0.1 5", "fedhsip 0.5 5"]),
        (["method=fedprox", "train.lr=0.1"], ["fedprox 0.1 -"]),
        (["method=fedavg,fedprox", "train.lr=0.1"], ["fedavg 0.1 -", "fedprox 0.1 -"]),
        (["train.lr=0.7"], ["fedavg 0.7 -", "fedsvd 0.7 -", "fedhsip 0.7 5"]),
        (["method=fedhsip", "method.warmup_rounds=3", "train.lr=0.1"], ["fedhsip 0.1 3"]),
    ],
)
def test_values_that_are_given_choose_among_a_recipes(
    recipes: Path, given: list[str], runs: list[str]
) -> None:
    (recipes / "table.yaml").write_text(
        """# Table.
settings: {model: tiny_random, privacy: none, federation.rounds: 9}
sweep:
  - {method: [fedavg, fedsvd], train.lr: [0.1, 0.5]}
  - {method: [fedhsip], method.warmup_rounds: [5], train.lr: [0.1, 0.5]}
"""
    )
    found, errors = sweep.expand(experiments.unfold(["experiment=table", *given])[1])
    assert errors == []
    told = [f"{c.config.method.name} {c.config.train.lr:g}" for c in found]
    warm = [c.config.method.params.get("warmup_rounds", "-") for c in found]
    assert [f"{text} {number}" for text, number in zip(told, warm, strict=True)] == runs


def test_a_choice_that_is_replaced_takes_its_settings_with_it(recipes: Path) -> None:
    (recipes / "big.yaml").write_text(
        "# Big.\nsettings: {model: llama2_7b, model.lora.rank: 16, model.max_length: 512, seed: 4}\n"
    )
    assert experiments.single(["experiment=big", "model=tiny_random"]) == ["seed=4", "model=tiny_random"]
    kept = experiments.single(["experiment=big", "model=llama2_7b", "model.lora.rank=8"])
    assert kept == ["model.max_length=512", "seed=4", "model=llama2_7b", "model.lora.rank=8"]


def test_the_folder_has_the_recipes_name(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runner, "check", lambda runs: runner.Checked([runner.CheckedPlan(None, []) for _ in runs], 0)
    )
    found = sweep.prepare(["experiment=many", "seed=1", "method.rho=0.3"], tmp_path / "runs", None)
    assert found.folder == tmp_path / "runs" / "many"
    assert [c.name for c in found.combinations] == ["method.rho=0.3,seed=1", "method.normalise=false,seed=1"]
    assert json.dumps(found.to_list()).count("experiment") == 0  # a run does not depend on the recipe's file


def test_what_is_no_recipe_is_refused(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["run", "experiment=many"], "experiment=many is a sweep: privet run -m experiment=many"),
        (["check", "experiment=manny"], "unknown experiment 'manny' - did you mean 'many'?"),
        (
            ["run", "-m", "experiment=command", "seed=1,2"],
            "trains nothing, its command is: python -m benchmarks.lemma1",
        ),
        (["check", "experiment=one", "experiment=many"], "experiment is set twice"),
        (["experiments", "non"], "unknown experiment 'non'"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    (recipes / "wrong.yaml").write_text("# Wrong.\nsetings: {}\n")
    with pytest.raises(ConfigError, match="did you mean 'settings'"):
        experiments.load("wrong")


def test_the_list_and_one_of_it(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments"]) == 0
    said = capsys.readouterr().out
    assert "many\n    Many.\n    Needs nothing\n" in said
    assert main(["experiments", "--json"]) == 0
    assert [r["name"] for r in json.loads(capsys.readouterr().out)] == ["command", "many", "one"]
    assert main(["experiments", "many"]) == 0
    assert capsys.readouterr().out == (recipes / "many.yaml").read_text()
