"""Where training runs and in which number format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from privet.config import TrainConfig
from privet.environment import available_cpus
from privet.errors import ConfigError


def pick_device(setting: str) -> str:
    """Return a device that exists: ``auto`` is the first GPU, else the CPU.

    Raises
    ------
    ConfigError
        If a GPU is asked for that this machine, or Flower's share of it, does not have.
    """
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if setting == "cpu":
        return setting
    match = re.fullmatch(r"cuda(?::(\d+))?", setting)
    if match is None:
        raise ConfigError(f"train.device = {setting!r} is not allowed: auto, cpu, cuda or cuda:N")
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(match.group(1) or 0) >= have:
        raise ConfigError(
            f"train.device = {setting} is not here: {have} GPUs are visible; use train.device=auto, "
            "and federation.gpus_per_client above 0 so that Flower gives clients one"
        )
    return setting


def pick_dtype(setting: str, device: str) -> torch.dtype:
    """Return the base model's format: ``auto`` is bfloat16 where the GPU has it, else float32."""
    if setting == "auto":
        bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if bf16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]


def resources_warning(train: TrainConfig, gpus_per_client: float, gpus: int) -> str | None:
    """One line where a simulation leaves a GPU idle or asks for one that is not there; else None.

    Raises
    ------
    ConfigError
        If clients are to get a share of a GPU and there is none.
    """
    if gpus_per_client > 0 and gpus == 0:
        raise ConfigError(
            f"federation.gpus_per_client = {gpus_per_client:g} is not possible: no GPU is visible; set it to 0"
        )
    if gpus_per_client > gpus > 0:
        raise ConfigError(
            f"federation.gpus_per_client = {gpus_per_client:g} is not possible: {gpus} visible; set at most {gpus}"
        )
    if gpus and gpus_per_client == 0 and train.device != "cpu":
        return (
            f"{gpus} GPU(s) stay idle: Flower gives clients none unless federation.gpus_per_client is above 0 "
            "(0.5 lets two clients share one)"
        )
    return None


@contextmanager
def all_cores() -> Iterator[None]:
    """Let PyTorch use every core that there is for it, for a while in which nothing else of a run computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_cpus())
    try:
        yield
    finally:
        torch.set_num_threads(before)
