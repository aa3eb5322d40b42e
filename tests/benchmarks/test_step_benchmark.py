"""The harness of `make bench` on tiny models: every variant computes the same, and the table says what was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import device, profiling, step, suite, table, targets
from benchmarks.check import WrongStepError, check
from benchmarks.measure import CpuClock, Ratio, in_turns
from benchmarks.memory import process_peaks
from benchmarks.models import GPT2_SMALL, LLAMA_512, ROBERTA_BASE, Case, Shape, make_workload
from benchmarks.opacus_steps import Hooks
from benchmarks.steps import Mechanism, Plain, Private
from benchmarks.table import Cell, Row
from benchmarks.variants import GHOST, HOOKS, HSIP, ONLY_B, PLAIN, PRIVET, TWO, VARIANTS

# Opacus and the first LoRA layer, see benchmarks/opacus_steps.py; pytest resets the filter there.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def tiny(shape: Shape, **sizes: float) -> Shape:
    return replace(shape, depth=2, vocabulary=60, settings={**shape.settings, **sizes})


# Opacus adds 1e-6 to norms, which must be small beside them: larger weights than 0.02.
ROBERTA = tiny(
    ROBERTA_BASE, hidden_size=16, num_attention_heads=2, intermediate_size=32, initializer_range=0.4
)
GPT2 = tiny(GPT2_SMALL, n_embd=16, n_head=2)
LLAMA = tiny(LLAMA_512, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
CASES = (Case(ROBERTA, 4, 6), Case(ROBERTA, 4, 6, head=True), Case(GPT2, 4, 6), Case(LLAMA, 4, 6))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_variants_compute_the_same_gradient(case: Case) -> None:
    assert check(make_workload(case)) < 1e-4


def test_a_wrong_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Hooks.compute

    def wrong(self: Hooks) -> None:
        right(self)
        for parameter in self.leaves.values():
            assert parameter.grad is not None
            parameter.grad *= 1.001

    monkeypatch.setattr(Hooks, "compute", wrong)
    with pytest.raises(
        WrongStepError, match=r"Opacus hooks, two factors, unclipped: .*lora_A.* off by 1\.0e-03"
    ):
        check(make_workload(CASES[0]))


def test_a_wrong_clip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_bound(work: object, mechanism: Mechanism, **settings: bool) -> Hooks:
        return Hooks(work, replace(mechanism, clip=0.9 * mechanism.clip), **settings)  # type: ignore[arg-type]

    variants = tuple(replace(v, build=other_bound) if v.key == (TWO, HOOKS) else v for v in VARIANTS)
    monkeypatch.setattr("benchmarks.check.PRIVATE", [v for v in variants if v.engine != PLAIN])
    with pytest.raises(WrongStepError, match="Opacus hooks, two factors, clipped"):
        check(make_workload(CASES[0]))


def test_copies_share_frozen_weights_and_nothing_that_trains() -> None:
    work = make_workload(CASES[1])
    one, other = dict(work.copy().named_parameters()), dict(work.copy(train_a=False).named_parameters())
    for name, parameter in work.model.named_parameters():
        shared = not parameter.requires_grad
        assert (one[name] is parameter) == (other[name] is parameter) == shared
        assert one[name].requires_grad == parameter.requires_grad
        assert other[name].requires_grad == (parameter.requires_grad and "lora_A" not in name)


def test_a_causal_loss_is_the_mean_over_an_examples_own_tokens() -> None:
    work = make_workload(CASES[2])
    ids = work.inputs["input_ids"]
    for i, loss in enumerate(work.losses(work.model)):
        logits = work.model(input_ids=ids[i : i + 1]).logits[0]
        own = [-logits[t].log_softmax(0)[ids[i, t + 1]] for t in range(ids.shape[1] - 1)]
        torch.testing.assert_close(loss, torch.stack(own).mean())


def test_a_shallow_causal_model_has_a_small_vocabulary() -> None:
    # Two of eight layers: a quarter of the tokens. A classifier's vocabulary costs nothing and stays.
    assert make_workload(Case(replace(LLAMA, depth=8), 2, 4), 2).model.config.vocab_size == 15
    assert make_workload(Case(replace(ROBERTA, depth=8), 2, 4), 2).model.config.vocab_size == 60


class _Script:
    """A clock that reads what it is told to."""

    names = ("cpu",)

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self._left: dict[str, Iterator[float]] = {k: iter(v) for k, v in seconds.items()}
        self.order: list[str] = []

    def call(self, key: str) -> Callable[[], None]:
        return lambda: self.order.append(key)

    def time(self, call: Callable[[], None]) -> tuple[float, ...]:
        call()
        return (next(self._left[self.order[-1]]),)


def test_ratios_are_taken_within_a_turn() -> None:
    clock = _Script({"a": [1.0, 2.0, 4.0], "b": [1.1, 2.4, 4.0]})
    times = in_turns({k: clock.call(k) for k in "ab"}, 3, clock)
    assert times.median("a", "cpu") == 2.0
    assert times.ratio("b", "a", "cpu") == Ratio(pytest.approx(1.1), pytest.approx(1.05), pytest.approx(1.15))
    assert sorted(clock.order[:2]) == ["a", "b"]  # does not count
    assert len(clock.order) == 8


def test_process_time_does_not_count_waiting() -> None:
    cpu, wall = CpuClock().time(lambda: time.sleep(0.05))
    assert wall >= 0.05
    assert cpu < 0.04


def test_the_table_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--turns", "2", "--no-memory", "--only", "head", "--layers", "1"]
    step.main([*argv, "--json", str(tmp_path / "a/b.json"), "--markdown", str(tmp_path / "b.md")], CASES)
    report = json.loads((tmp_path / "a/b.json").read_text())
    assert [row["method"] for row in report["rows"]] == ["two factors", ONLY_B, "B only, clip on dW", HSIP]
    assert {row["case"] for row in report["rows"]} == {"RoBERTa-base 4x6, head"}
    engines = [[cell["engine"] for cell in row["cells"]] for row in report["rows"]]
    assert engines == [[PRIVET, HOOKS, GHOST], [PRIVET, HOOKS, GHOST], [PRIVET], [PRIVET]]
    for row in report["rows"]:
        assert row["layers"] == 1
        assert row["cells"][0]["time"].keys() == {"cpu", "wall"}
        assert 0 < row["cells"][0]["noise"] < 1
    assert report["machine"]["torch"] == torch.__version__
    lines = (tmp_path / "b.md").read_text().splitlines()
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1
    assert "fastDP: not measured" in capsys.readouterr().out


def test_check_and_profile_time_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--check", "--only", "GPT"], CASES)
    assert "GPT-2-small 4x6: gradients agree to" in capsys.readouterr().err
    step.main(["--profile", "--only", "GPT"], CASES)
    shown = capsys.readouterr().out
    assert shown.count("ms a step against the non-private step") == 4
    assert "aten::bmm" in shown


def test_a_profile_shows_what_a_step_does_more() -> None:
    x = torch.randn(200, 200)
    shown = profiling.difference(lambda: [x.sum(), x @ x][0], lambda: x.sum(), steps=2, lines=3)
    assert "aten::mm" in shown


def cell(engine: str, time: float, peak: float, noise: float | None = None) -> Cell:
    return Cell(engine, 1.0, {"cpu": Ratio(time, time - 0.01, time + 0.01)}, noise, peak, peak)


def row(method: str, *cells: Cell) -> Row:
    return Row("model", 2, method, 1.0, 10**6, cells)


def test_misses_of_every_kind() -> None:
    good = row(TWO, cell(PRIVET, 1.05, 1.02, 0.02), cell(HOOKS, 1.04, 1.02), cell(GHOST, 1.5, 1.02))
    assert targets.misses([good, row(HSIP, cell(PRIVET, 1.10, 1.10, 0.0))]) == []
    bad = row(ONLY_B, cell(PRIVET, 1.06, 1.04, 0.03), cell(HOOKS, 1.03, 1.02), cell(GHOST, 1.4, 1.04))
    assert targets.misses([bad]) == [
        "model, B only, clip on dB: time 1.060, at most 1.05",
        "model, B only, clip on dB: peak memory 1.040, at most 1.02",
        "model, B only, clip on dB: noise takes 3.0% of the step, at most 2%",
        "model, B only, clip on dB: slower than Opacus hooks: 1.060 against 1.030",
        "model, B only, clip on dB: 1.32 times faster than ghost clipping, at least 1.4",
        "model, B only, clip on dB: more memory than Opacus hooks: 1.040 against 1.020",
    ]
    assert len(table.text([good, bad]).splitlines()) == 3


def test_peaks_of_memory_see_what_a_step_holds() -> None:
    # Activations of 64 x 64 tokens x 4 layers against a model of a few kilobytes.
    case = Case(replace(ROBERTA, depth=4), 64, 64, head=True)
    peaks = process_peaks(case, None, [(TWO, PLAIN), (TWO, PRIVET)], steps=1)
    plain, private = peaks[TWO, PLAIN], peaks[TWO, PRIVET]
    one = 64 * 64 * 16 * 4  # bytes of one activation
    assert 4 * 8 * one < plain.above < 100 * 4 * one
    assert plain.total > plain.loaded > 50 * 2**20
    assert 0.8 < private.above / plain.above < 1.3


def test_a_noise_call_takes_the_noise_alone() -> None:
    work = make_workload(CASES[0])
    private = Private(work, Mechanism(1e6, 0.0))
    before = private.gradients()
    private.noise()
    assert {n: p.grad for n, p in private.leaves.items()} == dict.fromkeys(private.leaves)
    for name, gradient in private.gradients().items():
        torch.testing.assert_close(gradient, before[name], rtol=0, atol=0)
    times = suite.measure({(TWO, PRIVET): private, (TWO, PLAIN): Plain(work, Mechanism())}, 1, CpuClock())
    assert times.median((TWO, "noise"), "cpu") < times.median((TWO, PRIVET), "cpu")


def test_without_a_gpu_the_device_table_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.main([])
    assert capsys.readouterr().out == "benchmarks.device: no CUDA GPU here, nothing to measure\n"


def test_the_device_table_rehearsed_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "REHEARSAL", replace(device.REHEARSAL, cases=CASES[1:2], shares=(0.5, 1.0)))
    monkeypatch.setattr(device, "two_clients", lambda share, overrides: 3 * share)
    device.main(["--cpu-rehearsal", "--turns", "1", "--json", str(tmp_path / "device.json")])
    report = json.loads((tmp_path / "device.json").read_text())
    assert len(report["rows"]) == 4
    assert report["two_clients_seconds"] == {"0.5": 1.5, "1.0": 3.0}
    assert "two clients, federation.gpus_per_client=0.5: 1.50 s" in capsys.readouterr().out
