"""A node: its name, its rows, its store and its duties towards a request.

The order of a private phase is fixed: check everything, charge the ledger, train, store the reply, answer. A
repeated request is answered from the store; whatever is refused before the charge costs nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from client_app.claims import check_scoring, check_training
from client_app.holdings import Holdings
from client_app.memory import KeptArrays, commit, run_name, safe_run, secret_name
from client_app.node_config import NodeConfig
from client_app.retention import is_purged, purge
from client_app.rows import Prepared, Rows
from client_app.scoring import public_rows, refuse_foreign_run, score_models
from client_app.store import NodeStore
from client_app.trainer import Diagnostics, Noise, Trainer
from privet.adapters import AdaptedModel, adapter_spec, load_model, load_tokenizer
from privet.config import Config
from privet.corrections import Correction
from privet.data.collate import padding_id
from privet.data.holdout import split_holdout
from privet.devices import pick_device, pick_dtype
from privet.errors import ConfigError, PrivetError, Refusal, StoreError
from privet.kinds.catalogue import kind_of
from privet.plan import is_enough, required_sigma
from privet.privacy.accounting import Step
from privet.privacy.ledger import MECHANISM, Entry, utc_now
from privet.privacy.rng import make_randomness
from privet.privacy.sampling import sampling_rate
from privet.quantise import encode
from privet.seeding import child_seed
from privet.trainables import Trainables
from privet.versions import installed
from privet.weights import base_weights
from privet.wire import (
    Arrays,
    Description,
    Failed,
    Payload,
    Reply,
    Request,
    check_arrays,
    code_hash,
    pack_description,
    pack_failure,
    pack_reply,
    pack_scores,
    unpack_request,
)
from strategies.base import load_method
from strategies.rounds import EVALUATE

log = logging.getLogger("privet")

_LONGEST = 500  # characters of a refusal; some texts repeat what the server sent

# --- answers -------------------------------------------------------------------------------------


def answer_describe(content: RecordDict, raw_node_config: Mapping[str, Any]) -> RecordDict:
    """Answer ``query.describe``: name, declared rows, versions."""
    name = ""
    try:
        node = NodeConfig.read(raw_node_config)
        name = node.name
        request = unpack_request(content)
        config = _checked_config(node, request)
        refuse_unsafe(node, config)
        examples, _ = split_holdout(config, node.examples(config, tell=True))
        return pack_description(
            Description(
                node=node.name,
                examples=node.declared(len(examples)),
                code_hash=code_hash(),
                versions=installed(),
                weights=base_weights(config, fetch=True) or "",
            )
        )
    except PrivetError as error:
        return _failure(error, name, uncharged=True)


def answer_train(
    content: RecordDict, raw_node_config: Mapping[str, Any], holdings: Holdings | None = None
) -> RecordDict:
    """Answer one phase of one round, or say in one line why not."""
    holdings = holdings or Holdings()
    name = ""
    charged = False

    def on_charge() -> None:
        nonlocal charged
        charged = True

    try:
        node = NodeConfig.read(raw_node_config)
        name = node.name
        request = _own_request(node, content)
        config = _checked_config(node, request)
        with holdings.opened(node, request) as store:
            known = store.load_reply(request.fingerprint)
            if known is None:
                rows = holdings.rows(node, config, store)
                known = _Phase(node, request, config, store, rows, on_charge).run()
            else:
                charged = True
                commit(store, known[1]["kept"])
        return pack_reply(_reply_from(known))
    except PrivetError as error:
        # A store that cannot be read or written may hold a charge that this call does not know of.
        return _failure(error, name, uncharged=not charged and not isinstance(error, StoreError))


def answer_evaluate(
    content: RecordDict, raw_node_config: Mapping[str, Any], holdings: Holdings | None = None
) -> RecordDict:
    """Answer a request for scores of the server's model and of this node's own."""
    holdings = holdings or Holdings()
    name = ""
    try:
        node = NodeConfig.read(raw_node_config)
        name = node.name
        request = _own_request(node, content)
        if request.phase != EVALUATE:
            raise Refusal("phase", "this is no request for scores")
        config = _checked_config(node, request)
        refuse_unsafe(node, config)
        check_scoring(request, config, load_method(config, adapter_spec(config)))
        with holdings.opened(node, request) as store:
            refuse_foreign_run(store, request)
            return pack_scores(score_models(node, request, config, store))
    except PrivetError as error:
        return _failure(error, name, uncharged=True)


def _failure(error: PrivetError, node: str, *, uncharged: bool) -> RecordDict:
    """Return a refusal.

    Texts that may name local files, and those of errors after rows were drawn, stay in the node's own log.
    """
    line = _one_line(str(error))
    log.error("%s refuses: %s", node or "a node without a name", line)
    kind = error.kind if isinstance(error, Refusal) else type(error).__name__.removesuffix("Error").lower()
    shown = isinstance(error, (Refusal, ConfigError)) and uncharged
    text = line if shown else "the node's own log has the reason"
    return pack_failure(Failed(node, kind, text, uncharged))


def _one_line(text: str) -> str:
    """Return a text that may repeat what a server sent as one short line of printable characters."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(plain.split())[:_LONGEST]


