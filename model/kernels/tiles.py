"""What the kernels share: tiles of the state."""

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dense(*tensors):
    """Each as the kernels read it. Inside an operator: what a compiler took to be contiguous may not be."""
    return [t if t is None else t.contiguous() for t in tensors]


def rows_and_columns(state) -> tuple[int, int]:
    """Strides of state (B, T, v, d) from token to token and from column to column.

    An expanded embedding has columns at stride 0. ValueError: features are not contiguous, or sequences have gaps.
    """
    if state.stride(3) != 1 or (state.shape[0] > 1 and state.stride(0) != state.shape[1] * state.stride(1)):
        raise ValueError(f"a state of shape {tuple(state.shape)} and strides {state.stride()}: make it contiguous")
    return state.stride(1), state.stride(2)


@triton.jit
def load_vector(ptr, features, mask):
    return tl.load(ptr + features, mask, other=0.0).to(tl.float32)


@triton.jit
def store_vector(ptr, features, mask, vector):
    tl.store(ptr + features, vector.to(ptr.dtype.element_ty), mask)


@triton.jit
def load_columns(ptr, column_stride, features, mask, V: tl.constexpr):
    """Tile (BLOCK, V) in fp32 of V vectors that lie column_stride apart.

    Joining whole vectors keeps the columns of a feature in one thread: sums over columns need no other thread, sums
    over features are one reduction for all columns, and global memory is read along the features.
    """
    if V == 1:
        tile = load_vector(ptr, features, mask)[:, None]
    elif V == 2:
        tile = tl.join(load_vector(ptr, features, mask), load_vector(ptr + column_stride, features, mask))
    else:
        even = load_columns(ptr, 2 * column_stride, features, mask, V // 2)
        odd = load_columns(ptr + column_stride, 2 * column_stride, features, mask, V // 2)
        tile = tl.reshape(tl.join(even, odd), (features.shape[0], V))
    return tile


@triton.jit
def store_columns(ptr, column_stride, features, mask, tile, V: tl.constexpr):
    """Inverse of `load_columns`, in ptr's dtype."""
    if V == 1:
        store_vector(ptr, features, mask, tl.sum(tile, 1))
    elif V == 2:
        left, right = tl.split(tile)
        store_vector(ptr, features, mask, left)
        store_vector(ptr + column_stride, features, mask, right)
    else:
        even, odd = tl.split(tl.reshape(tile, (features.shape[0], V // 2, 2)))
        store_columns(ptr, 2 * column_stride, features, mask, even, V // 2)
        store_columns(ptr + column_stride, 2 * column_stride, features, mask, odd, V // 2)
