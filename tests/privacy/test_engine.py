"""The engine against batches of one, against Opacus, and against everything that could break it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.pytorch_utils import Conv1D

from privet.errors import ConfigError
from privet.privacy.engine import GradientEngine
from privet.privacy.parts import THETA, ProjectedParameters
from tests.privacy.families import (
    DECODER,
    LENGTHS,
    VOCAB,
    Known,
    assert_equal,
    batches_of_one,
    clipped_sum,
    engine_sum,
    losses,
    make_batch,
    make_model,
    norms_of,
    one_of,
    random_projection,
    relative_error,
)


def check_against_batches_of_one(
    model: nn.Module, loss: Callable[..., Tensor] = losses, tolerance: float = 1e-9
) -> None:
    batch = make_batch()
    want = batches_of_one(model, batch, loss)
    norms = norms_of(want)
    clip = float(norms.median())  # some examples are clipped, some are not
    got_norms, got = engine_sum(model, batch, clip, loss)
    torch.testing.assert_close(got_norms.double(), norms, rtol=tolerance, atol=tolerance)
    assert_equal(got, clipped_sum(want, clip), tolerance)


# --- the gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_every_single_example(row: int) -> None:
    """A loss of one example out of a batch leaves that example's gradient, and zeros for the others."""
    model, batch = make_model("bert"), make_batch()
    want = {n: g[row] for n, g in batches_of_one(model, batch).items()}
    only = torch.eye(len(LENGTHS))[row]
    norms, got = engine_sum(model, batch, 1e9, lambda m, b: losses(m, b) * only)
    assert_equal(got, want, 1e-9)
    assert (norms > 0).tolist() == only.bool().tolist()


def test_one_factor_alone() -> None:
    """With A frozen the gradient still flows through it to earlier layers."""
    model = make_model("bert", modules_to_save=None)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    assert all("lora_B" in n for n in GradientEngine(model, clip=1.0).shapes)
    check_against_batches_of_one(model)


def test_a_bias_alone_and_rank_stabilised_scaling() -> None:
    check_against_batches_of_one(make_model("bert", bias="lora_only", use_rslora=True))


def test_lora_dropout() -> None:
    """With the same mask in both passes: only the seed ties them, so the batch is made of one row."""
    model = make_model("bert", lora_dropout=0.5)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(3)
        return losses(m, b)

    batch = make_batch((6,))
    want = batches_of_one(model, batch, loss)
    norms, got = engine_sum(model, batch, 1e9, loss)
    assert_equal(got, {n: g[0] for n, g in want.items()}, 1e-9)
    assert float((norms_of(batches_of_one(model.eval(), batch, loss)) - norms).abs()) > 1e-6


def test_agrees_with_opacus() -> None:
    from opacus import GradSampleModule

    model, batch = make_model("bert"), make_batch()
    norms, got = engine_sum(model, batch, 0.7)
    hooked = GradSampleModule(model, loss_reduction="sum", strict=False)
    losses(hooked, batch).sum().backward()
    samples = {n: p.grad_sample for n, p in model.named_parameters() if p.requires_grad}
    hooked.remove_hooks()
    torch.testing.assert_close(norms, norms_of(samples), rtol=1e-9, atol=0)
    assert_equal(got, clipped_sum(samples, 0.7), 1e-9)


class Net(nn.Module):
    """Embedding -> trained linear layers, for single properties. ``forward`` gives one loss per example."""

    def __init__(self, width: int = 6, pooled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pooled = pooled
        self.embed = nn.Embedding(VOCAB, width).requires_grad_(False)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.double()

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        x: Tensor = self.embed(batch["input_ids"]) * batch["attention_mask"][..., None]
        return x[:, 0] if self.pooled else x

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.inner(self.features(batch)))
        return F.cross_entropy(self.head(h if self.pooled else h.sum(1)), batch["labels"], reduction="none")


