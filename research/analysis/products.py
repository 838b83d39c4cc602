"""Products of the linear maps by which a model's writes change a state, and their spectra.

A write is taken as a map of the state that it finds, its gates and directions as they are (the table SHORTCUTS of
parts.py). Tensors have batch and tokens first, or (1, 1) where the map is the same for every token. `axis` is the
dimension of the state on which a map acts, m its size there; along the others it acts alike.

The map of the s-th site is A_s, that of a token through the first s sites P_s = A_s ... A_1, over a space of m features
or streams. Everything is float64. A product of maps I + U_s V_s^T is itself I + W Y^T, W = [U_1 .. U_s] and
Y = [V_1, P_1^T V_2, ..]: of R columns together, its eigenvalues are 1 and those of I_R + Y^T W, and its singular values
1 and those of I + W Y^T on the 2R directions that W and Y span, which one QR decomposition gives for every s.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

MOVED = 1e-6  # a direction counts as moved where P - I has a singular value above this


@dataclass(frozen=True)
class LowRank:
    """x -> x + sum_r left_r (right_r . x) on the features: I + left^T right; left, right (B, T, r, d)."""

    axis: ClassVar[int] = -1
    left: torch.Tensor
    right: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, d, d)."""
        identity = torch.eye(self.left.shape[-1], dtype=self.left.dtype, device=self.left.device)
        return identity + self.left.mT @ self.right


@dataclass(frozen=True)
class Diagonal:
    """x -> values * x on the features; values (B, T, d)."""

    axis: ClassVar[int] = -1
    values: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, d, d)."""
        return self.values.diag_embed()


@dataclass(frozen=True)
class Mix:
    """H -> matrix H on the n streams of a state (B, T, n, d); matrix (B, T, n, n)."""

    axis: ClassVar[int] = 2
    matrix: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, n, n)."""
        return self.matrix


def identity(state) -> Diagonal:
    """Of a write that adds alone to a state (B, T, ..., d)."""
    return Diagonal(state.new_ones(1, 1, state.shape[-1]))


@dataclass
class Spectra:
    """Of N tokens through S sites; tensors of float64 but for the eigenvalues.

    eigenvalues (N, e) complex: those of P_S; of low-rank maps only the e = R that can differ from 1, where R < m.
    By site, (S, N): `sign` and `log_det` (natural, of |det|) of P_s; its largest and smallest singular value; the share
    of dimensions that P_s leaves as they are (`untouched`); the mean square of its singular values (`energy`: what is
    left of the squared length of a random state); how many eigenvalues of A_s itself are real and negative
    (`reflections`).
    """

    size: int
    eigenvalues: torch.Tensor
    sign: torch.Tensor
    log_det: torch.Tensor
    largest: torch.Tensor
    smallest: torch.Tensor
    untouched: torch.Tensor
    energy: torch.Tensor
    reflections: torch.Tensor


BY_SITE = tuple(field.name for field in fields(Spectra))[2:]


def spectra(maps: list) -> Spectra:
    """Of the maps of all sites in order, of one kind, each of N tokens: tensors (N, ...), or (1, ...) for all alike.

    ValueError: maps of several kinds, or numbers that are not finite.
    """
    kinds = {type(each) for each in maps}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"its sites' shortcuts are of several kinds ({names}): there is no product of those"
        )
    if not all(part.isfinite().all() for each in maps for part in vars(each).values()):
        raise ValueError("a shortcut is not finite: the model has diverged")
    if kinds == {Diagonal}:
        return of_diagonals(torch.stack([each.values for each in maps]))
    rank = sum(each.left.shape[-2] for each in maps) if kinds == {LowRank} else None
    if kinds == {Mix} or 2 * rank > maps[0].left.shape[-1]:
        return of_matrices(maps)
    return of_low_rank(maps)


def of_diagonals(values) -> Spectra:
    """values (S, N, m)."""
    products = values.cumprod(0)
    sizes = products.abs()
    return Spectra(
        size=values.shape[-1],
        eigenvalues=products[-1].to(torch.complex128),
        sign=products.sign().prod(-1),
        log_det=values.abs().log().sum(-1).cumsum(0),
        largest=sizes.amax(-1),
        smallest=sizes.amin(-1),
        untouched=((products - 1).abs() <= MOVED).double().mean(-1),
        energy=sizes.square().mean(-1),
        reflections=(values < 0).double().sum(-1),
    )


def of_matrices(maps: list) -> Spectra:
    """Multiplied out, site after site."""
    product, rows = None, []
    for each in maps:
        matrix = each.dense()
        product = matrix if product is None else matrix @ product
        size = product.shape[-1]
        change = product - torch.eye(size, dtype=product.dtype)
        rows.append(
            row_of(torch.linalg.svdvals(product), torch.linalg.svdvals(change), matrix, size)
        )
    return assembled(size, torch.linalg.eigvals(product), rows)


def of_low_rank(maps: list[LowRank]) -> Spectra:
    """By the compact form; 2 R <= m."""
    left = torch.cat([each.left for each in maps], -2)  # (N, R, m): the columns of W, and of Y
    right, size = left.clone(), left.shape[-1]
    ends = torch.tensor([0, *(each.left.shape[-2] for each in maps)]).cumsum(0).tolist()
    for each, start, end in zip(maps, ends, ends[1:]):  # P_(s-1)^T V_s = V_s + Y (W^T V_s)
        right[:, start:end] = each.right + (each.right @ left[:, :start].mT) @ right[:, :start]
    both = torch.stack((left, right), -2).flatten(-3, -2)  # (N, 2R, m): W_1, Y_1, W_2, ...
    basis = torch.linalg.qr(both.mT).R
    rows = []
    for each, end in zip(maps, ends[1:]):
        within = basis[:, : 2 * end, : 2 * end]
        change = within[..., 0::2] @ within[..., 1::2].mT  # P_s - I on the directions so far
        values = torch.linalg.svdvals(torch.eye(2 * end, dtype=change.dtype) + change)
        own = torch.eye(each.left.shape[-2], dtype=change.dtype) + each.right @ each.left.mT
        rows.append(row_of(values, torch.linalg.svdvals(change), own, size))
    return assembled(size, 1 + torch.linalg.eigvals(right @ left.mT), rows)


def row_of(values, changes, own, size: int) -> dict:
    """What `Spectra` has of a site. values: singular values of the product, those left out being 1; changes: those of
    what it adds to the identity, those left out being 0; own: the site's map, or its part that can differ from I."""
    rest = size - values.shape[-1]
    among = torch.nn.functional.pad(values, (0, 1), value=1.0) if rest else values
    sign, log_det = torch.linalg.slogdet(own)
    found = torch.linalg.eigvals(own)
    negative = (found.real < 0) & (found.imag.abs() <= 1e-12 * found.abs())
    return {
        "sign": sign,
        "log_det": log_det,
        "largest": among.amax(-1),
        "smallest": among.amin(-1),
        "untouched": 1 - (changes > MOVED).double().sum(-1) / size,
        "energy": (values.square().sum(-1) + rest) / size,
        "reflections": negative.double().sum(-1),
    }


def assembled(size: int, eigenvalues, rows: list[dict]) -> Spectra:
    by_site = {name: torch.stack([row[name] for row in rows]) for name in BY_SITE}
    by_site |= {"sign": by_site["sign"].cumprod(0), "log_det": by_site["log_det"].cumsum(0)}
    return Spectra(size, eigenvalues, **by_site)
