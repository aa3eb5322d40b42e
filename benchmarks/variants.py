"""What is compared: every method with every engine that has a rule for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.models import Workload
from benchmarks.opacus_steps import Ghost, Hooks
from benchmarks.steps import Mechanism, Plain, Private, PrivateProjected, Step

TWO, ONLY_B, PRODUCT, HSIP = "two factors", "B only, clip on dB", "B only, clip on dW", "FedHSIP"
METHODS = (TWO, ONLY_B, PRODUCT, HSIP)
PLAIN, PRIVET, HOOKS, GHOST = "non-private", "Privet", "Opacus hooks", "Opacus ghost"
ENGINES = (PRIVET, HOOKS, GHOST)

Key = tuple[str, str]


@dataclass(frozen=True)
class Variant:
    """A step with its place in the table.

    Attributes
    ----------
    method, engine : str
        Its row and its column.
    build : callable
        Makes the step.
    base : str
        The method whose non-private step it is compared with: the same trainable set, for FedHSIP two factors.
    """

    method: str
    engine: str
    build: Callable[[Workload, Mechanism], Step]
    base: str

    @property
    def key(self) -> Key:
        """Names it among all variants."""
        return self.method, self.engine

    @property
    def base_key(self) -> Key:
        """Names the step that it is compared with."""
        return self.base, PLAIN


#: Opacus has no rule for the last two methods.
VARIANTS = (
    Variant(TWO, PLAIN, Plain, TWO),
    Variant(TWO, PRIVET, Private, TWO),
    Variant(TWO, HOOKS, Hooks, TWO),
    Variant(TWO, GHOST, Ghost, TWO),
    Variant(ONLY_B, PLAIN, partial(Plain, train_a=False), ONLY_B),
    Variant(ONLY_B, PRIVET, partial(Private, train_a=False), ONLY_B),
    Variant(ONLY_B, HOOKS, partial(Hooks, train_a=False), ONLY_B),
    Variant(ONLY_B, GHOST, partial(Ghost, train_a=False), ONLY_B),
    Variant(PRODUCT, PRIVET, partial(Private, train_a=False, products=True), ONLY_B),
    Variant(HSIP, PRIVET, PrivateProjected, TWO),
)
BY_KEY = {variant.key: variant for variant in VARIANTS}
PRIVATE = tuple(v for v in VARIANTS if v.engine != PLAIN)

#: Engines that are not measured, with the reason.
ABSENT = {
    "fastDP": "not measured: it is not on the package index, so it does not install with pip",
}
