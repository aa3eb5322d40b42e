"""The ledger: charge before release, budgets, damage, crashes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from privet.errors import ConfigError, Refusal, StoreError
from privet.privacy import accounting, ledger
from privet.privacy.accounting import Step, calibrate, epsilon, lifetime_epsilon
from privet.privacy.ledger import MECHANISM, Entry, Ledger, describe

DELTA = 1e-5
REPOSITORY = Path(__file__).resolve().parents[2]


def entry(round: int = 1, **changes: Any) -> Entry:
    values = {
        "run": "run-1",
        "method": "ffa_lora",
        "round": round,
        "phase": "train",
        "mechanism": MECHANISM,
        "q": 0.016,
        "sigma": 0.8,
        "clip": 0.3,
        "steps": 62,
        "declared": 8000,
        "request": f"request-{round}",
    }
    return Entry(**{**values, **changes})


def make(path: Path, *, cap: float | None = None, delta: float = DELTA, node: str = "a") -> Ledger:
    return Ledger(path, delta=delta, max_epsilon=cap, node=node)


def charge(book: Ledger, item: Entry, budget: float = 100.0, accountant: str = "rdp") -> None:
    book.charge(item, run_epsilon=budget, accountant=accountant)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def charged(path: Path) -> Path:
    """A ledger with three entries."""
    book = make(path)
    for round in (1, 2, 3):
        charge(book, entry(round))
    return path


# --- charging and reading ------------------------------------------------------------------------


def test_entries_survive_reopening(path: Path) -> None:
    book = make(path, cap=20.0)
    first, second = entry(1), entry(2, run="run-2", method="fedhsip", q=1.0, sigma=3.25, steps=1)
    charge(book, first)
    charge(book, second)
    again = make(path, cap=20.0)
    assert again.entries == book.entries == (first, second)
    assert again.for_run("run-2") == (second,)
    assert again.runs == ("run-1", "run-2")
    assert again.order == book.order == accounting.filter_order(20.0, DELTA)
    assert first.time.endswith("+00:00")


def test_spent_is_one_accountant_over_all_steps_of_the_run(path: Path) -> None:
    book = make(path)
    assert book.spent("run-1", "rdp") == 0.0
    for round in range(1, 21):
        charge(book, entry(round))
    charge(book, entry(1, run="other", sigma=0.4, request="x"))
    assert book.spent("run-1", "rdp") == pytest.approx(6.3242, abs=1e-4)  # case 4
    assert book.spent("run-1", "prv") == pytest.approx(5.633, abs=2e-3)
    assert book.spent("other", "rdp") == epsilon([Step(0.016, 0.4, 62)], DELTA, "rdp")


def test_epsilon_grows_exactly_when_the_node_takes_part(path: Path) -> None:
    book = make(path)
    seen = [0.0]
    for round in (1, 4, 5):  # case 5: rounds 2 and 3 went to others
        assert make(path).spent("run-1", "rdp") == seen[-1]
        charge(book, entry(round))
        seen.append(book.spent("run-1", "rdp"))
    assert seen == sorted(set(seen))


def test_a_tiny_client_is_charged_for_every_step(path: Path) -> None:
    book = make(path)
    charge(book, entry(q=0.1, sigma=1.0, steps=50, declared=1))  # case 3
    assert sum(e.steps for e in book.entries) == 50
    assert book.spent("run-1", "rdp") == epsilon([Step(0.1, 1.0, 50)], DELTA, "rdp") > 0


def test_an_entry_is_on_disk_when_charge_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    book = make(path)
    synced.clear()
    charge(book, entry())
    assert path.stat().st_ino in synced
    assert path.with_suffix(".head").stat().st_ino in synced
    assert make(path).entries == book.entries


def test_files_are_private(charged: Path) -> None:
    for file in (charged, charged.with_suffix(".head")):
        assert file.stat().st_mode & 0o777 == 0o600


def test_opening_writes_nothing(charged: Path) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in charged.parent.iterdir()}
    make(charged)
    Ledger.load(charged)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in charged.parent.iterdir()} == before


# --- the run's budget ----------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_calibrated_noise_spends_the_budget_and_not_a_step_more(path: Path, accountant: str) -> None:
    sigma = calibrate(0.05, 40, 3.0, DELTA, accountant)
    book = make(path)
    for round in (1, 2, 3, 4):
        charge(book, entry(round, q=0.05, sigma=sigma, steps=10), 3.0, accountant)
    assert 2.99 < book.spent("run-1", accountant) <= 3.0
    before = path.read_bytes()
    with pytest.raises(
        Refusal, match=r"1 steps at q = 0.05 and sigma = .* above the run's 3 at delta"
    ) as refusal:
        charge(book, entry(5, q=0.05, sigma=sigma, steps=1), 3.0, accountant)
    assert refusal.value.kind == "budget"
    assert path.read_bytes() == before
    assert len(book.entries) == 4


def test_the_budget_is_exact_up_to_rounding(path: Path) -> None:
    exact = epsilon([Step(0.016, 0.8, 62)], DELTA, "rdp")
    charge(make(path), entry(), exact * (1 - 0.9e-6))
    with pytest.raises(Refusal, match="above the run's"):
        charge(make(path.with_name("other.jsonl")), entry(), exact * (1 - 1.1e-6))


def test_budgets_of_runs_do_not_mix(path: Path) -> None:
    book = make(path)
    charge(book, entry(1), 2.7)
    charge(book, entry(1, run="run-2", request="x"), 2.7)
    with pytest.raises(Refusal, match="run-2, round 2"):
        charge(book, entry(2, run="run-2", steps=200), 2.7)


@pytest.mark.parametrize(
    ("delta", "budget", "accountant", "match"),
    [
        (DELTA, 50.0, "rdp", "began with privacy.epsilon = 6.0, it cannot go on with 50.0"),
        (1e-2, 6.0, "rdp", "began with privacy.delta = 1e-05"),
        (DELTA, 6.0, "prv", "began with privacy.accountant = rdp"),
    ],
)
def test_a_run_cannot_change_its_budget_on_the_way(
    path: Path, delta: float, budget: float, accountant: str, match: str
) -> None:
    charge(make(path), entry(1), 6.0)
    book = make(path, delta=delta)
    with pytest.raises(Refusal, match=match) as refusal:
        charge(book, entry(2), budget, accountant)
    assert refusal.value.kind == "budget"
    assert len(make(path).entries) == 1


def test_spent_uses_the_delta_of_the_run(path: Path) -> None:
    charge(make(path), entry(1), 6.0)
    other = make(path, delta=1e-3)
    assert other.spent("run-1", "rdp") == epsilon([Step(0.016, 0.8, 62)], DELTA, "rdp")


# --- the node's lifetime -------------------------------------------------------------------------


def test_the_lifetime_counts_every_run(path: Path) -> None:
    # Each run keeps to its own budget; together they do not fit.
    steps = Step(0.016, 0.8, 62)
    order = accounting.filter_order(4.0, DELTA)
    fitting = max(k for k in range(1, 30) if lifetime_epsilon([steps] * k, order, DELTA) <= 4.0)
    assert fitting > 2
    book = make(path, cap=4.0)
    for k in range(fitting):
        charge(make(path, cap=4.0), entry(1, run=f"run-{k}"), 3.0)
    book = make(path, cap=4.0)
    assert book.lifetime() == lifetime_epsilon([steps] * fitting, order, DELTA) <= 4.0
    with pytest.raises(Refusal, match="do not fit in what is left of the node's max-epsilon = 4") as refusal:
        charge(book, entry(1, run="last"), 3.0)
    assert refusal.value.kind == "budget"
    assert len(make(path).entries) == fitting


def test_a_lifetime_refusal_does_not_tell_what_other_runs_spent(path: Path) -> None:
    book = make(path, cap=4.0)
    charge(book, entry(1, run="secret-run", steps=124))
    with pytest.raises(Refusal) as refusal:
        charge(book, entry(1, run="new", steps=2000))
    assert f"{book.lifetime():.3g}" not in str(refusal.value)
    assert "secret-run" not in str(refusal.value)


def test_without_a_cap_only_the_run_counts(path: Path) -> None:
    book = make(path)
    for k in range(5):
        charge(book, entry(1, run=f"run-{k}", sigma=0.4))
    assert book.lifetime() > 20


def test_the_order_stays_when_the_operator_changes_the_cap(path: Path) -> None:
    order = make(path, cap=8.0).order
    charge(make(path, cap=30.0), entry(sigma=0.5), 30.0)
    assert make(path, cap=30.0).order == order
    with pytest.raises(Refusal, match="max-epsilon = 2"):
        charge(make(path, cap=2.0), entry(2, sigma=0.5), 30.0)


def test_a_generous_delta_does_not_loosen_the_lifetime(path: Path) -> None:
    book = make(path, cap=8.0)
    charge(book, entry())
    assert make(path, cap=8.0, delta=0.5).lifetime() == book.lifetime()
    assert make(path, cap=8.0, delta=1e-7).lifetime() > book.lifetime()


def test_what_still_fits(path: Path) -> None:
    book = make(path, cap=8.0)
    charge(book, entry(1), 6.0)
    left = book.remaining_steps("run-1", 0.016, 0.8, 6.0, "rdp")
    spent = Step(0.016, 0.8, 62)
    assert epsilon([spent, Step(0.016, 0.8, left)], DELTA, "rdp") <= 6.0
    assert epsilon([spent, Step(0.016, 0.8, left + 1)], DELTA, "rdp") > 6.0
    charge(book, entry(2, steps=left), 6.0)
    assert book.remaining_steps("run-1", 0.016, 0.8, 6.0, "rdp") == 0
    with pytest.raises(Refusal):
        charge(book, entry(3, steps=1), 6.0)


def test_what_still_fits_is_also_bounded_by_the_lifetime(path: Path) -> None:
    book = make(path, cap=3.0)
    left = book.remaining_steps("new", 0.016, 0.8, 6.0, "rdp")
    assert left == book.remaining_steps("new", 0.016, 0.8, None, "rdp")
    charge(book, entry(steps=left), 6.0)
    assert book.remaining_steps("new", 0.016, 0.8, 6.0, "rdp") == 0


def test_counting_what_fits_ends(path: Path) -> None:
    assert make(path).remaining_steps("new", 0.016, 0.8, None, "rdp") == 1_000_000


# --- repeated requests ---------------------------------------------------------------------------


def test_another_request_for_a_charged_round_is_a_replay(path: Path) -> None:
    book = make(path)
    charge(book, entry(1))
    with pytest.raises(Refusal, match="run-1, round 1: train was charged for another request") as refusal:
        charge(make(path), entry(1, request="forged"))
    assert refusal.value.kind == "replay"
    charge(book, entry(1, phase="warmup", request="other phase"))
    charge(book, entry(1, run="run-2", request="other run"))


def test_a_repeated_request_without_a_stored_reply_is_charged_again(path: Path) -> None:
    book = make(path)
    charge(book, entry(1), 3.0)
    charge(book, entry(1), 3.0)
    assert len(book.entries) == 2
    assert book.spent("run-1", "rdp") == epsilon([Step(0.016, 0.8, 124)], DELTA, "rdp")


def test_and_refused_when_it_does_not_fit_any_more(path: Path) -> None:
    book = make(path)
    charge(book, entry(1, steps=1240), 6.4)
    with pytest.raises(Refusal, match=r"above the run's 6\.4"):
        charge(book, entry(1, steps=1240), 6.4)


def test_a_crash_between_charge_and_reply_leaves_the_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    code = (
        "import os, sys, pathlib\n"
        "from privet.privacy.ledger import Entry, Ledger\n"
        f"book = Ledger(pathlib.Path({str(path)!r}), delta=1e-5, max_epsilon=None, node='a')\n"
        f"e = Entry('run-1', 'm', 1, 'train', {MECHANISM!r}, 0.016, 0.8, 0.3, 62, 8000, 'request-1')\n"
        "book.charge(e, run_epsilon=6.0, accountant='rdp')\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=120)
    assert done.returncode == 9
    book = make(path)
    assert [e.request for e in book.entries] == ["request-1"]
    charge(book, entry(1), 6.0)
    assert len(make(path).entries) == 2


# --- damage --------------------------------------------------------------------------------------


def rewrite(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def edit(line: bytes, **changes: Any) -> bytes:
    body = json.loads(line)
    body["entry"].update(changes)
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda x: [*x[:2], edit(x[2], steps=1), x[3]], "line 3 was changed"),
        (lambda x: [*x[:3], edit(x[3], sigma=80.0)], "line 4 was changed"),
        (lambda x: [x[0], x[2], x[1], x[3]], "line 2 was changed or moved"),
        (lambda x: [x[0], x[1], x[3]], "lost entries: 2 of 3 are left"),
        (lambda x: x[:3], "lost entries: 2 of 3 are left"),
        (lambda x: x[:1], "lost entries: 0 of 3 are left"),
        (lambda x: x[1:], "lost entries: 2 of 3"),
        (lambda x: [x[0], x[1], x[1], x[2], x[3]], "line 3 was changed or moved"),
        (lambda x: [x[0], x[1], x[2].replace(b":62", b": 62"), x[3]], "line 3 was changed"),
        (lambda x: [x[0].replace(b'"order":', b'"order":1'), *x[1:]], "line 1 was changed"),
        (lambda x: [*x[:2], b"", *x[3:]], "line 3 is damaged"),
        (lambda x: [*x[:2], b"\xff\x00" + x[2], x[3]], "line 3 is damaged"),
        (lambda x: [*x[:2], b"[]", x[3]], "line 3 is damaged"),
        (lambda x: [*x[:2], x[2].replace(b"62", b"NaN"), x[3]], "line 3 is damaged"),
    ],
    ids=[
        "edited",
        "last-edited",
        "swapped",
        "middle-lost",
        "end-lost",
        "all-lost",
        "header-lost",
        "doubled",
        "white-space",
        "header-edited",
        "blank",
        "binary",
        "not-an-object",
        "nan",
    ],
)
def test_damage_is_found(charged: Path, damage: Any, match: str) -> None:
    rewrite(charged, damage(charged.read_bytes().splitlines()))
    for open_it in (lambda: make(charged), lambda: Ledger.load(charged)):
        with pytest.raises(StoreError, match=match) as error:
            open_it()
        assert "\n" not in str(error.value)


def test_a_consistently_recomputed_end_does_not_match_the_head(charged: Path) -> None:
    # Rolled back to two entries and grown again: every line is right by itself.
    keep = charged.read_bytes().splitlines()[:3]
    head = charged.with_suffix(".head").read_bytes()
    rewrite(charged, keep)
    charged.with_suffix(".head").unlink()
    previous = json.loads(keep[2])["check"]
    forged, _ = ledger._line(
        {"entry": dataclasses.asdict(entry(3, steps=1)), "budget": json.loads(keep[2])["budget"]}, previous
    )
    charged.write_bytes(charged.read_bytes() + forged)
    charged.with_suffix(".head").write_bytes(head)
    with pytest.raises(StoreError, match=r"does not belong to ledger\.head"):
        make(charged)


def test_an_acknowledged_line_that_is_torn_is_lost(charged: Path) -> None:
    charged.write_bytes(charged.read_bytes()[:-40])
    with pytest.raises(StoreError, match="lost entries: 2 of 3"):
        make(charged)


def test_a_line_torn_while_it_was_written_can_be_deleted(charged: Path) -> None:
    whole = charged.read_bytes()
    charged.write_bytes(whole + b'{"budget":{"accoun')
    with pytest.raises(
        StoreError, match="incomplete line; its charge was never acknowledged: delete that line"
    ):
        make(charged)
    charged.write_bytes(whole)
    assert len(make(charged).entries) == 3


def test_a_crash_before_the_head_was_written_keeps_the_longer_ledger(path: Path) -> None:
    book = make(path)
    charge(book, entry(1))
    head = path.with_suffix(".head").read_bytes()
    charge(book, entry(2))
    path.with_suffix(".head").write_bytes(head)
    book = make(path)
    assert len(book.entries) == 2
    charge(book, entry(3))
    assert len(make(path).entries) == 3


def test_a_lost_ledger_is_not_replaced(charged: Path) -> None:
    charged.unlink()
    with pytest.raises(StoreError, match=r"is missing although ledger\.head exists"):
        make(charged)


def test_a_lost_head_is_noticed(charged: Path) -> None:
    charged.with_suffix(".head").unlink()
    with pytest.raises(StoreError, match=r"ledger\.head is missing"):
        make(charged)


def test_a_crash_while_the_ledger_was_made_is_harmless(path: Path) -> None:
    make(path)
    path.with_suffix(".head").unlink()
    charge(make(path), entry(1))
    assert len(make(path).entries) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\n", b"{}\n", b'{"check":"00"}\n', b"\x80\n"])
@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.head"])
def test_garbage_is_not_a_ledger(charged: Path, name: str, content: bytes) -> None:
    (charged.parent / name).write_bytes(content)
    with pytest.raises(StoreError):
        make(charged)


def test_another_format_is_named(path: Path) -> None:
    header = {"format": "privet-ledger", "version": 2, "node": "a", "delta": 1e-5, "order": 4.0}
    line, _ = ledger._line({**header, "max_epsilon": None, "created": "now"}, "")
    path.write_bytes(line)
    with pytest.raises(StoreError, match="not a ledger of version 1: privet-ledger 2"):
        make(path)


def test_an_entry_of_an_unknown_mechanism_is_refused(path: Path) -> None:
    book = make(path)
    body = {"entry": {**dataclasses.asdict(entry()), "mechanism": "laplace"}, "budget": {}}
    line, _ = ledger._line(body, book._check)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(StoreError, match="line 2 is not an entry that this version can account"):
        make(path)


def test_another_nodes_ledger_is_refused(charged: Path) -> None:
    with pytest.raises(StoreError, match="ledger of node 'a', not of 'b'"):
        make(charged, node="b")


def test_two_writers_are_noticed(path: Path) -> None:
    one, two = make(path), make(path)
    charge(one, entry(1))
    with pytest.raises(StoreError, match="changed by another process"):
        charge(two, entry(2))
    assert len(make(path).entries) == 1


@pytest.mark.parametrize("short", [True, False])
def test_a_full_disk_leaves_a_readable_ledger(
    charged: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    book = make(charged)
    before = charged.read_bytes()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if short:
            return write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match=r"cannot be written: .*space"):
        charge(book, entry(4))
    monkeypatch.undo()
    assert charged.read_bytes() == before
    charge(book, entry(4))
    assert len(make(charged).entries) == 4


def test_a_failing_sync_is_no_charge(charged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = make(charged)
    calls = []

    def broken(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StoreError, match="cannot be written"):
        charge(book, entry(4))
    monkeypatch.undo()
    assert len(make(charged).entries) == len(book.entries) == 3


def test_a_head_that_cannot_be_written_leaves_the_charge(
    charged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = make(charged)

    def broken(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(ledger, "write_atomic", broken)
    with pytest.raises(StoreError, match="full"):
        charge(book, entry(4))
    assert len(make(charged).entries) == len(book.entries) == 4


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        make(tmp_path / "missing" / "ledger.jsonl")


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"q": 0.0},
        {"q": 1.1},
        {"q": float("nan")},
        {"q": "0.1"},
        {"sigma": 0.0},
        {"sigma": float("inf")},
        {"sigma": True},
        {"clip": -1.0},
        {"steps": 0},
        {"steps": 2.5},
        {"steps": True},
        {"declared": 0},
        {"round": -1},
        {"run": ""},
        {"request": None},
        {"mechanism": "gaussian"},
    ],
    ids=str,
)
def test_bad_entries_name_the_field(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"ledger entry: {next(iter(changes))} = "):
        entry(**changes)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf"), 0.001])
def test_bad_caps_make_no_ledger(path: Path, cap: float) -> None:
    with pytest.raises(ConfigError, match="max-epsilon"):
        make(path, cap=cap)
    assert not path.exists()


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan")])
def test_bad_deltas_make_no_ledger(path: Path, delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        make(path, delta=delta)
    assert not path.exists()


@pytest.mark.parametrize(("budget", "accountant"), [(0.0, "rdp"), (float("nan"), "rdp"), (6.0, "magic")])
def test_bad_budgets_charge_nothing(path: Path, budget: float, accountant: str) -> None:
    book = make(path)
    with pytest.raises(ConfigError):
        charge(book, entry(), budget, accountant)
    assert make(path).entries == ()


# --- describe ------------------------------------------------------------------------------------


def test_describe_is_plain_json_and_says_what_matters(path: Path) -> None:
    book = make(path, cap=8.0)
    charge(book, entry(1), 6.0)
    charge(book, entry(2), 6.0)
    told = json.loads(json.dumps(describe(Ledger.load(path)), allow_nan=False))
    assert told == describe(book)
    assert told["adjacency"] == "add/remove one row"
    assert told["mechanism"] == MECHANISM
    assert (told["node"], told["delta"], told["max_epsilon"], told["entries"]) == ("a", DELTA, 8.0, 2)
    assert told["lifetime_epsilon"] + told["lifetime_left"] == pytest.approx(8.0)
    (run,) = told["runs"]
    assert (run["rounds"], run["steps"], run["budget"], run["methods"]) == (2, 124, 6.0, ["ffa_lora"])
    assert run["epsilon"] == epsilon([Step(0.016, 0.8, 124)], DELTA, "rdp")
    assert run["fits"] == book.remaining_steps("run-1", 0.016, 0.8, 6.0, "rdp") > 0


def test_describe_an_empty_ledger(path: Path) -> None:
    told = describe(make(path))
    assert (told["runs"], told["lifetime_epsilon"], told["lifetime_left"]) == ([], 0.0, None)


def test_load_needs_a_ledger(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(StoreError, match="no such file"):
            Ledger.load(path)
    assert list(tmp_path.iterdir()) == []
