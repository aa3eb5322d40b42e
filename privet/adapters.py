"""The frozen base model with its LoRA factors and its head: a classifier, or the projector of images where that trains.

Every tensor that a method may touch has one name: ``<module>.lora_A.weight`` (r x n),
``<module>.lora_B.weight`` (m x r) and the head's ``head.*`` (mean pooling) or the model's own head names.
PEFT holds the factors; names on the wire, in stores and in the exported adapter are these.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from privet.captioner import ENCODERS, Captioner
from privet.config import Config, ModelConfig, TaskConfig, unknown
from privet.data.sources import resolve_path
from privet.errors import ConfigError
from privet.learners import (
    LanguageModel,
    Learner,
    MeanPooledClassifier,
    ModelClassifier,
    VisionLanguageModel,
)
from privet.lowrank import factorise
from privet.seeding import child_generator, child_seed
from privet.weights import files_digest, read_tensors

transformers_logging.disable_progress_bar()

ADAPTER = "default"
IMAGE = "<image>"
"""What stands for an image in a text that a tokenizer reads."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TargetModule:
    """One adapted linear map: `out` = m rows of B, `inp` = n columns of A."""

    name: str
    out: int
    inp: int

    @property
    def a(self) -> str:
        """Name of the factor A (r x n)."""
        return f"{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """Name of the factor B (m x r)."""
        return f"{self.name}.lora_B.weight"

    @property
    def delta(self) -> str:
        """Name of a change of the frozen weight (m x n), in units of the product B A."""
        return f"{self.name}.delta"


@dataclass(frozen=True)
class AdapterSpec:
    """Names and shapes of everything that can train; known without loading any weights.

    `projects` says that the head is a projector in front of the language model. Of models that see, `image_token` is
    the placeholder of an image, `image_tokens` how many it has, and `image_size` its height and width in pixels.
    """

    targets: tuple[TargetModule, ...]
    rank: int
    scaling: float
    head: Mapping[str, tuple[int, ...]]
    base_parameters: int
    hidden_size: int
    layers: int
    projects: bool = False
    image_token: int = 0
    image_tokens: int = 0
    image_size: int = 0

    @property
    def a(self) -> Shapes:
        """Shapes of all A factors, in model order."""
        return {t.a: (self.rank, t.inp) for t in self.targets}

    @property
    def b(self) -> Shapes:
        """Shapes of all B factors, in model order."""
        return {t.b: (t.out, self.rank) for t in self.targets}

    @property
    def deltas(self) -> Shapes:
        """Shapes of the changes that a method may make to the frozen weights, in model order."""
        return {t.delta: (t.out, t.inp) for t in self.targets}

    @property
    def lora(self) -> Shapes:
        """Shapes of all factors, module by module, B before A (the order of FedHSIP's theta_D)."""
        out: Shapes = {}
        for t in self.targets:
            out[t.b] = (t.out, self.rank)
            out[t.a] = (self.rank, t.inp)
        return out


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in a set of arrays."""
    return sum(math.prod(s) for s in shapes.values())


# --- the model -----------------------------------------------------------------------------------


class AdaptedModel:
    """A base model whose adapter and head can be swapped in and out.

    One instance lives as long as its worker process; :meth:`load` brings it to exactly the given state, so
    nothing of one client reaches the next.
    """

    def __init__(self, module: Learner, spec: AdapterSpec, initial: Mapping[str, Tensor]) -> None:
        self.module = module
        self.spec = spec
        self._initial = dict(initial)
        self._parameters = _named_parameters(module, spec)
        full_names = {id(p): n for n, p in module.named_parameters()}
        self._full_names = {n: full_names[id(p)] for n, p in self._parameters.items()}
        self._short_names = {full: n for n, full in self._full_names.items()}
        self._folded: dict[str, Tensor] = {}  # frozen weights as they came, of the targets that were changed
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        module.eval()
        self.load({})

    @property
    def device(self) -> torch.device:
        """Where the trainable tensors live."""
        return next(iter(self._parameters.values())).device

    @property
    def vocabulary(self) -> int:
        """How many tokens the base model reads."""
        return int(self._text_config.vocab_size)

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a text, where the base model has exactly one."""
        token = getattr(self._text_config, "eos_token_id", None)
        return token if isinstance(token, int) else None

    @property
    def _text_config(self) -> Any:
        return cast(Any, self.module.backbone.config).get_text_config()

    def parameter(self, name: str) -> nn.Parameter:
        """Return the live parameter of that name."""
        return self._parameters[name]

    def full_name(self, name: str) -> str:
        """Return the parameter's name inside :attr:`module`."""
        return self._full_names[name]

    def short_name(self, full: str) -> str:
        """Undo :meth:`full_name`; other names, such as ``theta``, stay as they are."""
        return self._short_names.get(full, full)

    def initial(self) -> dict[str, Tensor]:
        """Return the values that a run starts from: see :func:`initial_values` (float32, CPU)."""
        return dict(self._initial)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the whole adapter and head: the initial values, overwritten by `values`.

        A target's ``delta`` is added to its frozen weight, times alpha / r; without one the weight is as it came.

        Raises
        ------
        ValueError
            For an unknown name or a wrong shape; the model is then unchanged.
        ConfigError
            For a change of a frozen weight that is quantised.
        """
        _check_shapes(values, {**self.spec.lora, **self.spec.head, **self.spec.deltas})
        self._fold({t.name: values[t.delta] for t in self.spec.targets if t.delta in values})
        for name, parameter in self._parameters.items():
            value = values.get(name, self._initial[name])
            if parameter.shape != value.shape:
                parameter.data = parameter.data.new_empty(value.shape)
            parameter.copy_(value.to(parameter.device, parameter.dtype))
            parameter.grad = None

    @torch.no_grad()
    def widen(self, rank: int) -> None:
        """Give every factor `rank` columns or rows, all zero, until the next :meth:`load`; alpha / r stays."""
        for t in self.spec.targets:
            for name, shape in ((t.b, (t.out, rank)), (t.a, (rank, t.inp))):
                parameter = self._parameters[name]
                parameter.data = parameter.data.new_zeros(shape)
                parameter.grad = None

    def _fold(self, deltas: Mapping[str, Tensor]) -> None:
        """Change the frozen weights by exactly these deltas, by target."""
        for name in deltas:
            if name not in self._folded:
                weight = self._frozen(name).weight
                if not weight.is_floating_point():
                    raise ConfigError(
                        f"{name} is quantised: a method that changes the base model cannot use it"
                    )
                self._folded[name] = weight.detach().clone()
        for name, before in self._folded.items():
            layer, after = self._frozen(name), before
            if name in deltas:
                delta = deltas[name].to(before.device) * self.spec.scaling
                after = before.float() + (delta.t() if isinstance(layer, Conv1D) else delta)
            layer.weight.copy_(after)

    def _frozen(self, target: str) -> nn.Linear | Conv1D:
        return cast(nn.Linear, cast(Any, self.module.backbone.get_submodule(target)).base_layer)

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return float32 CPU copies of the named tensors."""
        return {n: self._parameters[n].detach().to("cpu", torch.float32, copy=True) for n in names}


def _check_shapes(values: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for an unknown name or a wrong shape."""
    for name, value in values.items():
        if name not in expected:
            raise ValueError(f"unexpected array '{name}'")
        if tuple(value.shape) != tuple(expected[name]):
            raise ValueError(
                f"array '{name}' has shape {tuple(value.shape)}, expected {tuple(expected[name])}"
            )


def initial_tensors(spec: AdapterSpec, seed: int, head: str | None) -> dict[str, Tensor]:
    """Return PEFT's initialisation from the run seed, equal on every machine.

    A is Kaiming-uniform with a = sqrt(5), that is U(-1/sqrt(n), 1/sqrt(n)), B is zero. A `frozen` head is drawn
    from N(0, 0.02^2); a trained head starts with a zero output layer (its last weight), so that the first
    gradients are those of the base model's features. A projector starts as A does, with zero biases.
    """
    out: dict[str, Tensor] = {}
    for name, (rank, inp) in spec.a.items():
        bound = 1 / math.sqrt(inp)
        generator = child_generator(seed, "init", name)
        out[name] = torch.empty(rank, inp).uniform_(-bound, bound, generator=generator)
    for name, shape in spec.b.items():
        out[name] = torch.zeros(shape)
    weights = [n for n in spec.head if n.endswith(".weight")]
    for name, shape in spec.head.items():
        generator = child_generator(seed, "init", name)
        if spec.projects and name.endswith(".weight"):
            bound = 1 / math.sqrt(shape[-1])
            out[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            continue
        zero = not name.endswith(".weight") or (head != "frozen" and name == weights[-1])
        out[name] = torch.zeros(shape) if zero else torch.randn(shape, generator=generator) * 0.02
    return out


def initial_values(config: Config) -> dict[str, Tensor]:
    """Return what a run starts from, equal on every machine: the seed's tensors, and a base model's own projector.

    The projector is read from the model's files, in float32, without loading the model.

    Raises
    ------
    ConfigError
        If the files are not here and cannot be fetched, or have no such projector.
    """
    spec, model = adapter_spec(config), config.model
    out = initial_tensors(spec, config.seed, config.head)
    if spec.projects and model.vision is None and model.architecture is None:
        out |= read_tensors(model.path or "", model.revision, spec.head)
    return out


def _named_parameters(module: Learner, spec: AdapterSpec) -> dict[str, nn.Parameter]:
    """Map Privet's names to live parameters."""
    out: dict[str, nn.Parameter] = {}
    for target in spec.targets:
        layer = module.backbone.get_submodule(target.name)
        out[target.b] = cast(nn.Parameter, cast(Any, layer).lora_B[ADAPTER].weight)
        out[target.a] = cast(nn.Parameter, cast(Any, layer).lora_A[ADAPTER].weight)
    for prefix, head in module.head_modules().items():
        for name, parameter in head.named_parameters():
            out[f"{prefix}.{name}"] = parameter
    return out


# --- building ------------------------------------------------------------------------------------


def model_config(model: ModelConfig, labels: int) -> Any:
    """Return the transformers configuration for that many labels, 0 of a language model; reads a file at most."""
    if model.architecture is not None:
        values = dict(model.architecture)
        with building(model):
            config = AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        with loading(model.path):
            config = AutoConfig.from_pretrained(
                location(model), revision=model.revision or "main", trust_remote_code=False
            )
    if labels:
        config.num_labels = labels
    return config


@contextmanager
def building(model: ModelConfig) -> Iterator[None]:
    """Turn whatever a model class raises for impossible sizes into one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.architecture = {model.architecture} cannot be built: {type(error).__name__}: {reason}"
        ) from None


@contextmanager
def loading(path: str | None) -> Iterator[None]:
    """Turn what the loaders raise into one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split(". ")[0].split())[:200]
        raise ConfigError(f"'{path}' of the model cannot be loaded: {reason}") from None


def location(model: ModelConfig) -> str:
    """Return the model's folder on this machine, or its hub name."""
    if model.path is None:
        raise ConfigError(
            "model.path is missing: a hub name, a folder, or model.architecture for random weights"
        )
    return _place(model.path)


def _place(path: str) -> str:
    """Return a folder on this machine, or the hub name as it is."""
    if not path.startswith(("package:", "~", "/", ".")):
        return path
    folder = resolve_path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder '{path}' with a model")
    return str(folder)


@dataclass(frozen=True)
class _Shaping:
    """A configuration that equals every other one with the same model and task: no other setting shapes a model."""

    key: str
    config: Config = field(compare=False)


@lru_cache(maxsize=8)
def _spec(shaping: _Shaping) -> AdapterSpec:
    config = shaping.config
    labels = len(config.task.labels)
    with torch.device("meta"):
        module = _bare_module(config, model_config(config.model, labels), random=True)
    heads = {id(p) for head in module.head_modules().values() for p in head.parameters()}
    base = sum(p.numel() for p in module.parameters() if id(p) not in heads)
    targets = tuple(_targets(module, config.model))
    inner = config.model.lora
    shapes = {
        f"{prefix}.{name}": tuple(p.shape)
        for prefix, head in module.head_modules().items()
        for name, p in head.named_parameters()
    }
    hidden = module.backbone.config.get_text_config()
    seer = module if isinstance(module, (VisionLanguageModel, Captioner)) else None
    return AdapterSpec(
        targets=targets,
        rank=inner.rank,
        scaling=inner.alpha / inner.rank,
        head=shapes,
        base_parameters=base,
        hidden_size=getattr(hidden, "hidden_size", 0),
        layers=getattr(hidden, "num_hidden_layers", 0),
        projects=config.model.projector == "trained",
        image_token=seer.image_token if seer else 0,
        image_tokens=seer.image_tokens if seer else 0,
        image_size=seer.image_size if seer else 0,
    )


def adapter_spec(config: Config) -> AdapterSpec:
    """Return names and shapes without loading weights (the model is built on the meta device).

    Raises
    ------
    ConfigError
        If a target module matches nothing, with the nearest names that exist.
    """
    settings = config.to_dict()
    return _spec(_Shaping(json.dumps([settings["model"], settings["task"]]), config))


def _targets(learner: Learner, model: ModelConfig) -> Iterator[TargetModule]:
    """Yield every linear map whose name ends in one of the target names, in model order; of language models alone."""
    matched: set[str] = set()
    linears = {n: m for n, m in learner.backbone.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    if isinstance(learner, VisionLanguageModel):
        inner = {n: m for n, m in linears.items() if n.startswith(f"{learner.language}.")}
        for target in model.lora.targets:
            where = [n for n in linears if n == target or n.endswith("." + target)]
            if where and not set(where) & set(inner):
                raise ConfigError(
                    f"target module '{target}' of model.lora.targets is {where[0]}, outside of the language model, "
                    f"which alone is adapted: {learner.language}"
                )
        linears = inner
    for name, module in linears.items():
        hits = [t for t in model.lora.targets if name == t or name.endswith("." + t)]
        if not hits:
            continue
        matched.update(hits)
        if isinstance(module, nn.Linear):
            yield TargetModule(name, module.out_features, module.in_features)
        else:
            yield TargetModule(name, module.weight.shape[1], module.weight.shape[0])
    leaves = sorted({n.rpartition(".")[2] for n in linears})
    for target in model.lora.targets:
        if target not in matched:
            raise ConfigError(unknown("target module", target, leaves) + ", set by model.lora.targets")
    if not model.lora.targets:
        raise ConfigError(f"model.lora.targets = [] is not allowed: at least one of {', '.join(leaves)}")


def _bare_module(
    config: Config,
    transformers_config: Any,
    *,
    random: bool,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Learner:
    model = config.model
    auto, wrap = _classes(config, transformers_config)
    if random:
        with building(model):
            backbone = auto.from_config(transformers_config)
    else:
        with loading(model.path):
            backbone = auto.from_pretrained(
                location(model),
                revision=model.revision or "main",
                config=transformers_config,
                dtype=dtype or torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                **_quantised(model, dtype or torch.float32, device),
            )
    return wrap(backbone)


def _quantised(model: ModelConfig, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return how the frozen weights are held in few bits; nothing where they are not.

    Raises
    ------
    ConfigError
        If the package that holds them is not installed.
    """
    if model.bits is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.bits = {model.bits} needs the package bitsandbytes: pip install bitsandbytes"
        )
    # What trains is not quantised; the list takes the place of a default that spares the output layer.
    spared: dict[str, Any] = (
        {"llm_int8_skip_modules": ["lm_head", "multi_modal_projector"]}
        if model.projector == "trained"
        else {}
    )
    if model.bits == 8:
        # Above a threshold its columns are picked over the whole batch, and examples would see each other.
        held = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, **spared)
    else:
        held = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, **spared
        )
    return {"quantization_config": held, "device_map": {"": device}}


def _classes(config: Config, transformers_config: Any) -> tuple[Any, Callable[[Any], Learner]]:
    """Return the class of transformers that a task needs, and what makes its model one that trains here.

    Raises
    ------
    ConfigError
        For a task that the model is not made for.
    """
    task, model = config.task, config.model
    if task.sees and model.projector is None:
        raise ConfigError(
            f"task.kind = {task.kind} needs a model that sees images, for example model=llava "
            "(model.projector = frozen or trained)"
        )
    if model.projector is not None and not task.sees:
        raise ConfigError(
            f"model.projector = {model.projector} has no effect with task.kind={task.kind}: "
            "captioning and visual_question have images"
        )
    if task.sees and model.vision is None:
        if type(transformers_config) not in AutoModelForImageTextToText._model_mapping:
            raise ConfigError(
                f"task.kind = {task.kind} needs a model that sees images, which "
                f"{transformers_config.model_type} is not: choose another model, or put model.vision before it"
            )
        trained = model.projector == "trained"
        return AutoModelForImageTextToText, lambda backbone: VisionLanguageModel(backbone, trained)
    if task.generates:
        sees_ahead = getattr(transformers_config, "is_decoder", True) is False
        if sees_ahead or getattr(transformers_config, "is_encoder_decoder", False):
            raise ConfigError(
                f"task.kind = {task.kind} needs a causal language model, which "
                f"{transformers_config.model_type} is not: choose another model"
            )
        if model.vision is not None:
            encoder = ENCODERS[model.vision]
            meta = torch.get_default_device().type == "meta"
            return AutoModelForCausalLM, lambda backbone: Captioner(backbone, encoder(not meta))
        return AutoModelForCausalLM, LanguageModel
    if task.pooling == "mean":
        return AutoModel, lambda backbone: MeanPooledClassifier(backbone, len(task.labels))
    return AutoModelForSequenceClassification, ModelClassifier


def load_model(config: Config, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> AdaptedModel:
    """Return the adapted model of this process, loading the base weights at the first call only.

    The cache holds one model: a worker process serves one run. Its adapter is set by
    :meth:`AdaptedModel.load` before every use.
    """
    relevant = json.dumps(
        [
            config.to_dict()["model"],
            config.task.head,
            config.task.pooling,
            config.task.labels,
            config.task.kind,
            config.seed,
        ]
    )
    slot = _slot(relevant, device, dtype)
    if not slot:
        slot.append(build_model(config, device=device, dtype=dtype))
    return slot[0]


@lru_cache(maxsize=1)
def _slot(relevant: str, device: str, dtype: torch.dtype) -> list[AdaptedModel]:
    """One place for a model; its key leaves out settings that do not shape it, so they force no reload."""
    return []


def build_model(config: Config, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> AdaptedModel:
    """Load the base model, check its hash, inject LoRA and freeze everything else.

    Raises
    ------
    ConfigError
        If the weights do not have the pinned hash or the model cannot be loaded.
    """
    spec = adapter_spec(config)
    model = config.model
    random = model.architecture is not None
    if not random:
        _check_weights(model)
    transformers_config = model_config(model, len(config.task.labels))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(child_seed(config.seed, "base-weights"))
        module = _bare_module(config, transformers_config, random=random, dtype=dtype, device=device)
    if random:
        cast(nn.Module, module.backbone).to(dtype)
    if isinstance(module, Captioner):
        module.encoder.to(dtype)
    lora = PeftLoraConfig(
        r=model.lora.rank,
        lora_alpha=model.lora.alpha,  # type: ignore[arg-type]
        target_modules=[t.name for t in spec.targets],
        lora_dropout=model.lora.dropout,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in module.backbone.modules()),
    )
    inject_adapter_in_model(lora, module.backbone, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:  # clipping, noise and updates are float32 also on a bfloat16 base
            parameter.data = parameter.data.float()
    for head in module.head_modules().values():
        head.float()
    module.to(device)
    return AdaptedModel(module, spec, initial_values(config))


def check_model(config: Config) -> None:
    """Check what can be checked of a model without loading its weights.

    Raises
    ------
    ConfigError
        For a missing tokenizer, texts longer than the model's positions, or weights with another hash.
    """
    model = config.model
    tokenizer, spec = load_tokenizer(model), adapter_spec(config)
    if spec.image_tokens:
        image_mark(tokenizer, model, spec)
    settings = model_config(model, len(config.task.labels))
    settings = settings.get_text_config()
    limit = getattr(settings, "max_position_embeddings", None)
    if isinstance(limit, int) and "roberta" in str(settings.model_type):
        limit -= 1 + (settings.pad_token_id or 0)  # RoBERTa counts positions from behind the padding id
    if isinstance(limit, int) and model.max_length > limit:
        raise ConfigError(
            f"model.max_length = {model.max_length} is not allowed: the model has {limit} positions"
        )
    if model.architecture is None:
        _check_weights(model)
    elif model.sha256 is not None:
        raise ConfigError(
            "model.sha256 has no effect with model.architecture: random weights come from the seed"
        )


def image_mark(tokenizer: Any, model: ModelConfig, spec: AdapterSpec) -> int:
    """Return the token that the tokenizer makes of :data:`IMAGE`.

    Raises
    ------
    ConfigError
        If the model's placeholder is another one, or a row has no room for more than its image.
    """
    mark = int(tokenizer.convert_tokens_to_ids(IMAGE))
    if model.vision is None and mark != spec.image_token:
        raise ConfigError(
            f"the tokenizer makes {mark} of {IMAGE}, and the model's placeholder is {spec.image_token}: "
            "it is another model's tokenizer, or model.architecture.image_token_id is wrong"
        )
    if model.max_length <= spec.image_tokens + 1:
        raise ConfigError(
            f"model.max_length = {model.max_length} is not allowed: an image alone is {spec.image_tokens} tokens"
        )
    return mark


def _check_weights(model: ModelConfig) -> None:
    """Compare the weights file with the pinned hash before any of it is used."""
    if model.sha256 is None:
        return
    folder = Path(location(model))
    if not folder.is_dir():
        raise ConfigError("model.sha256 needs a local folder or package: pin a hub model by model.revision")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.sha256 is set but {model.path} holds no .safetensors file")
    digest = files_digest(files)
    if not digest.startswith(model.sha256.lower()):
        raise ConfigError(
            f"the weights of model.path = {model.path} have SHA-256 {digest[:16]}..., "
            f"not model.sha256 = {model.sha256}"
        )


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, or the one that `model.tokenizer` names."""
    path = model.tokenizer or model.path
    if path is None:
        raise ConfigError("model.tokenizer is missing: random weights need a tokenizer")
    with loading(path):
        tokenizer = AutoTokenizer.from_pretrained(
            _place(path), revision=model.revision or "main", trust_remote_code=False
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.projector is not None and IMAGE not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    return cast(PreTrainedTokenizerBase, tokenizer)


# --- export --------------------------------------------------------------------------------------


def export(config: Config, values: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter so that ``PeftModel.from_pretrained(base, folder)`` loads it.

    With ``pooling=model``, and for a model's own projector, the head is inside (PEFT's ``modules_to_save``); with
    ``pooling=mean`` or ``model.vision`` transformers has no such head, so it lies beside the adapter as
    ``head.safetensors``. Local heads are on the nodes only.
    Changes of the frozen weights become further columns and rows of the factors, so the rank may be larger than
    the one that was trained; alpha / r stays.
    """
    spec = adapter_spec(config)
    factors, rank = _with_deltas(spec, values)
    local = config.task.head == "local"  # trained on the nodes, where it stays
    own_head = (config.task.pooling == "model" and not local) or (
        spec.projects and config.model.vision is None
    )
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "base_model.model."
    tensors = {prefix + n: factors[n].contiguous() for n in spec.lora}
    head = {} if local else {n: values[n].contiguous() for n in spec.head}
    if own_head:
        tensors |= {prefix + n: v for n, v in head.items()}
    elif head:
        save_file(head, str(folder / "head.safetensors"))
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    lora = config.model.lora
    peft_config = PeftLoraConfig(
        r=rank,
        lora_alpha=lora.alpha * rank / lora.rank,  # type: ignore[arg-type]
        target_modules=[t.name for t in spec.targets],
        lora_dropout=lora.dropout,
        task_type=_peft_task(config.task, own_head),
        modules_to_save=sorted({_module_to_save(n, spec) for n in spec.head}) if own_head else None,
        base_model_name_or_path=config.model.path or "random",
        inference_mode=True,
    )
    peft_config.save_pretrained(str(folder))


def _module_to_save(name: str, spec: AdapterSpec) -> str:
    """Return what PEFT calls the module of a head's parameter: the last part of a projector's name, or the first."""
    return name.split(".")[-3] if spec.projects else name.partition(".")[0]


def _peft_task(task: TaskConfig, own_head: bool) -> str:
    if task.generates:
        return "CAUSAL_LM"
    return "SEQ_CLS" if own_head else "FEATURE_EXTRACTION"


def _with_deltas(spec: AdapterSpec, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return factors whose products hold the deltas too, all of one rank, and that rank."""
    wide: dict[str, tuple[Tensor, Tensor]] = {}
    for t in spec.targets:
        b, a = values[t.b], values[t.a]
        if t.delta in values:
            more_b, more_a = factorise(values[t.delta])
            b, a = torch.cat([b, more_b.float()], 1), torch.cat([a, more_a.float()])
        wide[t.name] = b, a
    rank = max(a.shape[0] for _, a in wide.values())
    factors: dict[str, Tensor] = {}
    for t in spec.targets:
        b, a = wide[t.name]
        factors[t.b] = torch.nn.functional.pad(b, (0, rank - b.shape[1]))
        factors[t.a] = torch.nn.functional.pad(a, (0, 0, 0, rank - a.shape[0]))
    return factors, rank
