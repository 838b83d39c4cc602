"""Products of the linear maps that a model's writes apply to a state, and their spectra.

A write is taken as a linear map of the state that it gets, with its gates and directions as they are (the table
SHORTCUTS of parts.py). Tensors have batch and tokens first, or (1, 1) if the map is the same for every token. `axis` is
the dimension of the state on which a map acts, and m the size of that dimension. The map is the same along all other
dimensions.

The map of the s-th site is A_s, and that of a token through the first s sites is P_s = A_s ... A_1, on a space of m
features or streams. Everything is float64. A product of maps I + U_s V_s^T is itself I + W Y^T, with W = [U_1 .. U_s]
and Y = [V_1, P_1^T V_2, ..]. If these have R columns, the eigenvalues of the product are 1 and those of I_R + Y^T W.
Its singular values are 1 and those of I + W Y^T on the 2R directions that W and Y span. One QR decomposition gives them
for every s.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

# A direction counts as moved if P - I has a singular value above this.
MOVED = 1e-6


@dataclass(frozen=True)
class LowRank:
    """x -> x + sum_r left_r (right_r . x) on the features: I + left^T right; left, right (B, T, r, d)."""

    axis: ClassVar[int] = -1
    left: torch.Tensor
    right: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the matrix (B, T, d, d)."""
        identity = torch.eye(self.left.shape[-1], dtype=self.left.dtype, device=self.left.device)
        return identity + self.left.mT @ self.right


@dataclass(frozen=True)
class Diagonal:
    """x -> values * x on the features; values (B, T, d)."""

    axis: ClassVar[int] = -1
    values: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the matrix (B, T, d, d)."""
        return self.values.diag_embed()


@dataclass(frozen=True)
class Mix:
    """H -> matrix H on the n streams of a state (B, T, n, d); matrix (B, T, n, n)."""

    axis: ClassVar[int] = 2
    matrix: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the matrix (B, T, n, n)."""
        return self.matrix


LinearMap = LowRank | Diagonal | Mix


def identity_map(state: torch.Tensor) -> Diagonal:
    """Return the map of a write that only adds to a state (B, T, ..., d)."""
    return Diagonal(state.new_ones(1, 1, state.shape[-1]))


@dataclass
class Spectra:
    """The spectra of N tokens through S sites, in float64; eigenvalues are complex."""

    # m
    size: int

    # (N, e): those of P_S; of low-rank maps only the e = R that can differ from 1, if R < m
    eigenvalues: torch.Tensor

    # (S, N): the sign of det P_s
    sign: torch.Tensor

    # (S, N): the natural logarithm of |det P_s|
    log_det: torch.Tensor

    # (S, N): the largest and the smallest singular value of P_s
    largest: torch.Tensor
    smallest: torch.Tensor

    # (S, N): the fraction of dimensions that P_s leaves as they are
    untouched: torch.Tensor

    # (S, N): the mean square of the singular values of P_s, which is what is left of the squared
    # length of a random state
    energy: torch.Tensor

    # (S, N): how many eigenvalues of A_s itself are real and negative
    reflections: torch.Tensor


# the fields of Spectra that are (S, N)
BY_SITE = (
    "sign",
    "log_det",
    "largest",
    "smallest",
    "untouched",
    "energy",
    "reflections",
)


def compute_spectra(maps: list[LinearMap]) -> Spectra:
    """Compute the spectra of the products of the maps of all sites, in order.

    maps: of one kind, each of N tokens: tensors (N, ...), or (1, ...) if all tokens have the same

    Raises:
        ValueError: there are maps of several kinds, or numbers that are not finite
    """
    map_types = {type(linear_map) for linear_map in maps}
    if len(map_types) > 1:
        raise ValueError(
            "the shortcuts of the sites are of several kinds "
            f"({', '.join(sorted(map_type.__name__ for map_type in map_types))}), which have no product"
        )
    for linear_map in maps:
        if not all(tensor.isfinite().all() for tensor in vars(linear_map).values()):
            raise ValueError("a shortcut is not finite: the model has diverged")
    if map_types == {Diagonal}:
        return compute_diagonal_spectra(torch.stack([diagonal.values for diagonal in maps]))
    if map_types == {LowRank}:
        rank = sum(low_rank.left.shape[-2] for low_rank in maps)
        if 2 * rank <= maps[0].left.shape[-1]:
            return compute_low_rank_spectra(maps)
    return compute_dense_spectra(maps)