class Twice(Net):
    """Every layer runs twice in one pass."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.inner(torch.tanh(self.inner(self.features(batch)))))
        logits = [self.head(v) for v in ((h, 2 * h) if self.pooled else (h.sum(1), h.square().sum(1)))]
        return F.cross_entropy(logits[0] + logits[1].square(), batch["labels"], reduction="none")


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch)
    return out


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", [Net, Twice])
def test_a_layer_used_twice_adds_up(kind: type[Net], pooled: bool) -> None:
    """With one token per example the second use turns kept factors into a matrix."""

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:  # keep the padding that sums see, for rows alone
        return call(m, {k: F.pad(v, (0, 7 - v.shape[1])) if v.dim() == 2 else v for k, v in b.items()})

    check_against_batches_of_one(kind(pooled=pooled), loss)


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), Conv1D(4, 5)])
@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 5), (3, 2, 2, 5)])
def test_inputs_of_any_rank(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer).double()
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    want = {n: [] for n, _ in layer.named_parameters()}
    for row in x:
        gradients = torch.autograd.grad(layer(row[None]).square().sum(), list(layer.parameters()))
        for column, g in zip(want.values(), gradients, strict=True):
            column.append(g)
    samples = {n: torch.stack(g) for n, g in want.items()}
    engine = GradientEngine(layer, clip=2.0)
    with engine.attached():
        layer(x).square().sum().backward()
        norms = engine.accumulate(3).norms
        got = engine.private_sum(Known(), 0.0, 1)
    torch.testing.assert_close(norms, norms_of(samples))
    assert_equal(got, clipped_sum(samples, 2.0), 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, batch = make_model("bert"), make_batch()
    norms, want = engine_sum(model, batch, 0.7)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    got_norms, got = engine_sum(model, batch, 0.7)
    torch.testing.assert_close(got_norms, norms)
    assert_equal(got, want, 1e-12)


def test_reentrant_checkpointing_that_would_cut_the_gradient_is_refused_at_once() -> None:
    model = make_model("bert")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    engine = GradientEngine(model, clip=1.0)
    with pytest.raises(ConfigError, match="bert: re-entrant checkpointing loses"):
        engine.attach()
    model.eval()  # nothing is checkpointed then
    with engine.attached():
        pass
    model.train().enable_input_require_grads()
    with engine.attached():
        pass


def test_one_use_of_two_that_a_checkpoint_cuts_off_is_an_error() -> None:
    """The other use is recorded: the layer has a gradient, but not the whole one."""

    class Half(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            h = checkpoint(self.inner, self.features(batch), use_reentrant=True)
            return self.head(self.inner(h).sum(1)).square().sum(1)

    model = Half()
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        with pytest.warns(UserWarning, match="requires_grad"):
            call(model, make_batch()).sum().backward()
        with pytest.raises(ConfigError, match="inner was used but got no gradient: under re-entrant"):
            engine.accumulate(len(LENGTHS))


def test_a_part_that_always_runs_without_gradients_is_an_error() -> None:
    class Silent(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                h = self.inner(self.features(batch))
            return self.head(h.sum(1)).square().sum(1)

    model = Silent()
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        call(model, make_batch()).sum().backward()
        with pytest.raises(
            ConfigError, match=r"inner was used but got no gradient: it ran under torch\.no_grad"
        ):
            engine.accumulate(len(LENGTHS))


def test_a_layer_that_the_loss_does_not_need_has_a_gradient_of_zero() -> None:
    """A pooler whose output nobody reads, for one: its sum is noise alone."""

    class Unread(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = self.features(batch)
            self.inner(x)
            return F.cross_entropy(self.head(x.sum(1)), batch["labels"], reduction="none")

    check_against_batches_of_one(Unread(), call)


def test_a_checkpoint_that_cuts_the_gradient_is_an_error() -> None:
    class Cut(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            h = checkpoint(self.inner, self.features(batch), use_reentrant=True)
            return self.head(h.sum(1)).square().sum(1)

    model = Cut()
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        with pytest.warns(UserWarning, match="requires_grad"):
            call(model, make_batch())
        call(model, make_batch()).sum().backward()
        with pytest.raises(ConfigError, match="inner was used but got no gradient"):
            engine.accumulate(len(LENGTHS))


@pytest.mark.parametrize("mode", ["autocast", "base"])
def test_bfloat16_sums_in_float32(mode: str) -> None:
    """Under autocast, also when the whole step runs inside of the region, and on a bfloat16 base."""
    batch = make_batch()
    model = make_model("bert", torch.bfloat16)
    norms, want = engine_sum(copy.deepcopy(model).float(), batch, 0.7)
    if mode == "autocast":
        model.float()
    engine = GradientEngine(model, clip=0.7)
    with engine.attached(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        for _ in range(2):
            losses(model, batch).sum().backward()
            got_norms = engine.accumulate(len(LENGTHS)).norms
        got = engine.private_sum(Known(), 0.0, 2)
    assert {g.dtype for g in got.values()} == {torch.float32}
    torch.testing.assert_close(got_norms, norms.float(), rtol=0.05, atol=0)
    assert relative_error(got, want) < 0.1
    # A sum formed in bfloat16 would have 8 bits: almost no entry is representable in so few.
    whole = got["base_model.model.classifier.modules_to_save.default.weight"]
    assert float((whole.bfloat16().float() == whole).float().mean()) < 0.1


# --- projection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2-conv1d"])
def test_projection_equals_the_dense_matrix(family: str) -> None:
    """Clipped after projecting, with the head inside the same clip; order of the parameters as given."""
    model, batch = make_model(family), make_batch()
    order = tuple(reversed([n for n, _ in model.named_parameters() if "lora_" in n]))
    projection = random_projection(model, 37, order)
    samples = batches_of_one(model, batch)
    P = torch.zeros(len(projection.slots), 37, dtype=torch.float64)
    P[torch.arange(len(P)), projection.slots] = projection.coefficients
    want = {THETA: torch.cat([samples[n].flatten(1) for n in order], 1) @ P}
    want |= {n: g for n, g in samples.items() if n not in order}
    clip = float(norms_of(want).median())
    norms, got = engine_sum(model, batch, clip, projection=projection)
    torch.testing.assert_close(norms, norms_of(want), rtol=1e-9, atol=0)
    assert_equal(got, clipped_sum(want, clip), 1e-9)
    assert abs(float(norms[0] - norms_of(samples)[0])) > 1e-3 * float(norms[0])


def test_projection_of_a_layer_used_twice_and_of_a_transposed_weight() -> None:
    torch.manual_seed(0)
    layer = Conv1D(4, 4).double()
    layer.bias.requires_grad_(False)
    projection = random_projection(layer, 5, ("weight",))
    x = torch.randn(3, 2, 4, dtype=torch.float64)

    def loss(v: Tensor) -> Tensor:
        return layer(torch.tanh(layer(v))).square().sum()

    rows = torch.stack([torch.autograd.grad(loss(v[None]), layer.weight)[0].flatten() for v in x])
    want = {THETA: torch.zeros(3, 5, dtype=torch.float64)}
    want[THETA].index_add_(1, projection.slots, rows * projection.coefficients)
    engine = GradientEngine(layer, clip=0.5, projection=projection)
    with engine.attached():
        loss(x).backward()
        engine.accumulate(3)
        assert_equal(engine.private_sum(Known(), 0.0, 1), clipped_sum(want, 0.5), 1e-9)


def test_projections_that_do_not_fit_are_refused() -> None:
    model = make_model("bert")
    lora = tuple(n for n, _ in model.named_parameters() if "lora_" in n)
    good = random_projection(model, 10, lora)
    with pytest.raises(ConfigError, match="slot lies outside"):
        ProjectedParameters(good.slots, good.coefficients, 9, lora)
    with pytest.raises(ConfigError, match="twice"):
        ProjectedParameters(good.slots, good.coefficients, 10, (*lora, lora[0]))
    with pytest.raises(ConfigError, match="one length"):
        ProjectedParameters(good.slots[1:], good.coefficients, 10, lora)
    with pytest.raises(ConfigError, match=f"slots has {len(good.slots)} entries"):
        GradientEngine(
            model, clip=1.0, projection=ProjectedParameters(good.slots, good.coefficients, 10, lora[1:])
        )
    with pytest.raises(ConfigError, match=r"nowhere\.weight is not the trainable weight"):
        GradientEngine(
            model,
            clip=1.0,
            projection=ProjectedParameters(good.slots, good.coefficients, 10, ("nowhere.weight",)),
        )
    head = "base_model.model.classifier.modules_to_save.default.weight"
    with pytest.raises(ConfigError, match=r"the bias of .*classifier.* trains too"):
        GradientEngine(model, clip=1.0, projection=random_projection(model, 10, (head,)))


# --- clip, sum, noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1e3])
def test_no_example_exceeds_the_clip(clip: float) -> None:
    """One example a micro-batch: the sum is its clipped gradient, with a flat norm over ALL tensors."""
    model, batch = make_model("bert", torch.float32), make_batch()
    for row in range(len(LENGTHS)):
        norms, got = engine_sum(model, one_of(batch, row), clip)
        norm = float(torch.cat([g.flatten() for g in got.values()]).double().norm())
        assert norm <= clip * (1 + 1e-6)
        assert norm == pytest.approx(min(clip, float(norms)), rel=1e-5)


def test_a_square_that_vanishes_next_to_a_large_one_is_not_lost() -> None:
    """Squares of 1e-24 are zero in float32; times an input of 1e19 such a gradient is anything but."""
    layer = nn.Linear(4, 4, bias=False)
    engine = GradientEngine(layer, clip=1e-6)
    with engine.attached():
        (layer(torch.full((1, 4), 1e18)) * 1e-23).sum().backward()
        norms = engine.accumulate(1).norms
        got = engine.private_sum(Known(), 0.0, 1)["weight"]
    assert float(norms) == pytest.approx(4e-5, rel=1e-5)
    assert float(got.double().square().sum().sqrt()) == pytest.approx(1e-6, rel=1e-5)


def test_long_rows_do_not_exceed_the_clip_in_float32() -> None:
    """A float32 norm that accumulates carelessly falls short by 5e-5 on 2.6 M elements."""
    torch.manual_seed(0)
    layer = nn.Linear(1600, 1600, bias=False)
    engine = GradientEngine(layer, clip=1.0)
    with engine.attached():
        layer(torch.randn(1, 3, 1600)).square().sum().backward()
        engine.accumulate(1)
        got = engine.private_sum(Known(), 0.0, 1)["weight"]
    assert float(got.double().square().sum().sqrt()) == pytest.approx(1.0, abs=2e-6)


def test_micro_batches_add_up_to_the_batch() -> None:
    model, batch = make_model("bert"), make_batch()
    _, want = engine_sum(model, batch, 0.5)
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        for part in (slice(0, 3), slice(3, 4)):
            losses(model, {k: v[part] for k, v in batch.items()}).sum().backward()
            engine.accumulate(len(range(*part.indices(4))))
        got = engine.private_sum(Known(), 0.0, 1)
        again = engine.private_sum(Known(), 0.0, 1)
    assert_equal(got, want, 1e-12)
    assert all(bool((g == 0).all()) for g in again.values())  # the sum starts anew


@pytest.mark.parametrize("projected", [False, True])
def test_an_empty_draw_is_noise_on_every_coordinate(projected: bool) -> None:
    model = make_model("bert")
    order = tuple(n for n, _ in model.named_parameters() if "lora_" in n)
    engine = GradientEngine(
        model, clip=2.0, projection=random_projection(model, 50, order) if projected else None
    )
    trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    if projected:
        trained = {THETA: torch.Size([50])} | {n: s for n, s in trained.items() if n not in order}
    assert dict(engine.shapes) == trained
    noise = Known()
    with engine.attached():
        got = engine.private_sum(noise, 3.0, 4)
    assert {n: g.shape for n, g in got.items()} == trained
    assert sorted(noise.shapes) == sorted(tuple(s) for s in trained.values())
    flat = torch.cat([g.flatten() for g in got.values()])
    assert bool((flat != 0).all())
    assert float(flat.std()) == pytest.approx(3.0 * 2.0 / 4, rel=0.15)


def test_noise_has_the_stated_deviation_and_is_fresh_each_step() -> None:
    layer = nn.Linear(200, 100)
    engine, noise = GradientEngine(layer, clip=0.5), Known()
    with engine.attached():
        first, second = (engine.private_sum(noise, 1.5, 8)["weight"].flatten() for _ in range(2))
    for draw in (first, second):
        assert float(draw.std()) == pytest.approx(1.5 * 0.5 / 8, rel=0.03)
        assert abs(float(draw.mean())) < 5 * 1.5 * 0.5 / 8 / math.sqrt(len(draw))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.04


def test_the_divisor_is_the_expected_batch() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 32)
    _, total = engine_sum(model, batch, 0.5)
    assert_equal(got, {n: g / 32 for n, g in total.items()}, 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("projected", [False, True])
def test_rows_that_are_not_finite_count_as_zero(bad: float, projected: bool) -> None:
    model, batch = make_model("bert"), make_batch()
    order = tuple(n for n, _ in model.named_parameters() if "lora_" in n)
    projection = random_projection(model, 50, order) if projected else None
    spoil = torch.tensor([1, bad, 1, 1], dtype=torch.float64)
    engine = GradientEngine(model, clip=0.5, projection=projection)
    with engine.attached():
        (losses(model, batch) * spoil).sum().backward()
        clipped = engine.accumulate(4)
        got = engine.private_sum(Known(), 0.0, 1)
    assert clipped.nonfinite == 1
    assert clipped.norms.isfinite().tolist() == [True, False, True, True]
    rest = {k: v[[0, 2, 3]] for k, v in batch.items()}
    assert_equal(got, engine_sum(model, rest, 0.5, projection=projection)[1], 1e-9)


# --- life of an engine ----------------------------------------------------------------------------


def test_the_batch_gradient_is_never_computed() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        assert all(p.grad is None for p in model.parameters())


def test_detach_restores_the_model_and_attach_works_again() -> None:
    model, batch = make_model("bert"), make_batch()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    keys = list(model.state_dict())
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        assert list(model.state_dict()) == keys
        with pytest.raises(RuntimeError, match="attached already"):
            engine.attach()
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
    after = {n: m.__dict__ for n, m in model.named_modules()}
    assert all(before[n].keys() == after[n].keys() for n in before)
    losses(model, batch).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    with engine.attached():
        got = engine.private_sum(Known(), 0.0, 1)  # the sum of the first round is gone
    assert all(bool((g == 0).all()) for g in got.values())
    with pytest.raises(RuntimeError, match="not attached"):
        engine.private_sum(Known(), 1.0, 1)


def test_an_exception_detaches() -> None:
    model = make_model("bert")
    engine = GradientEngine(model, clip=0.5)
    with pytest.raises(KeyError), engine.attached():
        raise KeyError
    with engine.attached():
        pass


def test_two_engines_on_one_model_are_refused() -> None:
    model = make_model("bert")
    first, second = (GradientEngine(model, clip=0.5) for _ in range(2))
    with first.attached(), pytest.raises(ConfigError, match="another engine"):
        second.attach()
    with second.attached():
        pass


def test_a_deep_copy_is_a_plain_model() -> None:
    """Training a copy does not reach the engine of the original; the copy may get its own."""
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.01)
        assert not torch.equal(losses(twin, batch), losses(model, batch))
        losses(twin, batch).sum().backward()
        assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
        engine.discard()
        assert all(bool((g == 0).all()) for g in engine.private_sum(Known(), 0.0, 1).values())
    twin.zero_grad()
    want = clipped_sum(batches_of_one(twin, batch), 0.5)
    assert_equal(engine_sum(twin, batch, 0.5)[1], want, 1e-9)


@pytest.mark.parametrize("projected", [False, True])
def test_memory_of_a_micro_batch_is_freed(projected: bool) -> None:
    import gc
    import weakref

    model, batch = make_model("bert"), make_batch()
    order = tuple(n for n, _ in model.named_parameters() if "lora_" in n)
    engine = GradientEngine(
        model, clip=0.5, projection=random_projection(model, 50, order) if projected else None
    )
    seen: list[weakref.ref[Tensor]] = []
    with engine.attached():
        losses(model, batch).sum().backward()
        rows = len(LENGTHS)
        seen = [weakref.ref(t) for t in gc.get_objects() if isinstance(t, Tensor) and t.shape[:1] == (rows,)]
        kept = [r for r in seen if any(r() is v for p in engine._parts for v in vars(p).values())]
        assert kept
        engine.accumulate(rows)
        assert not any(r() is not None for r in kept)


def test_a_head_does_not_keep_its_sequence_alive() -> None:
    """It reads one token of a (rows, tokens, n) tensor; the whole tensor must go when the pass is over."""
    head, hidden = nn.Linear(8, 4), torch.randn(3, 50, 8)
    engine = GradientEngine(head, clip=1.0)
    with engine.attached():
        head(hidden[:, 0]).square().sum().backward()
        kept = [t for v in vars(engine._parts[0]).values() if isinstance(v, tuple) for t in v]
        assert [t.untyped_storage().nbytes() for t in kept] == [3 * 8 * 4, 3 * 4 * 4]
        engine.discard()


def test_discard_forgets_a_failed_micro_batch() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        losses(model, batch).sum().backward()
        with pytest.raises(RuntimeError, match="neither accumulated nor discarded"):
            engine.private_sum(Known(), 0.0, 1)
        engine.discard()
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
    assert_equal(got, engine_sum(model, batch, 0.5)[1], 1e-12)


def test_a_failed_accumulate_leaves_the_sum_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a retry after running out of memory would count some coordinates of an example twice."""
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5)

    def out_of_memory(factors: Tensor) -> dict[str, Tensor]:
        raise MemoryError

    with engine.attached():
        losses(model, batch).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(engine._parts[-1], "weighted_sum", out_of_memory)
            with pytest.raises(MemoryError):
                engine.accumulate(len(LENGTHS))
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
    assert_equal(got, engine_sum(model, batch, 0.5)[1], 1e-12)


