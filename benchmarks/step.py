"""Cost of one private local step as a ratio to the same model's non-private LoRA step.

    python -m benchmarks.step [--rows 32] [--tokens 32] [--steps 11] [--layers 6] [--hidden 384] [--head]

One torch thread; the variants take turns on the same batch in one process, in a new order every turn, so that
a machine that slows down slows all of them. Reported are medians over the turns of process CPU time.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig

from privet.privacy.engine import GradientEngine
from privet.privacy.parts import THETA, ProjectedParameters
from privet.privacy.rng import make_randomness


def make_model(layers: int, hidden: int, train_head: bool) -> nn.Module:
    """A BERT of random weights with LoRA of rank 8 on query and value."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    base = AutoModelForSequenceClassification.from_config(config)
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "value"],
        modules_to_save=["classifier"] if train_head else None,
    )
    model: nn.Module = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def losses(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(input_ids=ids).logits, labels, reduction="none")


def variants(model: nn.Module, ids: Tensor, labels: Tensor) -> dict[str, Callable[[], None]]:
    """One step of each kind, every kind on a model of its own."""
    rows = len(ids)

    def ordinary() -> Callable[[], None]:
        own = copy.deepcopy(model)
        trained = [p for p in own.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-3)

        def step() -> None:
            losses(own, ids, labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def two_factors(kind: str) -> Callable[[], None]:
        own, noise = copy.deepcopy(model), make_randomness(kind, None)
        trained = {n: p for n, p in own.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
        engine = GradientEngine(own, clip=1.0)
        engine.attach()

        def step() -> None:
            losses(own, ids, labels).sum().backward()
            engine.accumulate(rows)
            for name, gradient in engine.private_sum(noise, 1.0, rows).items():
                trained[name].grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        return step

    def projected() -> Callable[[], None]:
        own, noise = copy.deepcopy(model), make_randomness("secure", None)
        trained = {n: p for n, p in own.named_parameters() if p.requires_grad}
        lora = {n: p for n, p in trained.items() if "lora_" in n}
        size = sum(p.numel() for p in lora.values())
        d = round(size / 6.4)
        slots = torch.arange(size)[torch.randperm(size)] % d
        coefficients = torch.bincount(slots, minlength=d)[slots].rsqrt()
        theta = nn.Parameter(torch.zeros(d))
        start = {n: p.detach().clone() for n, p in lora.items()}
        parameters = {THETA: theta} | {n: p for n, p in trained.items() if n not in lora}
        optimizer = torch.optim.SGD(parameters.values(), lr=1e-3)
        engine = GradientEngine(
            own, clip=1.0, projection=ProjectedParameters(slots, coefficients, d, tuple(lora))
        )
        engine.attach()

        def step() -> None:
            losses(own, ids, labels).sum().backward()
            engine.accumulate(rows)
            for name, gradient in engine.private_sum(noise, 1.0, rows).items():
                parameters[name].grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                offsets = (theta[slots] * coefficients).split([p.numel() for p in lora.values()])
                for (name, p), offset in zip(lora.items(), offsets, strict=True):
                    torch.add(start[name], offset.view_as(p), out=p)

        return step

    return {
        "non-private": ordinary(),
        "two factors, secure noise": two_factors("secure"),
        "two factors, fast noise": two_factors("fast"),
        "projected, secure noise": projected(),
    }


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--head", action="store_true", help="train the classification head too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(args.layers, args.hidden, args.head)
    ids = torch.randint(5, 1000, (args.rows, args.tokens))
    steps = variants(model, ids, torch.randint(0, 2, (args.rows,)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # warm up
        step()
    for _ in range(args.steps):
        for name in random.sample(list(steps), len(steps)):
            start = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - start)
    base = times["non-private"]
    print(f"BERT {args.layers} x {args.hidden}, {args.rows} x {args.tokens} tokens, {args.steps} turns")
    print(f"{'step':28s} {'seconds':>8s} {'ratio':>6s}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        print(f"{name:28s} {statistics.median(own):8.4f} {ratio:6.3f}")


if __name__ == "__main__":
    main()
