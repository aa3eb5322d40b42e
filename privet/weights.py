"""Which base weights a machine has: a hash that is equal exactly where the weights are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from privet.atomic import write_atomic
from privet.captioner import weights_file
from privet.config import Config
from privet.data.sources import resolve_path
from privet.errors import ConfigError

CACHE = "PRIVET_CACHE"
"""Environment variable with the folder where hashes of large files are remembered; default ``~/.privet/cache``."""

_INDEX = "model.safetensors.index.json"


def files_digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' bytes, one after the other, as ``model.sha256`` pins it."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def base_weights(config: Config, *, fetch: bool) -> str | None:
    """Return what the base weights of a run are on this machine.

    Parameters
    ----------
    config : Config
        The run's configuration, with this machine's own ``model.path``.
    fetch : bool
        Whether to download a hub model that is not here; without it, the answer is then None.

    Returns
    -------
    str or None
        ``sha256:HEX`` over the safetensors files that are loaded, in the order of their names, so that a folder and
        the hub's copy of the same files agree, and over an image encoder's file where there is one; ``random:HEX``
        over architecture and seed where weights are drawn from the seed.

    Raises
    ------
    ConfigError
        If there is no model where one must be, or it has no safetensors file.
    """
    model = config.model
    if model.architecture is not None:
        drawn = json.dumps([model.architecture, config.seed], sort_keys=True)
        return f"random:{hashlib.sha256(drawn.encode()).hexdigest()}"
    files = _files(model.path or "", model.revision, fetch)
    if files is None:
        return None
    if model.vision is not None:
        files = [*files, weights_file()]
    try:
        facts = tuple((str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        return f"sha256:{_remembered(facts)}"
    except OSError as error:
        raise ConfigError(f"the weights of '{model.path}' cannot be read: {error.strerror}") from None


def read_tensors(path: str, revision: str | None, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return some of a model's tensors from its files, in float32; nothing else is loaded.

    A checkpoint may call them by a longer or shorter name with the same end, as older ones of a class do.

    Raises
    ------
    ConfigError
        If there are no files, or a tensor is not in them in that shape.
    """
    out: dict[str, Tensor] = {}
    for file in _files(path, revision, fetch=True) or []:
        with safe_open(file, framework="pt") as held:
            names = list(held.keys())
            for name in shapes:
                found = [n for n in names if name == n or name.endswith(f".{n}") or n.endswith(f".{name}")]
                if len(found) == 1:
                    out[name] = held.get_tensor(found[0]).float()
    for name, shape in shapes.items():
        if name not in out or tuple(out[name].shape) != tuple(shape):
            raise ConfigError(
                f"the weights of model.path = {path} have no {name} of the shape {tuple(shape)}"
            )
    return out


def _files(path: str, revision: str | None, fetch: bool) -> list[Path] | None:
    if not path.startswith(("package:", "~", "/", ".")):
        return _hub_files(path, revision, fetch)
    folder = resolve_path(path)
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return [single]
    files = (
        [folder / name for name in _shards(index)]
        if index.is_file()
        else sorted(folder.glob("*.safetensors"))
    )
    if not files:
        raise ConfigError(f"there is no folder '{path}' with a .safetensors file")
    return files


def _shards(index: Path) -> list[str]:
    """Return the files that an index names, each below the index's own folder."""
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError(f"'{index}' cannot be read") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"'{index}' names files outside of its folder")
    return names


def _hub_files(name: str, revision: str | None, fetch: bool) -> list[Path] | None:
    """Return a hub model's weights below the local cache; None where they are not there and must not be fetched."""
    from transformers.utils.hub import cached_file

    def find(file: str) -> Path | None:
        found = cached_file(
            name,
            file,
            revision=revision or "main",
            local_files_only=not fetch,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)

    try:
        if (single := find("model.safetensors")) is not None:
            return [single]
        index = find(_INDEX)
        found = [] if index is None else [find(shard) for shard in _shards(index)]
    except (OSError, ValueError):
        found = []
    if found and None not in found:
        return [file for file in found if file is not None]
    if fetch:
        raise ConfigError(f"the weights of model.path = {name} are not here and cannot be fetched")
    return None


@lru_cache(maxsize=32)
def _remembered(facts: tuple[tuple[str, int, int], ...]) -> str:
    """Return the digest of files that are told by path, size and time, from an earlier process where possible."""
    place = Path(os.environ.get(CACHE, "~/.privet/cache")).expanduser() / "weights.json"
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        known = json.loads(place.read_text("utf-8"))
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        known = {}
    if isinstance(known.get(key), str):
        return str(known[key])
    digest = files_digest([Path(path) for path, _, _ in facts])
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(place, json.dumps({**known, key: digest}).encode())
    except OSError:
        pass  # it is worked out again next time
    return digest