def _own_request(node: NodeConfig, content: RecordDict) -> Request:
    """Return a request that is for this node."""
    request = unpack_request(content)
    if request.node != node.name:
        raise Refusal("another-node", "the request is for another node")
    return request


def _checked_config(node: NodeConfig, request: Request) -> Config:
    """Return the configuration of a request whose hashes hold, as this node carries it out."""
    if node.code_hash is not None and not code_hash().startswith(node.code_hash):
        raise Refusal("code-pin", "this node's owner allows other code only (code-hash)")
    if request.code_hash != code_hash():
        raise Refusal("code-hash", "this node runs other code than the server")
    if hashlib.sha256(request.config.encode()).hexdigest() != request.config_hash:
        raise Refusal("config-hash", "the configuration does not have the announced hash")
    return node.adapt(Config.from_json(request.config))


def _methods_of(config: Config) -> set[str]:
    """Return the method by its name, a word of the server's, and by the file of its class, which is what runs."""
    cls = type(load_method(config, adapter_spec(config)))
    return {config.method.name, cls.__module__.rpartition(".")[2]}


def refuse_unsafe(node: NodeConfig, config: Config) -> None:
    """Refuse what this node's owner has not allowed, whatever the server asks."""
    privacy = config.privacy
    if node.methods is not None and not _methods_of(config) <= set(node.methods):
        raise Refusal("method", f"this node takes part in {', '.join(node.methods)} only (methods)")
    if not privacy.private and not node.allow_non_private:
        raise Refusal("not-private", "this node trains with privacy=dp only (allow-non-private is not set)")
    capped = node.max_epsilon is not None
    if (capped or not node.simulated) and privacy.randomness == "seeded":
        raise Refusal("seeded", "privacy.randomness=seeded is for simulations: it is not private")
    if (capped or not node.simulated) and privacy.diagnostics:
        raise Refusal("diagnostics", "privacy.diagnostics=true is for simulations: it is not private")
    if node.max_delta is not None and privacy.delta is not None and privacy.delta > node.max_delta:
        raise Refusal("delta", f"privacy.delta = {privacy.delta:g} is above this node's {node.max_delta:g}")
    if node.max_epsilon is not None and privacy.epsilon is not None and privacy.epsilon > node.max_epsilon:
        raise Refusal(
            "epsilon",
            f"privacy.epsilon = {privacy.epsilon:g} is above this node's max-epsilon {node.max_epsilon:g}",
        )
    if node.min_clip is not None and privacy.clip is not None and privacy.clip < node.min_clip:
        raise Refusal(
            "clip", f"privacy.clip = {privacy.clip:g} is below this node's min-clip {node.min_clip:g}"
        )


def refuse_raw(node: NodeConfig) -> None:
    """Refuse a run that calls itself private and yet trains on rows as they are, unless the owner allows that."""
    if not node.simulated and (not node.allow_non_private or node.max_epsilon is not None):
        raise Refusal(
            "not-private", "the method trains a phase without noise, which this node does not allow"
        )