def compute_diagonal_spectra(values: torch.Tensor) -> Spectra:
    """Compute the spectra of diagonal maps, values (S, N, m)."""
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


def compute_dense_spectra(maps: list[LinearMap]) -> Spectra:
    """Compute the spectra by multiplying out, site after site."""
    first_matrix = maps[0].dense()
    size = first_matrix.shape[-1]
    identity = torch.eye(size, dtype=first_matrix.dtype)
    product = first_matrix
    sites = []
    for index, linear_map in enumerate(maps):
        matrix = linear_map.dense()
        if index > 0:
            product = matrix @ product
        site = summarize_site(
            torch.linalg.svdvals(product),
            torch.linalg.svdvals(product - identity),
            matrix,
            size,
        )
        sites.append(site)
    return join_sites(size, torch.linalg.eigvals(product), sites)


def compute_low_rank_spectra(maps: list[LowRank]) -> Spectra:
    """Compute the spectra by the compact form, for 2R <= m."""
    w_columns = torch.cat([low_rank.left for low_rank in maps], dim=-2)  # (N, R, m)
    y_columns = torch.empty_like(w_columns)
    size = w_columns.shape[-1]

    # Y: P_(s-1)^T V_s = V_s + Y (W^T V_s), over the columns of the sites before
    ends = []  # the number of columns up to and including each site
    start = 0
    for low_rank in maps:
        end = start + low_rank.left.shape[-2]
        products = low_rank.right @ w_columns[:, :start].mT
        y_columns[:, start:end] = low_rank.right + products @ y_columns[:, :start]
        ends.append(end)
        start = end

    # coordinates in an orthonormal basis whose first 2 s directions span the first s columns
    interleaved = torch.stack((w_columns, y_columns), dim=-2).flatten(
        -3, -2
    )  # (N, 2R, m): W_1, Y_1, ...
    coordinates = torch.linalg.qr(interleaved.mT).R
    sites = []
    for low_rank, end in zip(maps, ends):
        within = coordinates[:, : 2 * end, : 2 * end]
        change = within[..., 0::2] @ within[..., 1::2].mT  # P_s - I on the directions so far
        identity = torch.eye(2 * end, dtype=change.dtype)
        rank = low_rank.left.shape[-2]
        # the part of A_s that can differ from I
        own_map = torch.eye(rank, dtype=change.dtype) + low_rank.right @ low_rank.left.mT
        site = summarize_site(
            torch.linalg.svdvals(identity + change),
            torch.linalg.svdvals(change),
            own_map,
            size,
        )
        sites.append(site)
    return join_sites(size, 1 + torch.linalg.eigvals(y_columns @ w_columns.mT), sites)


def summarize_site(
    singular_values: torch.Tensor,
    change_singular_values: torch.Tensor,
    own_map: torch.Tensor,
    size: int,
) -> dict[str, torch.Tensor]:
    """Return the fields of `Spectra` at one site (N,), with sign and log_det of A_s instead of P_s.

    Args:
        singular_values: of P_s (N, ...); those that are omitted are 1
        change_singular_values: of P_s - I (N, ...); those that are omitted are 0
        own_map: A_s (N, m, m), or the part of it that can differ from I
        size: m
    """
    num_omitted = size - singular_values.shape[-1]
    candidates = singular_values
    if num_omitted:
        candidates = F.pad(singular_values, (0, 1), value=1.0)
    sign, log_det = torch.linalg.slogdet(own_map)
    eigenvalues = torch.linalg.eigvals(own_map)
    is_real = eigenvalues.imag.abs() <= 1e-12 * eigenvalues.abs()
    is_reflection = (eigenvalues.real < 0) & is_real
    return {
        "sign": sign,
        "log_det": log_det,
        "largest": candidates.amax(-1),
        "smallest": candidates.amin(-1),
        "untouched": 1 - (change_singular_values > MOVED).double().sum(-1) / size,
        "energy": (singular_values.square().sum(-1) + num_omitted) / size,
        "reflections": is_reflection.double().sum(-1),
    }


def join_sites(
    size: int, eigenvalues: torch.Tensor, sites: list[dict[str, torch.Tensor]]
) -> Spectra:
    """Return the spectra of all sites, with the determinants of the products."""
    by_site = {name: torch.stack([site[name] for site in sites]) for name in BY_SITE}
    by_site["sign"] = by_site["sign"].cumprod(0)
    by_site["log_det"] = by_site["log_det"].cumsum(0)
    return Spectra(size, eigenvalues, **by_site)
