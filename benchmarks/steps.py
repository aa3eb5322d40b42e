"""One training step, without privacy and with Privet's engine.

Every step trains its own copy of one workload's model with plain SGD on the same batch and the same loss per
example, and ends with the optimiser's update and cleared gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import ALPHA, RANK, Workload
from privet.privacy.engine import GradientEngine
from privet.privacy.low_rank import WeightProduct
from privet.privacy.parts import ProjectedParameters
from privet.privacy.rng import make_randomness
from privet.projection import default_dimension, random_projection
from privet.trainables import Projected

_LR = 1e-4


@dataclass(frozen=True)
class Mechanism:
    """What makes a step private: C, and the noise multiplier."""

    clip: float = 1.0
    sigma: float = 1.0


class Step(ABC):
    """One training step, ready to run any number of times.

    Parameters
    ----------
    leaves : dict of str to nn.Parameter
        What the optimiser updates, by its name in the workload's model; ``"theta"`` for projected coordinates.
    """

    def __init__(self, leaves: dict[str, nn.Parameter]) -> None:
        self.leaves = leaves
        self.optimizer = torch.optim.SGD(leaves.values(), lr=_LR)

    def __call__(self) -> None:
        """Take the whole step."""
        self.compute()
        self.update()
        self.clear()

    @abstractmethod
    def compute(self) -> None:
        """Leave the gradient of the step in the leaves."""

    def update(self) -> None:
        """Update the leaves."""
        self.optimizer.step()

    def clear(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the step by name, and update nothing."""
        self.compute()
        found = {n: p.grad.detach().clone() for n, p in self.leaves.items() if p.grad is not None}
        self.clear()
        return found


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


class Plain(Step):
    """Without privacy: the mean loss and one backward pass."""

    def __init__(self, work: Workload, _: Mechanism, *, train_a: bool = True) -> None:
        self._work, self._model = work, work.copy(train_a=train_a)
        super().__init__(trainable(self._model))

    def compute(self) -> None:
        self._work.losses(self._model).mean().backward()


class Private(Step):
    """Privet's engine on the trainable parameters themselves.

    Parameters
    ----------
    products : bool
        Clip on the gradient of the whole weight.
    """

    def __init__(
        self, work: Workload, mechanism: Mechanism, *, train_a: bool = True, products: bool = False
    ) -> None:
        model = work.copy(train_a=train_a)
        pairs = [
            WeightProduct(name.replace("lora_B", "lora_A"), name, ALPHA / RANK)
            for name in trainable(model)
            if products and "lora_B" in name
        ]
        super().__init__(trainable(model))
        self._start(work, model, mechanism, GradientEngine(model, clip=mechanism.clip, products=pairs))

    def _start(self, work: Workload, model: nn.Module, mechanism: Mechanism, engine: GradientEngine) -> None:
        self._work, self._model, self._mechanism, self._engine = work, model, mechanism, engine
        self._randomness = make_randomness("secure")
        self.norms = torch.zeros(0)
        engine.attach()

    def compute(self) -> None:
        self._work.losses(self._model).sum().backward()
        self.norms = self._engine.accumulate(self._work.rows).norms
        for name, gradient in self._release().items():
            self.leaves[name].grad = gradient

    def noise(self) -> None:
        """Make the step's noise and nothing else: what the engine does for an empty draw."""
        self._release()

    def _release(self) -> dict[str, Tensor]:
        return self._engine.private_sum(self._randomness, self._mechanism.sigma, self._work.rows)


class PrivateProjected(Private):
    """Privet's engine on FedHSIP's vector, which is expanded into the factors after every update."""

    def __init__(self, work: Workload, mechanism: Mechanism) -> None:
        model = work.copy()
        parameters = trainable(model)
        factors = {n: p.detach().clone() for n, p in parameters.items() if "lora_" in n}
        size = sum(t.numel() for t in factors.values())
        d = default_dimension(size)
        self._projected = Projected(
            _Named(parameters),  # type: ignore[arg-type]
            random_projection(size, d, seed=0),
            torch.zeros(d),
            factors,
            [n for n in parameters if n not in factors],
        )
        Step.__init__(self, self._projected.leaves)
        rule, order = self._projected.projection
        projection = ProjectedParameters(rule.slots, rule.coefficients, rule.d, tuple(order))
        self._start(work, model, mechanism, GradientEngine(model, clip=mechanism.clip, projection=projection))

    def update(self) -> None:
        super().update()
        self._projected.refresh()

    def project(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the gradients of factors and head are as gradients of this step's leaves."""
        rule, order = self._projected.projection
        theta = rule.project(torch.cat([gradients[n].flatten() for n in order]))
        return {n: gradients.get(n, theta) for n in self.leaves}


class _Named:
    """Parameters by name: as much of an `AdaptedModel` as `Projected` needs."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.device = next(iter(parameters.values())).device

    def parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]