class _Phase:
    """One phase on one node; a Session for the method's client half."""

    def __init__(
        self,
        node: NodeConfig,
        request: Request,
        config: Config,
        store: NodeStore,
        rows: Rows,
        on_charge: Callable[[], None],
    ) -> None:
        self._node = node
        self._request = request
        self._config = config
        self._store = store
        self._rows = rows
        self._on_charge = on_charge
        self._kept = KeptArrays(store, request.run, request.round, request.fingerprint[:16])
        self._flags: list[str] = []
        self._begins = False
        self._entered = False
        self._diagnostics: Diagnostics | None = None

    def run(self) -> tuple[dict[str, Arrays], dict[str, Any]]:
        """Check, charge, train, store; return what :func:`_reply_from` reads."""
        request, config = self._request, self._config
        refuse_unsafe(self._node, config)
        method = load_method(config, adapter_spec(config))
        check_training(request, config, method)
        method.check_download(request.phase, request.payload)
        facts, declared = self._rows.facts, self._rows.declared
        self._public = request.phase in method.public_phases
        raw = not config.privacy.private or request.phase in method.raw_phases
        self._noiseless = raw or self._public
        if config.privacy.private and method.raw_phases:
            refuse_raw(self._node)
        if declared < 1 or (facts.usable < 1 and raw):
            # Under DP a node without usable rows trains on empty draws: that it has none is private.
            raise Refusal("zero-rows", "this node has no rows")
        self._freeze(facts.snapshot, declared)

        self._steps = config.train.steps(declared)
        self._q = sampling_rate(config.train.batch_size, declared)
        self._declared = declared
        self._release = method.releases.get(request.phase)
        self._check_noise()
        payload = method.client(request.phase, request.payload, self)
        return self._finish(payload)

    # --- Session ---------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of the round."""
        return self._request.round

    @cached_property
    def model(self) -> AdaptedModel:
        """The model at its initial values; loaded when a phase first needs it."""
        train = self._config.train
        device = pick_device(train.device)
        torch.set_num_threads(train.threads)
        return load_model(self._config, device=device, dtype=pick_dtype(train.dtype, device))

    @property
    def acknowledged(self) -> int:
        """Last round whose reply of this node is in the server's state."""
        return self._request.acknowledged

    def train(
        self, trainables: Trainables, *, lr: float | None = None, correction: Correction | None = None
    ) -> None:
        """Take the local steps; under DP, charge for them first."""
        if self._diagnostics is not None:
            raise Refusal("phase", "a phase trains once")
        if self._release != "dp-sgd":
            raise Refusal("phase", "this phase does not declare a release of its own, so it must not train")
        config = self._config
        trainer = self._trainer()
        if self._noiseless:
            self._enter_round()
            self._diagnostics = trainer.train_plain(
                trainables, self._steps, self._order("batches"), lr=lr, correction=correction
            )
            return
        seeded = config.privacy.randomness == "seeded"
        seed = child_seed(config.seed, "noise", self._request.fingerprint) if seeded else None
        randomness = make_randomness(config.privacy.randomness, seed)
        noise = Noise(self._q, self._request.sigma, randomness)
        self._diagnostics = trainer.train_private(
            trainables, self._steps, noise, lr=lr, correction=correction, charge=self._pay
        )

    def moments(self, trainables: Trainables, kind: str) -> Arrays:
        """Return means of squared per-example gradients, without noise."""
        if not self._noiseless:
            raise Refusal("phase", "this phase is private: squared gradients of single rows do not leave it")
        return self._trainer().moments(trainables, kind, self._steps, self._order("moments"))

    def chance(self, purpose: str) -> float:
        """Return a number from U(0, 1) that the request and this node's secret decide."""
        seed = self._config.seed if self._node.simulated else self._secret()
        return child_seed(seed, purpose, self._request.round, self._node.name) / 2**63

    def recall(self, name: str, *, this_round: bool = False) -> Arrays | None:
        """Return arrays that this node kept in an earlier phase of this run."""
        return self._kept.recall(name, this_round=this_round)

    def keep(self, name: str, arrays: Arrays) -> None:
        """Keep arrays; they take the place of older ones together with the stored reply."""
        self._kept.keep(name, arrays)

    def flag(self, text: str) -> None:
        """Put a public remark on the reply."""
        self._flags.append(text)

    def _trainer(self) -> Trainer:
        config = self._config
        kind = kind_of(config)
        prepared = self._public_rows() if self._public else self._rows.prepared(kind.tokenise)
        rows = prepared.rows
        if len(rows) and not kind.learns(rows):
            if self._noiseless or self._node.simulated:
                raise Refusal(
                    "no-tokens", "no row of this node has a token to learn: is model.max_length too short?"
                )
            log.warning("no row of this node has a token to learn")  # that it is so is private
        return Trainer(self.model, rows, prepared.pad_id, config.train, config.privacy, kind)

    def _public_rows(self) -> Prepared:
        """Return the public rows that this phase trains on; the nodes of a simulation share them out."""
        config, node = self._config, self._node
        examples = public_rows(node, config, "this phase trains on public rows only")
        if node.partition is not None:
            examples = examples.take(np.arange(node.partition, len(examples), config.federation.clients))
        if not len(examples):
            raise Refusal("no-public-rows", "this node has no public row to train on")
        tokenizer = load_tokenizer(config.model)
        rows = kind_of(config).tokenise(tokenizer, examples, config.model.max_length)
        return Prepared(rows, padding_id(tokenizer))

    def _order(self, purpose: str) -> int:
        """Return the seed of batches that need not be secret."""
        return child_seed(
            self._config.seed, purpose, self._request.round, self._request.phase, self._node.name
        )

    # --- duties ----------------------------------------------------------------------------------

    def _secret(self) -> int:
        """Return this node's secret for the run; made at first use."""
        name = secret_name(self._request.run)
        kept = self._store.load_json(name)
        if kept is None:
            kept = {"secret": secrets.randbits(128)}
            self._store.save_json(name, kept)
        return int(kept["secret"])

    def _freeze(self, data: str, declared: int) -> None:
        """Hold the run to its first configuration, rows and order of rounds (design rule 13)."""
        request = self._request
        name = run_name(request.run)
        facts = {
            "config": request.config_hash,
            "code": request.code_hash,
            "rows": data,
            "declared": declared,
            "planned_steps": request.planned_steps,
        }
        frozen = self._store.load_json(name)
        if is_purged(frozen):
            raise Refusal("purged", "what this node kept of the run was purged, so the run cannot go on here")
        if frozen is None:
            if request.met and self._config.privacy.private:
                raise Refusal("store-lost", "this node answered before, but its store and ledger are gone")
            if request.met:
                self.flag("store-lost")
            frozen = {**facts, "round": request.round}
            self._begins = True
        for key, what in (
            ("config", "the configuration"),
            ("code", "the code"),
            ("rows", "this node's rows"),
            ("declared", "this node's declared row count"),
            ("planned_steps", "the number of planned steps"),
        ):
            if frozen[key] != facts[key]:
                raise Refusal("changed", f"{what} changed during the run; a change needs a new run")
        if request.round < frozen["round"]:
            raise Refusal("order", f"round {request.round} was asked for after round {frozen['round']}")
        if request.acknowledged < frozen.get("acknowledged", 0):
            raise Refusal("order", "a reply of this node that counted before cannot stop counting")
        self._frozen = (name, {**frozen, "round": request.round, "acknowledged": request.acknowledged})

    def _enter_round(self) -> None:
        """Put on record what :meth:`_freeze` compares with; a request that was refused has moved nothing."""
        if self._entered:
            return
        self._entered = True
        name, facts = self._frozen
        self._store.save_json(name, facts)
        if self._begins and self._node.retention_days is not None:
            try:
                purge(self._store, older_than=self._node.retention_days, spare=self._request.run)
            except (PrivetError, OSError):
                log.exception("what earlier runs left could not be purged")

    def _check_noise(self) -> None:
        """Recompute the noise from this node's own q and refuse a lower one (design rule 9)."""
        request = self._request
        if request.planned_steps < self._steps:
            raise Refusal("sigma", "fewer steps are planned than this round takes")
        if request.planned_steps > self._steps * self._config.federation.rounds:
            raise Refusal("sigma", "more steps are planned than the run's rounds take")
        if not self._config.privacy.private:
            return
        if is_enough(self._config, self._q, request.planned_steps, request.sigma):
            return
        needed = required_sigma(self._config, self._q, request.planned_steps)
        if not request.sigma >= needed * (1 - 1e-6):
            raise Refusal(
                "sigma", f"sigma {request.sigma:.4g} is below the {needed:.4g} that this node needs"
            )

    def _pay(self) -> None:
        """Charge for the phase; from here on, the round counts."""
        self._charge()
        self._enter_round()

    def _charge(self) -> None:
        """Write the ledger's entry before anything that it pays for exists (design rule 10)."""
        privacy, request = self._config.privacy, self._request
        assert privacy.delta is not None
        assert privacy.epsilon is not None
        assert privacy.clip is not None
        entry = Entry(
            run=request.run,
            method=self._config.method.name,
            round=request.round,
            phase=request.phase,
            mechanism=MECHANISM,
            q=self._q,
            sigma=request.sigma,
            clip=privacy.clip,
            steps=self._steps,
            declared=self._declared,
            request=request.fingerprint,
            time=utc_now(),
        )
        ledger = self._store.ledger(privacy.delta, self._node.max_epsilon)
        place = (entry.run, entry.round, entry.phase)
        earlier = [e for e in ledger.entries if (e.run, e.round, e.phase) == place]
        if earlier:
            self._on_charge()  # whatever becomes of this try, an earlier one is in the ledger
        if any(e.request == entry.request for e in earlier):
            # No reply is stored: that try was cut off. Another one would take more steps than the schedule has.
            raise Refusal("charged", "this phase was charged before, and was cut off: it is not repeated")
        ledger.admit(request.run, Step(self._q, request.sigma, request.planned_steps))
        ledger.charge(entry, run_epsilon=privacy.epsilon, accountant=privacy.accountant)
        self._on_charge()

    def _finish(self, payload: Payload) -> tuple[dict[str, Arrays], dict[str, Any]]:
        """Log what stays, then store the reply with everything that was kept, then let it go."""
        seen = self._diagnostics
        self._enter_round()
        self._log(seen)
        for arrays in (payload.adapter, payload.head):
            check_arrays(arrays, {n: tuple(v.shape) for n, v in arrays.items()}, "reply")
        open_run = not self._config.privacy.private or self._config.privacy.diagnostics
        values: dict[str, Any] = {
            "node": self._node.name,
            "request": self._request.fingerprint,
            "config_hash": self._request.config_hash,
            "code_hash": self._request.code_hash,
            "examples": self._declared,
            "steps": seen.steps if seen else 0,
            "q": self._q,
            "sigma": self._request.sigma,
            "flags": self._flags,
            "train_loss": _finite(seen.train_loss) if seen and open_run else None,
            "grad_norm": _finite(seen.grad_norm) if seen and open_run else None,
            "kept": self._kept.pending(),
        }
        if self._config.federation.upload == "int8":
            payload = encode(payload)
        tensors = {"adapter": payload.adapter, "head": payload.head, "once": payload.once}
        if seen is not None or values["kept"]["files"]:
            # What did not train is worked out again as well; storing it would push out a reply that was paid for.
            self._store.save_reply(
                self._request.fingerprint, tensors, values, run=safe_run(self._request.run)
            )
        commit(self._store, values["kept"])
        return tensors, values

    def _log(self, seen: Diagnostics | None) -> None:
        """Append to the node's own log; under DP none of this may leave the node."""
        if seen is None:
            return
        line = {
            "run": self._request.run,
            "round": self._request.round,
            "phase": self._request.phase,
            **dataclasses.asdict(seen),
        }
        try:
            with (self._node.root(self._request.store) / "log.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError:
            log.exception(
                "the node's log cannot be written"
            )  # the phase is paid for: its reply must not be lost


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _reply_from(known: tuple[dict[str, Arrays], dict[str, Any]]) -> Reply:
    tensors, values = known
    fields = {k: v for k, v in values.items() if k != "kept"}
    for name in ("train_loss", "grad_norm"):
        fields[name] = float("nan") if fields[name] is None else fields[name]
    fields["flags"] = tuple(fields["flags"])
    payload = Payload(**{part: tensors.get(part, {}) for part in ("adapter", "head", "once")})
    return Reply(**fields, payload=payload)
