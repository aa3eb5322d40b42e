"""``privet purge``, ``status`` and ``stop``: what they ask of whom, and what they print."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from client_app.store import NodeStore
from privet import operate
from privet.cli import main
from privet.errors import PrivetError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with NodeStore(root, "north") as opened:
        opened.ledger(1e-5, None)
        for run in ("old", "new"):
            opened.save_json(f"run-{run}", {"config": "c", "code": "d", "round": 1})
            opened.save_json(f"secret-{run}", {"secret": 1})
    for path in (root / "json").glob("*old.json"):
        os.utime(path, (time.time() - 5 * 86400,) * 2)
    return root


def test_purge(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["purge", str(store), "--dry-run"]) == 0
    assert "would remove run old: " in capsys.readouterr().out
    assert main(["purge", "--node-config", f'name="north" data-path="/x.csv" store="{store}"']) == 0
    out = capsys.readouterr().out
    assert "removed run old: " in out
    assert "left run new: it may still be going on" in out
    assert (store / "ledger.jsonl").exists()
    assert not (store / "json" / "secret-old.json").exists()
    assert main(["purge", str(store), "--run", "new", "--force"]) == 0
    assert main(["purge", str(store)]) == 0
    assert capsys.readouterr().out.endswith("nothing to remove\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the store"),
        (["STORE", "--node-config", 'data-path="/x"'], "name the store"),
        (["STORE", "--older-than", "-1"], "--older-than -1 is not allowed"),
        (["STORE", "--run", "absent"], "keeps nothing of a run 'absent'"),
        (["/nowhere"], "is no node's store"),
    ],
)
def test_purge_refuses(
    store: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", *(str(store) if a == "STORE" else a for a in arguments)]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stand in for Flower's command; a connection named prod is the default."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    links = '[superlink.prod]\naddress = "hub:8000"\n[superlink.local]\naddress = ":local:"\n'
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "prod"\n' + links)
    calls: list[tuple[str, ...]] = []
    run = {
        "run-id": "7",
        "status": "finished:failed",
        "status-details": "N/A it\n broke",
        "elapsed": "0:01",
        "fab-id": "p",
    }

    def answer(*arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return {"success": True, "runs": [run]}

    monkeypatch.setattr(operate, "flwr", answer)
    return calls


def test_status_and_stop_ask_the_users_superlink(
    asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "7  finished:failed  0:01  p  it broke\n"
    assert main(["status", "7", "--superlink", "prod", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["run-id"] == "7"
    assert main(["stop", "7"]) == 0
    assert asked == [("list", "prod"), ("list", "prod", "--run-id", "7"), ("stop", "7", "prod")]


def test_flowers_own_local_superlink_is_never_started(
    asked: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--superlink", "local"]) == 2
    assert "'local' is no connection to a deployed SuperLink (there: prod)" in capsys.readouterr().err
    (tmp_path / "config.toml").unlink()
    assert main(["stop", "7"]) == 2
    assert "is missing" in capsys.readouterr().err
    assert main(["stop", "runs/x"]) == 2
    assert asked == []


def test_the_state_of_a_runs_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "config.yaml").write_text("")
    record = {"round": 3, "void": False, "eval": {"accuracy": 0.8125, "rows": None}, "epsilon_max": 2.5}
    (run / "rounds.jsonl").write_text(json.dumps({"round": 2}) + "\n" + json.dumps(record) + "\n")
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out == "one: broken, round 3, accuracy 0.8125, epsilon 2.500\n"
    (run / "summary.json").write_text('{"status": "completed"}')
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert main(["status", str(tmp_path / "none")]) == 2


def test_flowers_own_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "flwr"
    script.write_text(
        '#!/bin/sh\necho \'Listing ...\'\necho \'{"success": false, "error-message": "no such run"}\'\n'
    )
    script.chmod(0o755)
    from privet import launcher

    monkeypatch.setattr(launcher, "command_path", lambda name: str(script))
    with pytest.raises(PrivetError, match="'flwr list' failed: no such run"):
        operate.flwr("list")
    script.write_text("#!/bin/sh\necho 'connection refused' >&2\nexit 1\n")
    with pytest.raises(PrivetError, match="'flwr list' failed: connection refused"):
        operate.flwr("list")
