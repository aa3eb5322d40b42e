"""One loss per example, for every kind of task.

Differential privacy bounds what one example can do to the sum of gradients, so an example's loss may depend on
nothing but the example: it is the mean over its *own* tokens, never over the tokens of the batch, and padding
changes nothing. Language models' built-in losses do not have this property.

All of them compute in float32 (float64 for float64 logits), also on a bfloat16 model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

#: Label of a token that does not count: the prompt, an image, the padding.
IGNORE = -100


def classification(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of every example's class.

    Parameters
    ----------
    logits : Tensor
        (b, c).
    labels : Tensor
        (b,), int64.

    Returns
    -------
    Tensor
        (b,).
    """
    return cross_entropy(_wide(logits), labels, reduction="none")


def tokens(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return the mean cross entropy over every example's own tokens that are not ignored.

    Nothing is shifted: ``logits[:, t]`` is the prediction of ``labels[:, t]``.

    Parameters
    ----------
    logits : Tensor
        (b, t, v).
    labels : Tensor
        (b, t), int64.
    ignore : int
        Label of the tokens that do not count.

    Returns
    -------
    Tensor
        (b,); 0, with a gradient of zero, for an example that has no token that counts.
    """
    losses = cross_entropy(
        _wide(logits.flatten(0, 1)), labels.flatten(), reduction="none", ignore_index=ignore
    )
    counted = (labels != ignore).sum(1)
    return losses.view(labels.shape).sum(1) / counted.clamp_min(1)


def causal(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return :func:`tokens` of a causal language model, whose labels are its own input tokens.

    Shifts: ``logits[:, t]`` is the prediction of ``labels[:, t + 1]``; the first label never counts.

    Parameters
    ----------
    logits : Tensor
        (b, t, v).
    labels : Tensor
        (b, t), int64: the input tokens, `ignore` where they do not count.
    ignore : int
        Label of the tokens that do not count.

    Returns
    -------
    Tensor
        (b,).
    """
    return tokens(logits[:, :-1], labels[:, 1:], ignore)


def seq2seq(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return :func:`tokens` of an encoder-decoder.

    Does not shift: the decoder reads its labels shifted to the right already, so that ``logits[:, t]`` is the
    prediction of ``labels[:, t]``.

    Parameters
    ----------
    logits : Tensor
        (b, t, v), of the decoder.
    labels : Tensor
        (b, t), int64: the target tokens, `ignore` where they do not count.
    ignore : int
        Label of the tokens that do not count.

    Returns
    -------
    Tensor
        (b,).
    """
    return tokens(logits, labels, ignore)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