def test_evaluating_while_attached_changes_nothing() -> None:
    model, batch = make_model("bert"), make_batch()
    engine = GradientEngine(model, clip=0.5)
    with engine.attached():
        with torch.no_grad():
            inside = losses(model, batch)
        losses(model, batch).sum().backward()
        engine.accumulate(len(LENGTHS))
        got = engine.private_sum(Known(), 0.0, 1)
    assert torch.equal(inside, losses(model, batch))
    assert_equal(got, engine_sum(model, batch, 0.5)[1], 1e-12)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_impossible_clips_are_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip"):
        GradientEngine(nn.Linear(2, 2), clip=clip)


def test_parameters_without_a_rule_are_named() -> None:
    model = make_model("bert")
    model.base_model.model.bert.embeddings.LayerNorm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"embeddings\.LayerNorm\.weight .*LayerNorm"):
        GradientEngine(model, clip=1.0)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        GradientEngine(nn.Linear(2, 2).requires_grad_(False), clip=1.0)


def test_a_linear_layer_with_another_forward_has_no_rule() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ConfigError, match=r"0\.weight .*Scaled"):
        GradientEngine(nn.Sequential(Scaled(2, 2)), clip=1.0)


def test_tied_weights_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight is shared by 0 and 1"):
        GradientEngine(model, clip=1.0)


