"""Sketching and refactorisation of low-rank products (FedASK; randomised SVD of Halko et al. 2011).

With ``M = sum_k p_k B_k A_k`` (m x n) and a random ``Omega`` (n x s) that both sides know, nodes send
``Y_k = B_k (A_k Omega)``, the server takes an orthonormal basis Q of ``sum_k p_k Y_k``, nodes send
``Z_k = A_k^T (B_k^T Q)``, and ``Q (sum_k p_k Z_k)^T = Q Q^T M`` is split into new factors. Q Q^T M = M almost
surely as soon as s is at least the rank of M. Nothing of size m x n is ever formed; all of it in float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from privet.seeding import child_seed

OMEGA_VERSION = 1
"""Version of the generator behind :func:`omega`; part of the checksum that both sides compare."""

_VANISHED = 1e-12
"""A product whose largest singular value is below this share of its factors' scale counts as zero."""


def omega(seed: int, round_number: int, module: str, width: int, size: int) -> Tensor:
    """Return the test matrix Omega (width x size), float64, equal on every machine.

    Parameters
    ----------
    seed : int
        The run's seed.
    round_number : int
        The round that it is for.
    module : str
        Name of the adapted module.
    width : int
        n, the columns of A.
    size : int
        s, the width of the sketch.
    """
    key = child_seed(seed, "omega", round_number, module)
    values = np.random.Generator(np.random.Philox(key)).standard_normal((width, size))
    return torch.from_numpy(values)


def checksum(matrices: Iterable[Tensor]) -> Tensor:
    """Return 64 bits over the first rows of all Omegas and the generator's version, as uint32 (2,).

    Two sides whose generators differ must not exchange sketches: they would fit nothing, silently.
    """
    digest = hashlib.sha256(b"omega %d" % OMEGA_VERSION)
    for matrix in matrices:
        digest.update(np.ascontiguousarray(matrix[0].numpy(), dtype="<f8").tobytes())
    return torch.from_numpy(np.frombuffer(digest.digest()[:8], dtype="<u4").astype(np.uint32))


def sketch(b: Tensor, a: Tensor, test: Tensor) -> Tensor:
    """Return ``B (A Omega)`` (m x s) for B (m x r), A (r x n) and Omega (n x s), in float64."""
    return b.double() @ (a.double() @ test.double())


def basis(sketched: Tensor) -> Tensor:
    """Return an orthonormal basis Q (m x s) of the columns of a sketch (m x s), in float64.

    Where the sketch is short of rank, the surplus columns of Q are arbitrary and do no harm.
    """
    return torch.linalg.qr(sketched.double()).Q


def narrow_basis(sketched: Tensor) -> Tensor:
    """Return an orthonormal basis Q (m x k) of what a sketch (m x s) holds beyond rounding, in float64.

    k is the numerical rank, at least 1: singular values that the rounding of (m x s) numbers to float32 can give
    do not count. What cancels out between nodes may leave more rounding than that; Q is then wider than it need be.
    """
    u, values, _ = torch.linalg.svd(sketched.double(), full_matrices=False)
    m, s = sketched.shape
    # A matrix of independent errors of deviation e has the norm e (sqrt m + sqrt s) at the most, nearly surely.
    size = float(values.norm()) / (m * s) ** 0.5
    floor = torch.finfo(torch.float32).eps / 2 * size * (m**0.5 + s**0.5)
    return u[:, : max(1, int((values > floor).sum()))]


def project(b: Tensor, a: Tensor, q: Tensor) -> Tensor:
    """Return ``A^T (B^T Q)`` (n x s) for B (m x r), A (r x n) and Q (m x s), in float64."""
    return a.double().T @ (b.double().T @ q.double())


def split(q: Tensor, projected: Tensor, rank: int, share: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``Q Z^T`` into factors of rank `rank` by the SVD of ``Z^T`` (FedASK, server step).

    Parameters
    ----------
    q : Tensor (m, s)
        Orthonormal columns.
    projected : Tensor (n, s)
        Z, the merged projections.
    rank : int
        r; what lies beyond it is cut off, the best approximation of that rank (Eckart-Young).
    share : float
        Power of the singular values that goes to B, the rest to A: 0.5 is the paper's balanced split, 1 leaves
        A with orthonormal rows (FedSVD).

    Returns
    -------
    b, a : Tensor
        (m, r) and (r, n), float64; short ranks are filled with zeros.
    values : Tensor (s,)
        All singular values, in falling order; those beyond `rank` are what truncation loses.
    """
    # Z = V' R first, so that the SVD is of s x s numbers however wide the module is.
    outer, core = torch.linalg.qr(projected.double())
    u, values, vh = torch.linalg.svd(core.T)
    left, right = q.double() @ u, vh @ outer.T
    kept = min(rank, len(values))
    weights = values[:kept]
    b = q.new_zeros(q.shape[0], rank, dtype=torch.float64)
    a = q.new_zeros(rank, projected.shape[0], dtype=torch.float64)
    b[:, :kept] = left[:, :kept] * weights.pow(share)
    a[:kept] = weights.pow(1 - share)[:, None] * right[:kept]
    return b, a, values


def split_product(b: Tensor, a: Tensor, share: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`split` of the product ``B A`` itself; nothing is lost.

    With ``share=1`` the new A is an orthonormal basis of the old one's rows whatever B is, also where it is zero.
    """
    left, upper = torch.linalg.qr(b.double())
    right, lower = torch.linalg.qr(a.double().T)
    # B A = left (upper lower^T) right^T: the SVD is of r x r numbers, and stays within A's own rows.
    identity = torch.eye(left.shape[1], dtype=torch.float64, device=b.device)
    inner_b, inner_a, values = split(identity, lower @ upper.T, b.shape[1], share)
    return left @ inner_b, inner_a @ right.T, values


def factorise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return B (m x R) and A (R x n), float64, with ``B A`` the matrix (m x n) and R its rank.

    Singular values that rounding to float32 alone can give do not count; R is at least 1.
    """
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    floor = float(values[0]) * max(matrix.shape) * torch.finfo(torch.float32).eps
    rank = max(1, int((values > floor).sum()))
    weights = values[:rank].sqrt()
    return u[:, :rank] * weights, weights[:, None] * vh[:rank]


def vanished(values: Tensor, scale: float) -> bool:
    """Whether a product is zero for all that float32 factors can tell, so that its factors mean nothing.

    Parameters
    ----------
    values : Tensor (s,)
        Its singular values, in falling order.
    scale : float
        Norm that the product could have had, from the factors that it was split off.
    """
    return bool(values[0] <= _VANISHED * max(scale, torch.finfo(torch.float32).tiny))


def tail(values: Mapping[str, Tensor], rank: int) -> float:
    """Return the share of the norm, over all modules, that truncation to `rank` cuts off."""
    total = sum(float(v.square().sum()) for v in values.values())
    lost = sum(float(v[rank:].square().sum()) for v in values.values())
    return (lost / total) ** 0.5 if total else 0.0
