"""The privacy card: the README.md that travels with an exported adapter."""

from __future__ import annotations

from typing import Any

from privet.config import Config

_MEAN_HEAD = """
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

model = PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter).eval()
head = load_file(f"{adapter}/head.safetensors")
tokens = AutoTokenizer.from_pretrained(tokenizer)("some text", return_tensors="pt")
hidden = model(**tokens).last_hidden_state
mask = tokens["attention_mask"].unsqueeze(-1)
logits = (hidden * mask).sum(1) / mask.sum(1) @ head["head.weight"].T + head["head.bias"]
"""

_OWN_HEAD = """
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

base_model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=LABELS)
model = PeftModel.from_pretrained(base_model, adapter).eval()
tokens = AutoTokenizer.from_pretrained(tokenizer)("some text", return_tensors="pt")
logits = model(**tokens).logits
"""

_LANGUAGE = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
words = AutoTokenizer.from_pretrained(tokenizer)
prompt = words("some text", return_tensors="pt", return_token_type_ids=False)
written = model.generate(**prompt, max_new_tokens=20)
"""

_VISION = """
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), adapter).eval()
words = AutoTokenizer.from_pretrained(tokenizer)
"""

_CAPTIONER = """
from peft import PeftModel
from privet.captioner import Captioner, ENCODERS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

language_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
model = Captioner(language_model, ENCODERS["VISION"](True)).eval()
model.load_state_dict(load_file(f"{adapter}/head.safetensors"), strict=False)  # the projector
words = AutoTokenizer.from_pretrained(tokenizer)
"""

_NO_HEAD = """
from peft import PeftModel
from transformers import AutoModel

# The heads were trained on the nodes and stay there (task.head=local); this is the shared encoder.
model = PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter).eval()
"""


def privacy_card(config: Config, summary: dict[str, Any], privacy: dict[str, Any]) -> str:
    """Return the card as Markdown: what the adapter is, what was promised and spent, what that leaves out."""
    title = f"{config.method.name} on {config.task.name}"
    score = (summary["metrics"] or {}).get("accuracy")
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {config.model.path or 'random'}",
        "tags: [privet, lora, federated-learning, differential-privacy]",
        "---",
        "",
        f"# LoRA adapter: {title}",
        "",
        f"Trained by Privet over {len(privacy['nodes'])} nodes in {summary['rounds']} rounds, seed {config.seed}."
        + (f" Accuracy on the public test set: {100 * score:.2f} %." if score is not None else ""),
        "",
        "## Privacy",
        "",
        *_privacy_lines(config, privacy),
        "",
        "## Use",
        "",
        "From the folder that holds `adapter/`:",
        "",
        "```python",
        *_usage(config).strip().splitlines(),
        "```",
        "",
        f"{_answers(config)} Texts are cut to {config.model.max_length} tokens.",
        "",
    ]
    return "\n".join(lines)


def _privacy_lines(config: Config, privacy: dict[str, Any]) -> list[str]:
    if not config.privacy.private:
        return [
            "**Not private.** The model was trained without differential privacy and may remember single rows."
        ]
    out = []
    if not privacy["private"]:
        out += ["**Not private:** " + "; ".join(privacy["warnings"]) + ".", ""]
    out += [
        f"Sample-level ({privacy['max_epsilon']:.4g}, {privacy['delta']:g})-differential privacy for every node's rows "
        f"(target {privacy['target_epsilon']:g}), by DP-SGD with clip {config.privacy.clip:g}, "
        f"composed by the {privacy['accountant'].upper()} accountant over every step taken.",
        "",
        "- Neighbouring data sets differ by adding or removing one *row*. A row is not a person: several rows of one "
        "person, at one node or at several, add up.",
        "- The server is taken to see every message; no amplification by client sampling is claimed.",
        "- Choosing hyper-parameters on private data is not in this epsilon.",
        "- Row counts, participation and timing are public.",
        "",
        "| node | declared rows | steps | epsilon |",
        "|---|---|---|---|",
    ]
    for node in privacy["nodes"]:
        out.append(f"| {node['node']} | {node['examples']} | {node['steps']} | {node['epsilon']:.4g} |")
    return out


def _answers(config: Config) -> str:
    """Say what the model answers with."""
    task = config.task
    if not task.generates:
        return f"Labels, in order: {', '.join(task.labels)}."
    if task.kind == "instructions":
        return "The model answers chats that are written by its tokenizer's chat template."
    return f"The model goes on from prompts of the form {task.prompt or '{text}'!r}."


def _usage(config: Config) -> str:
    """Return the lines that load the adapter in plain transformers; a test runs them."""
    if config.model.vision is not None:
        body = _CAPTIONER.replace("VISION", config.model.vision)
    elif config.task.sees:
        body = _VISION
    elif config.task.generates:
        body = _LANGUAGE
    elif config.task.head == "local":
        body = _NO_HEAD
    elif config.task.pooling == "mean":
        body = _MEAN_HEAD
    else:
        body = _OWN_HEAD.replace("LABELS", str(len(config.task.labels)))
    model = config.model
    places = {
        "base": model.path or "FOLDER OF THE BASE MODEL",
        "tokenizer": model.tokenizer or model.path or "",
    }
    lines = ['adapter = "adapter"  # the folder of this file']
    if any(p.startswith("package:") for p in places.values()):
        lines = ["from importlib.resources import files", "", *lines]
    return "\n".join([*lines, *(f"{n} = {_place(p)}" for n, p in places.items()), body.strip()])


def _place(path: str) -> str:
    """Return Python for a model's place."""
    if not path.startswith("package:"):
        return repr(path)
    module, _, folder = path.removeprefix("package:").partition("/")
    return f'str(files("{module}") / "{folder}")'