def test_dora_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"query: the adapter variant Dora"):
        GradientEngine(make_model("bert", use_dora=True), clip=1.0)


def test_mixtures_of_experts_are_refused_by_name() -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MixtralConfig(**DECODER, num_local_experts=2))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"mlp.* mixture of experts"):
        GradientEngine(model, clip=1.0)


def test_batch_normalisation_in_training_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    engine = GradientEngine(model, clip=1.0)
    with pytest.raises(ConfigError, match="1: batch normalisation"):
        engine.attach()
    model.eval()
    with engine.attached():
        model(torch.randn(2, 3)).sum().backward()
        engine.accumulate(2)
        model.train()
        model(torch.randn(2, 3)).sum().backward()
        with pytest.raises(ConfigError, match="1: batch normalisation"):
            engine.accumulate(2)


def test_a_weight_used_outside_of_its_layer_is_named() -> None:
    """Its gradient would otherwise miss that path, as with functional attention modules."""
    model = nn.Sequential(nn.Linear(3, 3))
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        (model(torch.randn(2, 3)).sum() + model[0].weight.sum()).backward()
        with pytest.raises(ConfigError, match=r"0\.weight has a \.grad"):
            engine.accumulate(2)


def test_layers_without_one_row_per_example_are_named() -> None:
    class Flattening(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = self.features(batch)
            return self.head(self.inner(x.flatten(0, 1)).view_as(x).sum(1)).square().sum(1)

    model, rows = Flattening(), len(LENGTHS)
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        call(model, make_batch()).sum().backward()
        with pytest.raises(
            ConfigError, match=f"inner saw {rows * max(LENGTHS)} rows in a micro-batch of {rows}"
        ):
            engine.accumulate(rows)

    class Broadcast(Net):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = self.features(batch)
            return self.head(self.inner(x).sum(1) + self.inner(x[:1]).sum(1)).square().sum(1)

    model = Broadcast()
    engine = GradientEngine(model, clip=1.0)
    with engine.attached():
        total = call(model, make_batch()).sum()
        with pytest.raises(ConfigError, match="inner saw"):
            total.backward()


def test_other_trainable_parameters_than_at_the_start_are_named() -> None:
    model = make_model("bert")
    engine = GradientEngine(model, clip=1.0)
    frozen = next(n for n, p in model.named_parameters() if "lora_A" in n)
    model.get_parameter(frozen).requires_grad_(False)
    with pytest.raises(ConfigError, match=frozen):
        engine.attach()


def test_misuse_raises() -> None:
    engine = GradientEngine(nn.Linear(2, 2), clip=1.0)
    with pytest.raises(RuntimeError, match="not attached"):
        engine.accumulate(1)
    with engine.attached():
        with pytest.raises(ConfigError, match="reached no trainable layer"):
            engine.accumulate(1)
        with pytest.raises(ValueError, match="sigma"):
            engine.private_sum(Known(), math.nan, 1)
        with pytest.raises(ValueError, match="expected_batch"):
            engine.private_sum(Known(), 1.0, 0)
