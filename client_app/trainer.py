"""The local steps of one phase on one node, private or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privet.adapters import AdaptedModel
from privet.config import PrivacyConfig, TrainConfig
from privet.corrections import Correction
from privet.data.collate import Tokenised, microbatches
from privet.kinds.base import TaskKind
from privet.kinds.classification import Classification
from privet.privacy.engine import Clipped, GradientEngine
from privet.privacy.low_rank import WeightProduct
from privet.privacy.moments import KINDS
from privet.privacy.parts import ProjectedParameters
from privet.privacy.rng import Randomness
from privet.privacy.sampling import poisson_draw, shuffled_batches
from privet.trainables import Trainables

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Diagnostics:
    """What a phase looked like inside. Under DP it stays in the node's own log."""

    steps: int
    train_loss: float
    grad_norm: float
    clipped: float
    nonfinite: int
    drawn: tuple[int, ...]


@dataclass(frozen=True)
class Noise:
    """What makes a phase private: sampling rate, noise multiplier, and where the draws come from."""

    q: float
    sigma: float
    randomness: Randomness


class Trainer:
    """Trains a model on one node's rows.

    Parameters
    ----------
    model : AdaptedModel
        Holds the values to start from.
    rows : Tokenised
        The node's training rows.
    pad_id : int
        Token id of the padding.
    train, privacy : TrainConfig, PrivacyConfig
        Settings of the run.
    kind : TaskKind
        Makes batches of rows, and one loss an example of a batch; default classification.
    """

    def __init__(
        self,
        model: AdaptedModel,
        rows: Tokenised,
        pad_id: int,
        train: TrainConfig,
        privacy: PrivacyConfig,
        kind: TaskKind | None = None,
    ) -> None:
        self._kind = kind or Classification()
        self._model = model
        self._rows = rows
        self._lengths = rows.lengths
        self._pad_id = pad_id
        self._train = train
        self._privacy = privacy
        self._micro = train.micro_batch

    def train_private(
        self,
        trainables: Trainables,
        steps: int,
        noise: Noise,
        *,
        lr: float | None = None,
        correction: Correction | None = None,
        charge: Callable[[], object] = lambda: None,
    ) -> Diagnostics:
        """Take `steps` steps of DP-SGD (Abadi et al. 2016) with Poisson sampling.

        A draw may be empty: the step is then noise alone, and counts. The divisor is the expected batch.
        Weight decay acts in the optimiser and `correction` just before it: both after the noise. `charge` is
        called once it is sure that the model can train so, and before the first draw.

        Raises
        ------
        ConfigError
            If the model cannot train row by row, or mixes the rows of a batch; nothing was charged or drawn.
        """
        assert self._privacy.clip is not None
        norms: list[Tensor] = []
        losses: list[float] = []
        drawn: list[int] = []
        nonfinite = 0
        optimizer = self._optimizer(trainables, lr or self._train.lr)
        with self._training(trainables):
            engine = self._engine(trainables, self._privacy.clip)
            with engine.attached():
                self._refuse_mixing(engine, trainables)
                charge()
                for _ in range(steps):
                    rows = poisson_draw(len(self._rows), noise.q, noise.randomness)
                    drawn.append(len(rows))
                    for batch in microbatches(self._lengths, rows, self._micro):
                        for loss, clipped in self._private_batch(engine, batch):
                            losses.append(loss)
                            norms.append(clipped.norms.detach().float().cpu())
                            nonfinite += clipped.nonfinite
                    sums = engine.private_sum(noise.randomness, noise.sigma, self._train.batch_size)
                    gradients = {self._model.short_name(n): g for n, g in sums.items()}
                    for name, leaf in trainables.leaves.items():
                        leaf.grad = gradients[name].to(leaf.device, leaf.dtype)
                    _step(optimizer, trainables, correction)
        every = torch.cat(norms) if norms else torch.zeros(0)
        return Diagnostics(
            steps=steps,
            train_loss=sum(losses) / max(1, sum(drawn)) if losses else math.nan,
            grad_norm=float(every.median()) if len(every) else math.nan,
            clipped=float((every > self._privacy.clip).float().mean()) if len(every) else 0.0,
            nonfinite=nonfinite,
            drawn=tuple(drawn),
        )

    def train_plain(
        self,
        trainables: Trainables,
        steps: int,
        seed: int,
        *,
        lr: float | None = None,
        correction: Correction | None = None,
    ) -> Diagnostics:
        """Take `steps` ordinary steps on seeded batches without replacement; equal for equal seeds."""
        losses: list[float] = []
        drawn: list[int] = []
        norms: list[float] = []
        optimizer = self._optimizer(trainables, lr or self._train.lr)
        with self._training(trainables), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for rows in shuffled_batches(len(self._rows), self._train.batch_size, steps, seed):
                losses.append(self._plain_batch(trainables, rows))
                drawn.append(len(rows))
                trainables.collect()
                leaves = trainables.leaves.values()
                squares = [p.grad.double().square().sum() for p in leaves if p.grad is not None]
                norms.append(float(torch.stack(squares).sum().sqrt()))
                _step(optimizer, trainables, correction)
        return Diagnostics(
            steps=steps,
            train_loss=float(np.average(losses, weights=drawn)),
            grad_norm=float(np.median(norms)),
            clipped=0.0,
            nonfinite=0,
            drawn=tuple(drawn),
        )

    def moments(self, trainables: Trainables, kind: str, steps: int, seed: int) -> dict[str, Tensor]:
        """Return the mean over as many rows as `steps` batches have of f(|g|) g^2, by parameter; not private.

        `kind` names f, see :mod:`privet.privacy.moments`. The model stays as it is.
        """
        sums: dict[str, Tensor] = {}
        rows = 0
        with self._training(trainables), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            engine = self._engine(trainables, self._privacy.clip or 1.0)
            with engine.attached():
                for drawn in shuffled_batches(len(self._rows), self._train.batch_size, steps, seed):
                    rows += len(drawn)
                    for batch in microbatches(self._lengths, drawn, self._micro):
                        self._losses(batch).sum().backward()
                        for name, value in engine.second_moments(len(batch), KINDS[kind]).items():
                            short = self._model.short_name(name)
                            sums[short] = sums[short] + value if short in sums else value
        return {n: (v / rows).to("cpu", torch.float32) for n, v in sums.items()}

    # --- one batch -------------------------------------------------------------------------------

    def _private_batch(self, engine: GradientEngine, rows: Rows) -> Iterator[tuple[float, Clipped]]:
        """Add the rows to the engine's sum; out of GPU memory, the same rows go in two halves."""
        try:
            losses = self._losses(rows)
            losses.sum().backward()
            yield float(losses.detach().nansum()), engine.accumulate(rows=len(rows))
        except torch.OutOfMemoryError as error:
            engine.discard()
            self._shrink(len(rows), error)
            for half in np.array_split(rows, 2):
                yield from self._private_batch(engine, half)

    def _plain_batch(self, trainables: Trainables, rows: Rows) -> float:
        """Leave the mean gradient of the rows in the model; out of memory, start the batch over in halves."""
        while True:
            try:
                total = 0.0
                for batch in microbatches(self._lengths, rows, self._micro):
                    losses = self._losses(batch)
                    (losses.sum() / len(rows)).backward()
                    total += float(losses.detach().sum())
                return total / len(rows)
            except torch.OutOfMemoryError as error:
                for name in trainables.model_names:
                    self._model.parameter(name).grad = None
                self._shrink(min(self._micro, len(rows)), error)

    def _shrink(self, rows: int, error: torch.OutOfMemoryError) -> None:
        """Halve the micro-batch for good; the logical batch stays. Raises `error` at one row."""
        if rows <= 1:
            raise error
        torch.cuda.empty_cache()
        self._micro = max(1, rows // 2)

    def _losses(self, rows: Rows) -> Tensor:
        """Return one loss an example (batch,), so that no example's gradient depends on another's."""
        batch = self._kind.collate(self._rows, rows, self._pad_id, self._model.device)
        return self._kind.losses(self._model.module, batch)

    def _refuse_mixing(self, engine: GradientEngine, trainables: Trainables) -> None:
        """Let the engine measure it on made-up rows, at values where no factor or head of zeros hides it."""
        if self._micro == 1:
            return
        parameters = [self._model.parameter(n) for n in trainables.model_names]
        try:
            with torch.random.fork_rng(devices=[]), _stirred(parameters):
                losses = self._kind.losses(self._model.module, self._kind.made_up(self._model))
                engine.refuse_mixing(losses)
        except torch.OutOfMemoryError as error:
            self._shrink(2, error)  # one row at a time from here on: nothing is left to mix

    # --- around the steps ------------------------------------------------------------------------

    @contextmanager
    def _training(self, trainables: Trainables) -> Iterator[None]:
        """Let only the named parameters train, with LoRA's own dropout on and the base model's off."""
        torch.set_num_threads(self._train.threads)
        parameters = [self._model.parameter(n) for n in trainables.model_names]
        dropouts = [m for n, m in self._model.module.named_modules() if ".lora_dropout" in n]
        for parameter in parameters:
            parameter.requires_grad_(True)
        for module in dropouts:
            module.train()
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)
                parameter.grad = None
            for module in dropouts:
                module.eval()

    def _engine(self, trainables: Trainables, clip: float) -> GradientEngine:
        full, projection = self._model.full_name, None
        if trainables.projection is not None:
            rule, names = trainables.projection
            order = tuple(full(n) for n in names)
            projection = ProjectedParameters(rule.slots, rule.coefficients, rule.d, order)
        scaling = self._model.spec.scaling
        products = [WeightProduct(full(t.a), full(t.b), scaling) for t in trainables.products]
        pullbacks = [replace(p, weight=full(p.weight)) for p in trainables.pullbacks]
        return GradientEngine(
            self._model.module, clip=clip, projection=projection, products=products, pullbacks=pullbacks
        )

    def _optimizer(self, trainables: Trainables, lr: float) -> torch.optim.Optimizer:
        """Return a fresh optimiser: no state passes from round to round or from client to client."""
        train, head = self._train, self._model.spec.head
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in trainables.leaves.items() if n not in head], "lr": lr},
            {
                "params": [p for n, p in trainables.leaves.items() if n in head],
                "lr": train.head_lr or train.lr,
            },
        ]
        groups = [g for g in groups if g["params"]]
        if train.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=train.momentum, weight_decay=train.weight_decay)
        return torch.optim.AdamW(groups, weight_decay=train.weight_decay)


@contextmanager
def _stirred(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add small numbers to the parameters for a while; they end exactly as they were."""
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            p.add_((0.02 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)


def _step(optimizer: torch.optim.Optimizer, trainables: Trainables, correction: Correction | None) -> None:
    """Correct, step, and bring the model up to date."""
    if correction is not None:
        by_parameter = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
        rates = {name: by_parameter[id(leaf)] for name, leaf in trainables.leaves.items()}
        with torch.no_grad():
            correction.before_step(trainables.leaves, rates)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    trainables.refresh()
