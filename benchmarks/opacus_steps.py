"""The same steps with Opacus, set up as its documentation does.

Opacus draws its noise from PyTorch's generator. Its two modes need `nn.Linear` layers that train; frozen layers may be
anything, so a LoRA on GPT-2's `Conv1D` works.
"""

from __future__ import annotations

import warnings

from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from benchmarks.models import Workload
from benchmarks.steps import Mechanism, Step, trainable

# True of the first LoRA layer, whose input needs no gradient, and harmless: the check compares all gradients.
warnings.filterwarnings("ignore", message="Full backward hook is firing")


class _Opacus(Step):
    """Loss and backward pass are the subclass's; clip and noise are those of Opacus's optimiser."""

    private: DPOptimizer

    def _wrap(self, kind: type[DPOptimizer], mechanism: Mechanism, rows: int) -> None:
        self.private = kind(
            self.optimizer,
            noise_multiplier=mechanism.sigma,
            max_grad_norm=mechanism.clip,
            expected_batch_size=rows,
            loss_reduction="mean",
        )

    def compute(self) -> None:
        self.backward()
        self.private.pre_step()

    def backward(self) -> None:
        """Run the passes over the batch."""
        raise NotImplementedError

    def clear(self) -> None:
        self.private.zero_grad(set_to_none=True)


class Hooks(_Opacus):
    """Per-example gradients from hooks (`GradSampleModule`)."""

    def __init__(self, work: Workload, mechanism: Mechanism, *, train_a: bool = True) -> None:
        model = work.copy(train_a=train_a)
        super().__init__(trainable(model))
        self._work, self._model = work, GradSampleModule(model, loss_reduction="mean")
        self._wrap(DPOptimizer, mechanism, work.rows)

    def backward(self) -> None:
        self._work.losses(self._model).mean().backward()


class Ghost(_Opacus):
    """Ghost clipping: norms in a first backward pass, the clipped sum in a second one."""

    def __init__(self, work: Workload, mechanism: Mechanism, *, train_a: bool = True) -> None:
        model = work.copy(train_a=train_a)
        super().__init__(trainable(model))
        self._work = work
        self._model = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=mechanism.clip, use_ghost_clipping=True
        )
        self._wrap(DPOptimizerFastGradientClipping, mechanism, work.rows)
        self._loss = DPLossFastGradientClipping(
            self._model, self.private, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean"
        )

    def backward(self) -> None:
        targets = self._work.targets
        shape = targets.shape if self._work.causal else None
        self._loss(self._work.scores(self._model), targets.flatten(), shape=shape).backward()
