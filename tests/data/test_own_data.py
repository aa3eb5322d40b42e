"""docs/own-data.md is run as written, with /data put below the test's folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from privet.config import TaskConfig, compose, parse
from privet.data.partition import client_examples, declared_rows
from privet.data.tasks import load_task, load_test

DOC = (Path(__file__).resolve().parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)
COMMANDS = [body for language, _, body in BLOCKS if language == "bash"]
NODES = {name: body for language, name, body in BLOCKS if language == "toml"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The files that the page shows."""
    for language, name, body in BLOCKS:
        if language in ("csv", "json"):
            (tmp_path / name).write_text(body, encoding="utf-8")
    return tmp_path


def shell_words(command: str) -> list[str]:
    """What a shell hands to ``privet`` for this command."""
    script = 'privet() { printf "%s\\0" "$@"; }\n' + command
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split("\0")[:-1]


def test_the_page_has_its_examples() -> None:
    assert len(COMMANDS) == 3
    assert {name for _, name, _ in BLOCKS if name} == {
        "notes.csv",
        "site_0.jsonl",
        "site_1.jsonl",
        "public.jsonl",
        "north.csv",
        "south.csv",
        "west.jsonl",
        "chats.jsonl",
        "photos.csv",
        *NODES,
        "triage.yaml",
    }


@pytest.mark.parametrize(("number", "sizes"), [(0, [4, 4]), (1, None), (2, [3, 2])])
def test_commands_load_and_split(data: Path, number: int, sizes: list[int] | None) -> None:
    verb, *overrides = shell_words(COMMANDS[number].replace("/data/", f"{data}/"))
    assert verb == "check"
    cfg = compose(overrides)
    rows = declared_rows(cfg)
    assert sizes is None or rows == sizes
    assert [len(client_examples(cfg, client)) for client in range(cfg.federation.clients)] == rows
    assert {0, 1} >= set(load_test(cfg.task).labels.tolist())
    assert all(load_test(cfg.task).texts)


def test_the_chats_of_the_page_are_read(data: Path) -> None:
    chats = ["task=instructions", f"task.path={data}/chats.jsonl", f"task.test_path={data}/chats.jsonl"]
    rows = load_task(compose([*chats, "task.text_column=messages", "task.label_column=null"]).task).train
    assert rows.targets == ["Later.", "Now.", "Now."]


def test_the_photos_of_the_page_are_read(data: Path) -> None:
    from PIL import Image

    for i in (17, 18):
        Image.new("RGB", (9, 9), (i, 0, 0)).save(data / f"{i:04}.jpg")
    photos = ["task=coco", f"task.path={data}/photos.csv", f"task.test_path={data}/photos.csv"]
    rows = load_task(compose([*photos, "task.image_column=photo", "task.label_column=note"]).task).train
    assert rows.targets == ["a dressing that is dry", "a rash on the left arm"]


def test_task_file(data: Path) -> None:
    (body,) = [body for _, name, body in BLOCKS if name == "triage.yaml"]
    raw = OmegaConf.to_container(OmegaConf.create(body.replace("/data/", f"{data}/")))
    loaded = load_task(parse(TaskConfig, raw, "task"))
    assert (len(loaded.train), len(loaded.test)) == (8, 4)


def test_the_nodes_of_the_page_read_their_tables(data: Path) -> None:
    """Case 15, as Flower reads the lines that the page shows."""
    from flwr.common.config import parse_config_args

    from client_app.node_config import NodeConfig

    cfg = compose(["task=csv", "task.path=x.csv", "task.labels=[no,yes]", "task.test_rows=1"])
    assert len(NODES) == 3
    texts = set()
    for name, body in NODES.items():
        line = body.replace("/data/", f"{data}/")
        (data / f"{name}.toml").write_text(re.sub(r"(?m) (?=[a-z-]+=)", "\n", line))
        raw = parse_config_args([line.strip()])
        assert parse_config_args([str(data / f"{name}.toml")]) == raw
        node = NodeConfig.read(raw)
        rows = node.examples(cfg)
        assert (node.name, node.declared(len(rows))) == (name, 2)
        assert rows.labels.tolist() == [0, 1]
        texts |= set(rows.texts)
    assert len(texts) == 6
