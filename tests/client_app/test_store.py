"""The node's store: one holder, atomic files, no damage unseen, safe names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.store import NodeStore
from privet import atomic
from privet.errors import Refusal, StoreError
from privet.privacy.ledger import MECHANISM, Entry

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node-a"


@pytest.fixture
def store(root: Path) -> Iterator[NodeStore]:
    with NodeStore(root, "a") as opened:
        yield opened


def run_python(code: str, **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, **kwargs
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


# --- opening -------------------------------------------------------------------------------------


def test_the_folder_is_private_and_names_its_node(root: Path) -> None:
    with NodeStore(root, "hospital a"):
        pass
    assert root.stat().st_mode & 0o777 == 0o700
    for path in root.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    assert json.loads((root / "node.json").read_text())["value"]["node"] == "hospital a"


def test_a_wider_folder_is_narrowed(root: Path) -> None:
    root.mkdir(mode=0o755)
    with NodeStore(root, "a"):
        assert root.stat().st_mode & 0o777 == 0o700


def test_another_nodes_store_is_refused_and_not_left_locked(root: Path) -> None:
    with NodeStore(root, "a"):
        pass
    with pytest.raises(StoreError, match="belongs to node 'a', not to 'b'"), NodeStore(root, "b"):
        pass
    with NodeStore(root, "a", timeout=0):
        pass


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"sha256":"0","value":{"node":"a"}}'])
def test_a_damaged_marker_is_refused(root: Path, content: bytes) -> None:
    with NodeStore(root, "a"):
        pass
    (root / "node.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"node\.json is damaged"), NodeStore(root, "a"):
        pass


def test_an_edited_marker_is_refused(root: Path) -> None:
    with NodeStore(root, "a") as store:
        store.ledger(1e-5, None)
    text = (root / "node.json").read_text()
    (root / "node.json").write_text(text.replace('"ledger":true', '"ledger":false'))
    with pytest.raises(StoreError, match="damaged"), NodeStore(root, "a"):
        pass


def test_a_lost_marker_is_refused_while_there_is_something_to_lose(root: Path) -> None:
    with NodeStore(root, "a"):
        pass
    (root / "node.json").unlink()
    with NodeStore(root, "a") as store:
        store.save_json("x", 1)
    (root / "node.json").unlink()
    with pytest.raises(StoreError, match=r"node\.json is missing but"), NodeStore(root, "a"):
        pass


def test_a_crash_while_the_store_was_made_is_harmless(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "lock").touch()
    (root / ".node.json.tmp").write_bytes(b'{"torn')
    with NodeStore(root, "a") as store:
        store.save_json("x", 1)


def test_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"), NodeStore(root, "a"):
        pass


def test_a_file_in_its_place_is_one_line(root: Path) -> None:
    root.write_text("")
    with pytest.raises(StoreError, match="cannot be used"), NodeStore(root, "a"):
        pass


@pytest.mark.parametrize("node", ["", "a\nb", "\x00"])
def test_senseless_node_names_are_refused(root: Path, node: str) -> None:
    with pytest.raises(StoreError, match="node name"):
        NodeStore(root, node)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.save_json("x", 1),
        lambda s: s.load_json("x"),
        lambda s: s.load_tensors("x"),
        lambda s: s.save_reply("x", {}, {}),
        lambda s: s.load_reply("x"),
        lambda s: s.ledger(1e-5, None),
    ],
)
def test_nothing_works_outside_of_the_with_statement(root: Path, use: Callable[[NodeStore], Any]) -> None:
    store = NodeStore(root, "a")
    with pytest.raises(StoreError, match="not open"):
        use(store)
    with store:
        pass
    with pytest.raises(StoreError, match="not open"):
        use(store)


# --- one holder ----------------------------------------------------------------------------------


def test_a_second_holder_waits_its_time_and_says_so(root: Path) -> None:
    with NodeStore(root, "a"):
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"held by another process \(waited 0\.2 s\)"):
            NodeStore(root, "a", timeout=0.2).__enter__()
        assert 0.2 <= time.monotonic() - began < 5
    with NodeStore(root, "a", timeout=0):
        pass


def test_entering_twice_is_refused(store: NodeStore) -> None:
    with pytest.raises(StoreError, match="open already"):
        store.__enter__()


def test_another_process_is_kept_out_until_the_holder_dies(root: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from client_app.store import NodeStore\n"
        f"with NodeStore(Path({str(root)!r}), 'a'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(3)\n"
    )
    with run_python(code, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="held by another process"):
            NodeStore(root, "a", timeout=0.1).__enter__()
        holder.stdin.close()
        # The holder dies without releasing anything: the lock goes with it, and who waits gets it.
        with NodeStore(root, "a", timeout=60):
            pass
        assert holder.wait(60) == 3


# --- ledger --------------------------------------------------------------------------------------


def entry(round: int = 1) -> Entry:
    return Entry(
        "run-1", "ffa_lora", round, "train", MECHANISM, 0.016, 0.8, 0.3, 62, 8000, f"request-{round}"
    )


def test_the_ledger_is_kept(root: Path) -> None:
    with NodeStore(root, "a") as store:
        store.ledger(1e-5, 8.0).charge(entry(), run_epsilon=6.0, accountant="rdp")
    with NodeStore(root, "a") as store:
        assert len(store.ledger(1e-5, 8.0).entries) == 1


def test_a_lost_ledger_is_not_replaced(root: Path) -> None:
    with NodeStore(root, "a") as store:
        store.ledger(1e-5, None).charge(entry(), run_epsilon=6.0, accountant="rdp")
    (root / "ledger.jsonl").unlink()
    (root / "ledger.head").unlink()
    with NodeStore(root, "a") as store:
        with pytest.raises(StoreError, match=r"ledger\.jsonl is missing.*restore it from a backup"):
            store.ledger(1e-5, None)
        assert not (root / "ledger.jsonl").exists()


def test_a_crash_between_ledger_and_marker_is_harmless(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: NodeStore, *, ledger: bool) -> None:
        raise KeyboardInterrupt

    with NodeStore(root, "a") as store:
        monkeypatch.setattr(NodeStore, "_write_marker", crash)
        with pytest.raises(KeyboardInterrupt):
            store.ledger(1e-5, None)
        monkeypatch.undo()
    with NodeStore(root, "a") as store:
        store.ledger(1e-5, None).charge(entry(), run_epsilon=6.0, accountant="rdp")


def test_a_crash_between_charge_and_reply(root: Path) -> None:
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from client_app.store import NodeStore\n"
        "from privet.privacy.ledger import Entry\n"
        f"with NodeStore(Path({str(root)!r}), 'a') as store:\n"
        "    ledger = store.ledger(1e-5, None)\n"
        f"    e = Entry('run-1', 'm', 1, 'train', {MECHANISM!r}, 0.016, 0.8, 0.3, 62, 8000, 'request-1')\n"
        "    ledger.charge(e, run_epsilon=2.8, accountant='rdp')\n"
        "    os._exit(9)\n"
    )
    with run_python(code) as process:
        assert process.wait(120) == 9
    with NodeStore(root, "a", timeout=0) as store:
        assert store.load_reply("request-1") is None
        ledger = store.ledger(1e-5, None)
        assert [e.request for e in ledger.entries] == ["request-1"]
        # The work is done anew and would be a second release; the budget of 2.8 pays for one (2.61).
        with pytest.raises(Refusal, match="above the run's") as refusal:
            ledger.charge(entry(), run_epsilon=2.8, accountant="rdp")
        assert refusal.value.kind == "budget"


# --- tensors -------------------------------------------------------------------------------------


def test_tensors_come_back_bit_by_bit(root: Path) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "bf16": torch.randn(5, 3).to(torch.bfloat16),  # case 18
        "scalar": torch.tensor(2.5),  # case 18
        "scalar-bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "half": torch.randn(3).half(),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "int": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 7),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "transposed": base.T,
        "view": base[:, 1],
        "tied": base,
        "grad": torch.nn.Parameter(torch.ones(2)),
        "a/b.c weird näme": torch.ones(1),
    }
    with NodeStore(root, "a") as store:
        assert store.load_tensors("adapter") is None
        store.save_tensors("adapter", tensors)
    with NodeStore(root, "a") as store:
        loaded = store.load_tensors("adapter")
    assert loaded is not None
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor.detach()), name
    assert not loaded["grad"].requires_grad


def test_no_tensors_are_not_nothing(store: NodeStore) -> None:
    store.save_tensors("none", {})
    assert store.load_tensors("none") == {}


def test_saving_again_replaces(store: NodeStore) -> None:
    store.save_tensors("t", {"a": torch.ones(3), "b": torch.ones(3)})
    store.save_tensors("t", {"a": torch.zeros(2)})
    loaded = store.load_tensors("t")
    assert loaded is not None
    assert {k: v.tolist() for k, v in loaded.items()} == {"a": [0.0, 0.0]}


def test_every_flipped_byte_of_a_tensor_file_is_noticed(store: NodeStore, root: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    store.save_tensors("t", tensors)
    path = root / "tensors" / "t.safetensors"
    raw = path.read_bytes()
    for position in range(len(raw)):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
        try:
            loaded = store.load_tensors("t")
        except StoreError:
            continue
        # A flip in the file's padding changes nothing that is stored.
        assert loaded is not None
        assert raw[position : position + 1] == b" "
        assert all(same(loaded[k], tensors[k]) for k in tensors)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:20], lambda b: b + b"x"])
def test_a_torn_tensor_file_is_noticed(
    store: NodeStore, root: Path, damage: Callable[[bytes], bytes]
) -> None:
    store.save_tensors("t", {"a": torch.ones(3)})
    path = root / "tensors" / "t.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"t\.safetensors is damaged"):
        store.load_tensors("t")


def test_a_pickle_is_not_loaded(store: NodeStore, root: Path) -> None:
    store.save_tensors("t", {"a": torch.ones(3)})
    torch.save({"a": torch.ones(3)}, root / "tensors" / "t.safetensors")
    with pytest.raises(StoreError, match="damaged"):
        store.load_tensors("t")


# --- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, -1.5e-300, "ünï", [], {"a": [1, {"b": None}]}, True, 2**70])
def test_json_comes_back(store: NodeStore, value: Any) -> None:
    store.save_json("v", value)
    loaded = store.load_json("v")
    assert loaded == value
    assert type(loaded) is type(value)


def test_missing_json_is_none(store: NodeStore) -> None:
    assert store.load_json("v") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, torch.ones(1), b"x"], ids=repr)
def test_what_is_not_json_is_refused_and_the_old_value_stays(store: NodeStore, value: Any) -> None:
    store.save_json("v", 1)
    with pytest.raises(StoreError, match="'v' cannot be kept as JSON"):
        store.save_json("v", {"x": value})
    assert store.load_json("v") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"value":1}', b"\xff\xfe", b"[" * 10_000])
def test_damaged_json_is_noticed(store: NodeStore, root: Path, content: bytes) -> None:
    store.save_json("v", {"a": 1})
    (root / "json" / "v.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"v\.json is damaged"):
        store.load_json("v")


def test_edited_json_is_noticed(store: NodeStore, root: Path) -> None:
    store.save_json("v", {"max": 1})
    path = root / "json" / "v.json"
    path.write_text(path.read_text().replace('"max":1', '"max":9'))
    with pytest.raises(StoreError, match="damaged"):
        store.load_json("v")


# --- replies -------------------------------------------------------------------------------------


def test_a_reply_comes_back_whole(store: NodeStore) -> None:
    tensors = {
        "adapter": {"b": torch.randn(2, 3).to(torch.bfloat16), "a": torch.tensor(3.0)},
        "head": {},
        "other": {"b": torch.ones(2)},
    }
    values = {"q": 0.1, "steps": 3, "nested": {"x": [None, "y"]}}
    assert store.load_reply("abc123") is None
    store.save_reply("abc123", tensors, values)
    loaded = store.load_reply("abc123")
    assert loaded is not None
    assert loaded[1] == values
    assert [(r, list(a)) for r, a in loaded[0].items()] == [(r, list(a)) for r, a in tensors.items()]
    assert all(same(loaded[0][r][n], tensors[r][n]) for r in tensors for n in tensors[r])


def test_the_latest_four_replies_of_a_run_are_kept(store: NodeStore) -> None:
    store.save_reply("other", {}, {}, run="run-2")
    for i in range(9):
        store.save_reply(f"r{i}", {}, {"i": i}, run="run-1")
        time.sleep(0.002)
    kept = [i for i in range(9) if store.load_reply(f"r{i}") is not None]
    assert kept == [5, 6, 7, 8]
    assert store.load_reply("other") is not None


def test_the_newest_reply_stays_when_the_clock_goes_back(store: NodeStore, root: Path) -> None:
    for i in range(4):
        store.save_reply(f"r{i}", {}, {})
    for path in (root / "replies").rglob("r*.safetensors"):
        os.utime(path, (4e9, 4e9))
    store.save_reply("new", {}, {})
    assert store.load_reply("new") is not None


def test_a_damaged_reply_is_not_sent(store: NodeStore, root: Path) -> None:
    store.save_reply("abc", {"x": {"y": torch.ones(4)}}, {"steps": 12})
    (path,) = (root / "replies").rglob("abc.safetensors")
    path.write_bytes(path.read_bytes().replace(b"12", b"13"))
    with pytest.raises(StoreError, match="damaged"):
        store.load_reply("abc")


def test_other_tensors_are_not_a_reply(store: NodeStore, root: Path) -> None:
    store.save_reply("abc", {"x": {"y": torch.ones(4)}}, {})
    store.save_tensors("t", {"a": torch.ones(4)})
    (path,) = (root / "replies").rglob("abc.safetensors")
    path.write_bytes((root / "tensors" / "t.safetensors").read_bytes())
    with pytest.raises(StoreError, match="not a stored reply"):
        store.load_reply("abc")


def test_values_that_are_not_json_keep_nothing(store: NodeStore) -> None:
    with pytest.raises(StoreError, match="values cannot be kept as JSON"):
        store.save_reply("abc", {}, {"loss": float("nan")})
    assert store.load_reply("abc") is None


# --- names, atomicity ----------------------------------------------------------------------------

BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a..b",
    ".hidden",
    "a\0",
    "a\n",
    "ä",
    "x" * 200,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_cannot_leave_their_folder(store: NodeStore, root: Path, name: str) -> None:
    before = sorted(root.parent.rglob("*"))
    for use in (
        lambda: store.save_tensors(name, {}),
        lambda: store.load_tensors(name),
        lambda: store.save_json(name, 1),
        lambda: store.load_json(name),
        lambda: store.save_reply(name, {}, {}),
        lambda: store.save_reply("ok", {}, {}, run=name),
        lambda: store.load_reply(name),
    ):
        with pytest.raises(StoreError, match="is not allowed") as error:
            use()
        assert "\n" not in str(error.value)
    assert sorted(root.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "0" * 64, "-x"])
def test_good_names(store: NodeStore, name: str) -> None:
    store.save_json(name, name)
    assert store.load_json(name) == name


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(
    store: NodeStore, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    store.save_json("v", "old")

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, broken, fail)
    with pytest.raises(StoreError, match=r"v\.json cannot be written: No space left"):
        store.save_json("v", "new")
    monkeypatch.undo()
    assert store.load_json("v") == "old"
    store.save_json("v", "newer")
    assert store.load_json("v") == "newer"


def test_a_process_killed_while_writing_leaves_the_old_file(root: Path) -> None:
    with NodeStore(root, "a") as store:
        store.save_tensors("t", {"a": torch.zeros(10)})
    code = (
        "import os, torch\n"
        "from pathlib import Path\n"
        "from client_app.store import NodeStore\n"
        "os.replace = lambda *a: os._exit(7)\n"
        f"with NodeStore(Path({str(root)!r}), 'a') as store:\n"
        "    store.save_tensors('t', {'a': torch.ones(10)})\n"
    )
    with run_python(code) as process:
        assert process.wait(120) == 7
    with NodeStore(root, "a", timeout=0) as store:
        loaded = store.load_tensors("t")
        assert loaded is not None
        assert loaded["a"].tolist() == [0.0] * 10


def test_content_is_synced_before_it_gets_its_name(store: NodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("rename"), replace(*a)))
    store.save_json("v", 1)
    calls.clear()
    store.save_json("v", 2)
    assert calls == ["sync", "rename", "sync"]
