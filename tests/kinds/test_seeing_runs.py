"""Tasks with images in whole runs on a tiny LLaVA, and what a run leaves: an adapter that plain PEFT loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, CLIPImageProcessorPil, PreTrainedTokenizerFast

from privet.adapters import adapter_spec, build_model, initial_tensors, initial_values, load_tokenizer
from privet.config import compose
from privet.data.tasks import load_task
from privet.errors import ConfigError, PrivetError
from privet.kinds.catalogue import kind_of
from server_app.audit import audit
from server_app.harness import Settings, benchmark
from server_app.rescore import rescore
from tests.kinds.vision import (
    COLOURS,
    SIDE,
    captions_task,
    questions_task,
    small_vision,
    write_captions,
)

PLAIN = [
    "privacy=none",
    "train.optimizer=adamw",
    "train.lr=0.02",
    "train.head_lr=0.02",
    "train.local_steps=4",
]


@pytest.fixture
def tasks(tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> dict[str, list[str]]:
    """Overrides of a run for every kind with images."""
    base = small_vision(tmp_path, make_tokenizer())
    return {
        "captioning": [*base, *captions_task(tmp_path / "captions")],
        "visual_question": [*base, *questions_task(tmp_path / "questions")],
    }


@pytest.mark.parametrize("kind", ["captioning", "visual_question"])
def test_a_model_learns_what_it_sees(kind: str, run: Callable[..., Any], tasks: dict[str, list[str]]) -> None:
    """Prompts are all alike, so what is written right is what was seen: blind, it is a third at most."""
    pytest.importorskip("sacrebleu")
    writing = "task.writing={measures: [bleu, exact_match], beams: 1, max_tokens: 8, rows: null}"
    result = run(
        *tasks[kind], *PLAIN, writing, "method=fedavg", "federation.rounds=8", "train.batch_size=8",
        "evaluate_every=4",
    )  # fmt: skip
    assert result.error is None
    scores = [r["eval"] for r in result.rounds if r["eval"]]
    assert scores[-1]["loss"] < scores[0]["loss"]
    assert scores[-1]["exact_match"] == 1
    assert "exact_match" not in scores[0]
    assert result.json("summary.json")["status"] == "completed"


@pytest.mark.parametrize(
    ("method", "more"),
    [("fedavg", ["train.dtype=bfloat16"]), ("fedrand", []), ("unilora", ["method.dimension=64"])],
)
def test_the_budget_holds(
    method: str, more: list[str], run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    result = run(*tasks["captioning"], f"method={method}", "privacy.epsilon=3", *more)
    assert result.error is None
    assert 2.5 < result.json("privacy.json")["max_epsilon"] <= 3
    assert result.rounds[-1]["train_loss"] is None
    assert math.isfinite(result.rounds[-1]["eval"]["loss"])
    assert result.rounds[-1]["phases"][-1]["failed"] == []


def test_a_projector_travels_as_a_head_and_is_counted_apart(
    run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    results = {
        p: run(*tasks["captioning"], *PLAIN, "method=fedrand", f"model.projector={p}")
        for p in ("trained", "frozen")
    }
    saved = {p: load_file(r.path / "adapter" / "adapter_model.safetensors") for p, r in results.items()}
    names = [n for n in saved["trained"] if "multi_modal_projector" in n]
    assert len(names) == 4
    assert not [n for n in saved["frozen"] if "projector" in n]
    counts = {p: r.json("communication.json")["totals"] for p, r in results.items()}
    assert counts["trained"]["upload_numbers_adapter"] == counts["frozen"]["upload_numbers_adapter"] > 0
    assert counts["frozen"]["upload_numbers_head"] == 0
    assert counts["trained"]["upload_numbers_head"] == 2 * (32 * 32 + 32) * 3 * 2  # clients and rounds
    config = compose([*tasks["captioning"], "method=fedrand"])
    start = initial_tensors(adapter_spec(config), 0, config.head)
    for name in names:
        moved = saved["trained"][name] - start[name.removeprefix("base_model.model.")]
        assert bool(moved.any())


def saved_base(overrides: list[str], folder: Path) -> list[str]:
    """Save a tiny LLaVA as a user's own folder is, and return overrides that use it."""
    config = compose([*overrides, "model.projector=frozen"])
    model = build_model(config)
    plain = AutoModelForImageTextToText.from_config(model.module.backbone.config)
    own = dict(model.module.backbone.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(own[name] if name in own else own[name.replace(".weight", ".base_layer.weight")])
    plain.save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    kept = [o for o in overrides if not o.startswith(("model=", "model."))]
    return [
        *kept, "model=pretrained", f"model.path={folder}", "model.projector=trained", "model.max_length=24",
        "model.lora.targets=[q_proj,v_proj]", "model.lora.rank=2",
    ]  # fmt: skip


def test_a_trained_projector_starts_from_the_models_own(tmp_path: Path, tasks: dict[str, list[str]]) -> None:
    overrides = saved_base(tasks["captioning"], tmp_path / "base")
    config = compose(overrides)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    start, model = initial_values(config), build_model(config)
    for name in adapter_spec(config).head:
        torch.testing.assert_close(start[name], whole.get_parameter(name).detach(), rtol=0, atol=0)
        torch.testing.assert_close(model.read([name])[name], start[name], rtol=0, atol=0)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    # As older checkpoints of the class call it, and in half precision.
    renamed = {n.removeprefix("model."): v.half() if "projector" in n else v for n, v in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    for name, value in initial_values(config).items():
        if name in adapter_spec(config).head:
            torch.testing.assert_close(value, start[name].half().float(), rtol=0, atol=0)
    save_file({n: v for n, v in renamed.items() if "linear_2.bias" not in n}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"have no model.multi_modal_projector.linear_2.bias of the shape"):
        initial_values(config)


def test_the_adapter_loads_in_plain_peft_and_its_card_says_how(
    tmp_path: Path,
    run: Callable[..., Any],
    tasks: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The card's own lines give the loss that the run's last round had."""
    overrides = saved_base(tasks["captioning"], tmp_path / "base")
    result = run(*overrides, *PLAIN, "method=fedavg")
    assert result.error is None
    card = (result.path / "adapter" / "README.md").read_text()
    monkeypatch.chdir(result.path)
    names: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], names)
    config = compose(overrides)
    kind, tokenizer = kind_of(config), load_tokenizer(config.model)
    rows = kind.tokenise(tokenizer, load_task(config.task).test, 24)
    assert rows.images is not None
    assert rows.prompts is not None
    total, tokens = 0.0, 0
    for i, (ids, given) in enumerate(zip(rows.ids, rows.prompts, strict=True)):
        with torch.no_grad():
            seen = {
                "input_ids": torch.tensor(ids)[None],
                "pixel_values": torch.from_numpy(rows.images.pixels([i])),
            }
            scores = names["model"](**seen).logits[0].log_softmax(-1)
        total -= float(sum(scores[t - 1, ids[t]] for t in range(given, len(ids))))
        tokens += len(ids) - int(given)
    assert result.rounds[-1]["eval"]["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_another_set_of_images_scores_a_finished_run(
    tmp_path: Path, run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    result = run(*tasks["captioning"], *PLAIN, "method=fedavg")
    other = write_captions(tmp_path / "nocaps", len(COLOURS), 500)
    task = [
        "task=nocaps", f"task.path={other}", f"task.test_path={other}", "task.writing=null",
        f"task.image_folder={tmp_path / 'nocaps' / 'images'}", "task.prompt='{image} Where :'",
    ]  # fmt: skip
    found = rescore(result.path, task)
    assert found.scores["examples"] == 2 * len(COLOURS)
    assert found.scores["loss"] > 0
    with pytest.raises(PrivetError, match="trained a captioning model: the harness asks language models"):
        next(benchmark(result.path, Settings(("gsm8k",))))


def test_an_audit_looks_at_images_captions_and_sequences(
    run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    result = run(*tasks["captioning"], *PLAIN, "method=fedrand", "keep_uploads=true", "federation.rounds=2")
    found = audit(result.path, rows=12)
    names = "\n".join(found.membership)
    for place in ("image", "answer", "sequence"):
        assert f"max-renyi-0/{place}/alpha=0.5" in names


def test_an_image_that_breaks_off_is_told_by_its_kind_alone(
    tmp_path: Path, run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    """What a server hears of a row's image while it trains; in a simulation the row's number is in the node's log."""
    import io

    import numpy as np
    from PIL import Image

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    stream = io.BytesIO()
    noise.save(stream, "PNG")
    for file in (tmp_path / "captions" / "train" / "images").glob("*.png"):
        file.write_bytes(stream.getvalue()[:400])
    result = run(*tasks["captioning"], *PLAIN, "method=fedavg")
    text = (result.path / "rounds.jsonl").read_text()
    assert "the node's own log has the reason" in text
    assert "data row" not in text
    assert ".png" not in text


def test_real_nodes_read_images_of_their_own_folders(
    tmp_path: Path, run: Callable[..., Any], tasks: dict[str, list[str]]
) -> None:
    """Under DP a node whose images are missing, break off or lie elsewhere takes part all the same."""
    configs = []
    for i in range(2):
        table = write_captions(tmp_path / f"node{i}", 6, 20 * i)
        moved = table.parent / "elsewhere" / "captions.json"
        moved.parent.mkdir()
        table.rename(moved)
        configs.append(
            {"name": f"n{i}", "data-path": str(moved), "store": str(tmp_path / f"store{i}"),
             "image-folder": str(table.parent / "images")}
        )  # fmt: skip
    pictures = sorted((tmp_path / "node1" / "images").glob("*.png"))
    pictures[0].unlink()
    pictures[1].write_bytes(pictures[1].read_bytes()[:60])
    pictures[2].unlink()
    pictures[2].symlink_to(tmp_path / "node0" / "images" / "0.png")
    result = run(
        *tasks["captioning"], "task.path=none", "method=fedrand", "federation.clients=2", "privacy.epsilon=3",
        nodes=2, node_configs=configs,
    )  # fmt: skip
    assert result.error is None
    assert result.rounds[-1]["phases"][-1]["failed"] == []
    assert {n["node"]: n["examples"] for n in result.json("privacy.json")["nodes"]} == {"n0": 12, "n1": 12}
