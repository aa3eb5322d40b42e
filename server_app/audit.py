"""``privet audit RUN``: what the model of a finished simulation gives away about the rows that it was trained on.

Membership inference compares training rows with public test rows of the same table. Canaries, where the run had
any (``task.canaries``), bound epsilon from below. Both look at the server's model, as everybody has it in the end; with
``keep_uploads=true`` the same rows are also looked for in each client's model, as the server could rebuild it. Nothing
here is private, and nothing of it may leave with a model.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privet.adapters import load_model, load_tokenizer
from privet.atomic import write_atomic
from privet.audit.lower_bound import CONFIDENCE, Bound, guess, lower_bound
from privet.audit.membership import Floats, auroc, separation
from privet.audit.signals import LOSS, distinct, signals, usable
from privet.config import Config
from privet.data.canaries import draw_canaries
from privet.data.collate import padding_id
from privet.data.examples import Examples
from privet.data.partition import client_examples
from privet.data.tasks import load_test
from privet.devices import all_cores, pick_device, pick_dtype
from privet.errors import PrivetError
from privet.kinds.catalogue import kind_of
from privet.runner import read_summary
from privet.seeding import child_seed
from privet.wire import Arrays
from server_app.saved import final_model
from server_app.uploads import kept_uploads, rebuild

FOLDER = "audit"
FILE = "audit.json"
ATTACKS = {"newest of every array": None, "last two uploads": 2}
"""How many of a client's uploads its model is rebuilt from; None: all."""


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes
    ----------
    claimed : float or None
        The run's epsilon, the largest of its nodes; None: not private.
    delta : float
        That of the claim.
    membership : dict
        By signal, how it separates training rows from test rows.
    clients : dict
        By attack on the clients' models and signal, the mean AUROC over clients and the lowest and highest one; empty
        where uploads were not kept or are no models.
    bound : Bound or None
        From the canaries; None: the run had none.
    scores : dict
        Losses of members, of others, and of canaries that were included and left out.
    """

    claimed: float | None
    delta: float
    membership: dict[str, Any]
    clients: dict[str, dict[str, dict[str, float]]]
    bound: Bound | None
    scores: dict[str, Floats]

    @property
    def refuted(self) -> bool:
        """Whether the claim cannot be true, at 95 % confidence."""
        return self.claimed is not None and self.bound is not None and self.bound.epsilon > self.claimed

    def lines(self) -> list[str]:
        """Say in text what was found."""
        claim = "not private" if self.claimed is None else f"epsilon {self.claimed:.2f} claimed"
        width = max((len(name) for name in self.membership), default=0)
        out = [f"{claim}; intervals are 95 %", f"{'':{width}}  AUROC                 TPR at 1 % FPR"]
        for name, found in self.membership.items():
            cells = [
                f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in (found["auroc"], found["tpr"])
            ]
            out.append(f"{name:{width}}  {'  '.join(cells)}")
        for attack, by_signal in self.clients.items():
            x = by_signal[LOSS]
            out.append(
                f"clients' models, {attack}: AUROC of the loss {x['mean']:.3f} on average, {x['low']:.3f} to "
                f"{x['high']:.3f}"
            )
        if self.bound is None:
            return [*out, "no canaries, so no bound on epsilon: task.canaries=200 plants some"]
        b = self.bound
        out.append(
            f"canaries: {b.right} of {b.guesses} guesses right, {b.canaries} planted or not: epsilon is at least "
            f"{b.epsilon:.2f}; so many guesses can refute up to {b.refutable:.2f}"
        )
        if self.refuted:
            out.append(
                f"REFUTED: a run with epsilon {self.claimed:.2f} tells so many canaries in 1 of 20 cases at most"
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "confidence": CONFIDENCE,
            "refuted": self.refuted,
            "lower_bound": None if self.bound is None else asdict(self.bound),
            "membership": self.membership,
            "clients": self.clients,
        }


def audit(run_dir: Path, *, rows: int = 1000, guesses: int | None = None) -> Audit:
    """Audit a finished simulation and write ``audit/audit.json`` into its directory.

    Parameters
    ----------
    run_dir : Path
        A completed run.
    rows : int
        Most training rows, and most test rows, that are compared.
    guesses : int, optional
        Canaries to guess, even; default half of them. To choose it after seeing the scores would void the bound.

    Raises
    ------
    PrivetError
        If the run is not complete, was no simulation, or has no canaries to guess.
    """
    config, method, values = final_model(run_dir)
    if not (run_dir / "nodes").is_dir():
        raise PrivetError(f"{run_dir} was no simulation: its rows are on its nodes, and stay there")
    guesses = _guesses(config, guesses)
    attacker = _Attacker(config, values)
    parts, outside = _members(config, rows), _some(config, "others", load_test(config.task), rows)
    inside = functools.reduce(Examples.join, parts)
    one, other = attacker.look(inside), attacker.look(outside)
    scores = {"members": one[LOSS], "others": other[LOSS]}
    bound = None
    if config.task.canaries is not None:
        canaries = draw_canaries(config)
        losses = attacker.look(canaries.examples)[LOSS]
        bound = _bound(config, losses, canaries.included, guesses)
        scores |= {"included": losses[canaries.included], "left out": losses[~canaries.included]}
    found = Audit(
        claimed=read_summary(run_dir).get("epsilon") if config.privacy.private else None,
        delta=config.privacy.delta or 0.0,
        membership=_membership(config, one, other),
        clients=_clients(run_dir, attacker, values, parts, outside) if method.uploads_are_parameters else {},
        bound=bound,
        scores=scores,
    )
    (run_dir / FOLDER).mkdir(exist_ok=True)
    write_atomic(run_dir / FOLDER / FILE, (json.dumps(found.to_dict(), indent=2) + "\n").encode())
    return found


class _Attacker:
    """A model, and what it says of rows."""

    def __init__(self, config: Config, values: Arrays) -> None:
        device = pick_device(config.train.device)
        self._config, self._kind = config, kind_of(config)
        self._model = load_model(config, device=device, dtype=pick_dtype(config.train.dtype, device))
        self._tokenizer = load_tokenizer(config.model)
        self.take(values)

    def take(self, values: Arrays) -> None:
        """Look at another model from now on."""
        self._model.load(values)

    def look(self, examples: Examples) -> dict[str, Floats]:
        """Return every signal of the rows."""
        rows = self._kind.tokenise(self._tokenizer, examples, self._config.model.max_length)
        with all_cores():
            return signals(self._kind, self._model, rows, examples, padding_id(self._tokenizer))


def _members(config: Config, most: int) -> list[Examples]:
    """Draw as many training rows of every client, canaries left out."""
    own = replace(config, task=replace(config.task, canaries=None))
    clients = range(config.federation.clients)
    share = max(1, most // len(clients))
    return [_some(config, f"members-{client}", client_examples(own, client), share) for client in clients]


def _some(config: Config, name: str, examples: Examples, most: int) -> Examples:
    rng = np.random.default_rng(child_seed(config.seed, "audit", name))
    return examples.take(np.sort(rng.permutation(len(examples))[:most]))


def _membership(config: Config, one: dict[str, Floats], other: dict[str, Floats]) -> dict[str, Any]:
    out = {}
    for name in distinct(one):
        members, others = usable(one[name]), usable(other[name])
        if len(members) and len(others):
            out[name] = separation(members, others, child_seed(config.seed, "audit", name)).to_dict()
    return out


def _clients(
    run_dir: Path, attacker: _Attacker, values: Arrays, parts: list[Examples], outside: Examples
) -> dict[str, dict[str, dict[str, float]]]:
    """Look for every client's rows in the model that its uploads give away."""
    uploads = kept_uploads(run_dir, "train")
    found: dict[str, dict[str, list[float]]] = {attack: {} for attack in ATTACKS}
    for client, own in enumerate(parts):
        sent = uploads.get(f"client-{client}")
        if not sent:
            continue
        seen: list[tuple[Arrays, dict[str, float]]] = []
        for attack, last in ATTACKS.items():
            model = rebuild(sent, values, last)
            scores = next((known for known_model, known in seen if _equal(model, known_model)), None)
            if scores is None:  # a method that sends whole models gives the same one away to every attack
                attacker.take(model)
                one, other = attacker.look(own), attacker.look(outside)
                scores = {name: auroc(usable(one[name]), usable(other[name])) for name in distinct(one)}
                seen.append((model, scores))
            for name, value in scores.items():
                found[attack].setdefault(name, []).append(value)
    return {
        attack: {n: {"mean": float(np.mean(v)), "low": min(v), "high": max(v)} for n, v in by_name.items()}
        for attack, by_name in found.items()
        if by_name
    }


def _equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _guesses(config: Config, asked: int | None) -> int:
    """Return how many canaries are guessed: what was asked for, or half of them; 0 where there are none."""
    count = config.task.canaries
    if count is None:
        if asked is not None:
            raise PrivetError("--guesses is for runs with canaries: task.canaries=200, for example")
        return 0
    chosen = 2 * (count // 4) if asked is None else asked
    if chosen % 2 or not 0 < chosen <= count:
        raise PrivetError(f"--guesses {chosen} is not allowed: an even number up to {count}, the canaries")
    return chosen


def _bound(config: Config, losses: Floats, included: np.ndarray, guesses: int) -> Bound:
    # A row without a token that is learnt has no loss: it is guessed last.
    said = guess(np.where(np.isnan(losses), np.nanmedian(losses), losses), guesses)
    right = int(((said == 1) & included).sum() + ((said == -1) & ~included).sum())
    return lower_bound(config.privacy.delta or 0.0, len(losses), guesses, right)
