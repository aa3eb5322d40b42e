"""What single clients sent, kept with ``keep_uploads=true``, and the models that a curious server makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from privet.atomic import write_atomic
from privet.errors import StoreError
from privet.wire import Arrays, Payload

FOLDER = "uploads"


@dataclass(frozen=True)
class Upload:
    """The adapter and head arrays of one valid reply."""

    round: int
    arrays: Arrays


def keep_upload(run_dir: Path, number: int, phase: str, node: str, payload: Payload) -> None:
    """Write one reply's adapter and head to ``uploads/NODE/round-N-PHASE.safetensors``."""
    folder = run_dir / FOLDER / node
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {n: v.contiguous() for n, v in {**payload.adapter, **payload.head}.items()}
    write_atomic(folder / f"round-{number:05d}-{phase}.safetensors", save(arrays))


def kept_uploads(run_dir: Path, phase: str) -> dict[str, list[Upload]]:
    """Return every node's uploads of a phase, in the order of the rounds; empty where none were kept.

    Raises
    ------
    StoreError
        If a file is damaged.
    """
    found: dict[str, list[Upload]] = {}
    for path in sorted((run_dir / FOLDER).glob(f"*/round-*-{phase}.safetensors")):
        number = int(path.name.split("-")[1])
        try:
            found.setdefault(path.parent.name, []).append(Upload(number, load_file(path)))
        except (OSError, SafetensorError):
            raise StoreError(f"{path} is not an upload that can be read") from None
    return found


def rebuild(uploads: Sequence[Upload], common: Arrays, last: int | None = None) -> Arrays:
    """Return a client's model as its uploads give it away: of every array the newest that it sent.

    A method that sends whole models gives the last one away exactly; of FedRand's halves, the newest of each kind come
    from different rounds.

    Parameters
    ----------
    uploads : sequence of Upload
        One client's, in the order of the rounds.
    common : mapping of str to Tensor
        What the server's own model has for an array that the client never sent.
    last : int, optional
        Only so many of the newest uploads count: 2 is the attack as FedRand's paper words it.
    """
    values = dict(common)
    for upload in uploads if last is None else uploads[-last:]:
        values |= upload.arrays
    return values
