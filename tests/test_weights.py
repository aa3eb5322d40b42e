"""Base weights: one hash for the same files wherever they lie, and no run over different ones."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from privet import weights
from privet.adapters import load_tokenizer, model_config
from privet.config import Config, compose
from privet.errors import ConfigError, Refusal
from privet.weights import base_weights
from privet.wire import Description
from server_app.agreement import check_base_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(weights.CACHE, str(tmp_path / "cache"))
    weights._remembered.cache_clear()
    return tmp_path / "cache" / "weights.json"


def model_folder(path: Path, value: float = 1.0) -> Path:
    path.mkdir()
    save_file({"w": torch.full((3,), value)}, str(path / "model.safetensors"))
    return path


def config_of(path: Path | None, *overrides: str) -> Config:
    model = ["model=tiny_random"] if path is None else ["model=pretrained", f"model.path={path}"]
    return compose(["method=ffa_lora", *model, *overrides])


def test_the_hash_is_that_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    a, b = model_folder(tmp_path / "a"), model_folder(tmp_path / "b")
    plain = hashlib.sha256((a / "model.safetensors").read_bytes()).hexdigest()
    assert (
        base_weights(config_of(a), fetch=False) == base_weights(config_of(b), fetch=True) == f"sha256:{plain}"
    )
    assert base_weights(config_of(model_folder(tmp_path / "c", 2.0)), fetch=False) != f"sha256:{plain}"


def test_shards_count_in_the_order_of_their_names_and_what_is_not_loaded_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("model-2.safetensors", "model-1.safetensors", "other.safetensors"):
        (folder / name).write_bytes(name.encode())
    index = {"weight_map": {"x": "model-2.safetensors", "y": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = hashlib.sha256(b"model-1.safetensorsmodel-2.safetensors").hexdigest()
    assert base_weights(config_of(folder), fetch=False) == f"sha256:{expected}"
    index["weight_map"]["z"] = "../secret.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside of its folder"):
        base_weights(config_of(folder), fetch=False)


def test_the_files_are_read_once_and_again_when_they_change(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "a")
    first = base_weights(config_of(folder), fetch=False)
    assert cache.stat().st_mode & 0o777 == 0o600

    reads: list[Any] = []
    monkeypatch.setattr(weights, "files_digest", lambda files: reads.append(files) or "0" * 64)
    weights._remembered.cache_clear()  # another process
    assert base_weights(config_of(folder), fetch=False) == first
    assert not reads
    save_file({"w": torch.zeros(5)}, str(folder / "model.safetensors"))
    assert base_weights(config_of(folder), fetch=False) == "sha256:" + "0" * 64
    cache.write_text("[]")
    weights._remembered.cache_clear()
    base_weights(config_of(folder), fetch=False)
    assert len(reads) == 2


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder .* with a .safetensors file"):
        base_weights(config_of(tmp_path / "nothing"), fetch=False)
    hub = compose(["method=ffa_lora", "model=pretrained", "model.path=nobody/nothing"])
    assert base_weights(hub, fetch=False) is None


def nodes(**weights: str) -> dict[str, Description]:
    return {name: Description(name, 10, "c", {}, value) for name, value in weights.items()}


def test_nodes_with_other_weights_than_the_server_stop_the_run_by_name() -> None:
    config = config_of(None)
    own = base_weights(config, fetch=False)
    assert own is not None
    check_base_weights(config, nodes(north=own, south=own))
    with pytest.raises(Refusal, match="east, west have other base weights than the server") as caught:
        check_base_weights(config, nodes(north=own, west="sha256:1", east="sha256:1"))
    assert caught.value.kind == "base-weights"


def test_a_server_without_weights_asks_the_majority(tmp_path: Path) -> None:
    config = config_of(tmp_path / "away")
    check_base_weights(config, nodes(north="sha256:1", south="sha256:1"))
    with pytest.raises(Refusal, match="east has other base weights than most nodes"):
        check_base_weights(config, nodes(north="sha256:1", south="sha256:1", east="sha256:2"))
    with pytest.raises(Refusal, match="north has sha256:1, south has sha256:2"):
        check_base_weights(config, nodes(north="sha256:1", south="sha256:2"))


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    mark = tmp_path / "executed"
    classes = {
        "AutoConfig": "own.OwnConfig",
        "AutoModel": "own.OwnModel",
        "AutoTokenizer": ["own.OwnTokenizer", None],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.T", None]}})
    )
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass OwnConfig: pass\nclass T: pass\n")
    config = config_of(folder)
    with pytest.raises(ConfigError):
        model_config(config.model, 2)
    with pytest.raises(ConfigError):
        load_tokenizer(config.model)
    assert not mark.exists()


def test_no_loader_is_told_to_trust_code() -> None:
    """Every loader says so itself: the libraries' own default asks the person at the terminal."""
    root = Path(__file__).resolve().parents[1]
    loaders = 0
    for package in ("privet", "client_app", "server_app", "strategies"):
        for file in (root / package).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained":
                    said = {k.arg: k.value for k in call.keywords}.get("trust_remote_code")
                    assert isinstance(said, ast.Constant), f"{file}:{call.lineno}"
                    assert said.value is False, f"{file}:{call.lineno}"
                    loaders += 1
    assert loaders >= 3


def test_a_run_does_not_start_with_a_node_that_has_other_weights(run: Any) -> None:
    def tamper(sent: Any, reply: Any) -> Any:
        record = reply.content.get("description")
        if record is not None and record["node"] == "client-2":
            record["weights"] = "sha256:1"
        return reply

    outcome = run("method=ffa_lora", tamper=tamper)
    assert isinstance(outcome.error, Refusal)
    assert "client-2 has other base weights than the server" in str(outcome.error)
    assert not (outcome.path / "nodes").exists()  # nothing was trained or charged
