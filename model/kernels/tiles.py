"""What the kernels share: vectors of d features, which are held in pieces.

The length of a Triton block is a power of two, and few widths d are. A vector is therefore a tuple
of P blocks, its pieces: 768 = 3 x 256, so that no lane is idle. Several vectors, such as the value
channels of a state, are one tuple, with the pieces of one vector after those of another.

Names of constants (tl.constexpr), in every kernel: D is the width d, BLOCK the length of a piece, P
the number of pieces of a vector, V the number of value channels d_v, and K the number of tokens
that a read covers.

Types of the other parameters: tl.tensor is a pointer, a number or a block, and tl.tuple is a tuple
of them, such as the pieces of vectors. Triton evaluates these annotations and then ignores them.
Unions, which it could not evaluate, are quoted.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# dtypes of a state that kernels, which compute in float32, read and write
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Whether to use PTX assembly where it takes fewer instructions than the code that Triton generates:
# the kernels are limited by instruction issue as much as by memory. The interpreter has no PTX.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

BLOCK_SIZES = (1024, 512, 256)


def check_dtype(x: torch.Tensor) -> None:
    """Raise ValueError for a dtype that loses digits in the kernels, which compute in float32."""
    if x.dtype not in DTYPES:
        raise ValueError(
            f"fused kernels compute in float32, but the model has the dtype {x.dtype}; use "
            "kernels=off"
        )


def choose_block(width: int) -> int:
    """Return the length of a vector's pieces: the largest that leaves the fewest lanes idle."""
    smallest = min(triton.next_power_of_2(width), BLOCK_SIZES[0])
    return min(
        (*BLOCK_SIZES, smallest), key=lambda block: (triton.cdiv(width, block) * block, -block)
    )


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor with the strides that kernels assume; None for None.

    Operators call it themselves, because a tensor that a compiler took to be contiguous when it
    traced the model may have other strides at run time.
    """
    return None if tensor is None else tensor.contiguous()


class StateStrides(NamedTuple):
    """Strides of a state (B, T, d_v, d), in numbers."""

    token: int  # from a token to the next, also across sequences
    channel: int  # from a value channel to the next; 0 if a repeated embedding is not copied


def get_state_strides(state: torch.Tensor) -> StateStrides:
    """Return the strides of a state (B, T, d_v, d), which need not be contiguous.

    Raises:
        ValueError: there are gaps between features or sequences
    """
    sequences_have_gaps = state.shape[0] > 1 and state.stride(0) != state.shape[1] * state.stride(1)
    if state.stride(3) != 1 or sequences_have_gaps:
        raise ValueError(
            f"a state of shape {tuple(state.shape)} has the strides {state.stride()}, which the "
            "fused kernels do not support; make it contiguous"
        )
    return StateStrides(token=state.stride(1), channel=state.stride(2))


# ---- numbers ----


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """Return x in fp32."""
    if PTX and x.dtype == tl.bfloat16:
        # Two bfloat16 lie in one register, and each is the upper half of an fp32. They are copied
        # first, because the compiler may use the same register for $0 and $2.
        halves: tl.constexpr = """{
            .reg .b32 both;
            mov.b32 both, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
        }"""
        return tl.inline_asm_elementwise(halves, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return fp32 x as it would be read after it was stored in dtype."""
    if PTX and dtype == tl.bfloat16:
        # one instruction rounds two numbers
        through: tl.constexpr = """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
        }"""
        return tl.inline_asm_elementwise(
            through, "=r,=r,r,r", [x], tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return 1 / (1 + exp(-x)); compiled, by approximate instructions."""
    if PTX:
        # exp(-x) = 2^(-x log2(e)), and 0fBFB8AA3B is -log2(e)
        approximate: tl.constexpr = """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
        }"""
        return tl.inline_asm_elementwise(approximate, "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.sigmoid(x)


@triton.jit
def to_numbers(block: tl.tensor, V: tl.constexpr) -> tl.tuple:
    """Return a block of V numbers as a tuple of V numbers."""
    if V == 1:
        return (tl.sum(block, 0),)
    elif V == 2:
        return tl.split(block)
    else:
        even, odd = tl.split(tl.reshape(block, (V // 2, 2)))
        evens = to_numbers(even, V // 2)
        odds = to_numbers(odd, V // 2)
        result = ()
        for j in tl.static_range(V // 2):
            result = result + (evens[j], odds[j])
        return result


@triton.jit
def load_numbers(ptr: tl.tensor, V: tl.constexpr) -> tl.tuple:
    """Return V numbers at ptr as a tuple."""
    # as a block: Triton pipelines loads of blocks, and not those of single numbers
    return to_numbers(tl.load(ptr + tl.arange(0, V)), V)


@triton.jit
def store_numbers(ptr: tl.tensor, values: tl.tuple) -> None:
    """Store a tuple of numbers at ptr."""
    # one by one: joining them into a block costs more
    for j in tl.static_range(len(values)):
        tl.store(ptr + j, values[j])


# ---- loads and stores of vectors ----


@triton.jit
def prefetch(ptr: tl.tensor, condition: tl.tensor, COUNT: tl.constexpr) -> None:
    """Start to copy COUNT values at ptr to the L2 cache, if the condition holds.

    This is one instruction of one thread. It needs sm_90, and the interpreter skips it.
    """
    if PTX:
        bulk: tl.constexpr = """{
            .reg .pred chosen;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.lt.u32 chosen, thread, $2;
            @chosen cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.b32 $0, 0;
        }"""
        size: tl.constexpr = COUNT * ptr.dtype.element_ty.primitive_bitwidth // 8
        tl.inline_asm_elementwise(
            bulk, "=r,l,r,r", [ptr, condition.to(tl.int32), size], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_vector(
    ptr: tl.tensor, mask: "tl.tensor | None", D: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tuple:
    """Return the pieces, in fp32, of the vector of D features at ptr.

    mask: zeros are returned where it is false; None to load all features
    """
    pieces = ()
    for p in tl.static_range((D + BLOCK - 1) // BLOCK):
        features = p * BLOCK + tl.arange(0, BLOCK)
        if mask is None and (p + 1) * BLOCK <= D:
            piece = tl.load(ptr + features)
        elif mask is None:
            piece = tl.load(ptr + features, features < D, other=0.0)
        else:
            piece = tl.load(ptr + features, (features < D) & mask, other=0.0)
        pieces = pieces + (widen(piece),)
    return pieces


@triton.jit
def load_vectors(
    ptr: tl.tensor,
    stride: tl.tensor,
    mask: "tl.tensor | None",
    COUNT: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return the pieces of COUNT vectors, which lie `stride` numbers apart."""
    pieces = ()
    for j in tl.static_range(COUNT):
        pieces = pieces + load_vector(ptr + j * stride, mask, D, BLOCK)
    return pieces


@triton.jit
def reload_vectors(
    ptr: tl.tensor, turn: tl.tensor, COUNT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tuple:
    """Return the pieces of COUNT contiguous vectors, loaded where they are used.

    They are neither kept in registers nor prefetched.

    turn: of the loop around the call, 0 or more
    """
    pieces = zero_vectors(COUNT, D, BLOCK)
    # always true, but the compiler does not know that, and so cannot move the loads out of the loop
    if turn >= 0:
        pieces = load_vectors(ptr, D, None, COUNT, D, BLOCK)
    return pieces


@triton.jit
def store_vectors(
    ptr: tl.tensor, pieces: tl.tuple, mask: "tl.tensor | None", D: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store vectors one after the other, in ptr's dtype.

    mask: features where it is false are not stored; None to store all
    """
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    for i in tl.static_range(len(pieces)):
        features = i % P * BLOCK + tl.arange(0, BLOCK)
        target = ptr + i // P * D + features
        piece = pieces[i].to(ptr.dtype.element_ty)
        if mask is None and (i % P + 1) * BLOCK <= D:
            tl.store(target, piece)
        elif mask is None:
            tl.store(target, piece, features < D)
        else:
            tl.store(target, piece, (features < D) & mask)


@triton.jit
def zero_vectors(COUNT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr) -> tl.tuple:
    """Return the pieces of COUNT vectors of zeros."""
    pieces = ()
    for _ in tl.static_range(COUNT * ((D + BLOCK - 1) // BLOCK)):
        pieces = pieces + (tl.zeros((BLOCK,), tl.float32),)
    return pieces


# ---- sums over features ----


@triton.jit
def add2(a0: tl.tensor, a1: tl.tensor, b0: tl.tensor, b1: tl.tensor) -> tl.tuple:
    return a0 + b0, a1 + b1


@triton.jit
def add3(
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, b0: tl.tensor, b1: tl.tensor, b2: tl.tensor
) -> tl.tuple:
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
) -> tl.tuple:
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add5(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    a4: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
    b4: tl.tensor,
) -> tl.tuple:
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def add6(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    a4: tl.tensor,
    a5: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
    b4: tl.tensor,
    b5: tl.tensor,
) -> tl.tuple:
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def sum_blocks(blocks: tl.tuple) -> tl.tuple:
    """Return the sum of each block of a tuple.

    Up to six blocks are summed in one reduction, so that the warps of the program synchronize once.
    """
    if len(blocks) == 1:
        return (tl.sum(blocks[0], 0),)
    elif len(blocks) == 2:
        return tl.reduce(blocks, 0, add2)
    elif len(blocks) == 3:
        return tl.reduce(blocks, 0, add3)
    elif len(blocks) == 4:
        return tl.reduce(blocks, 0, add4)
    elif len(blocks) == 5:
        return tl.reduce(blocks, 0, add5)
    elif len(blocks) == 6:
        return tl.reduce(blocks, 0, add6)
    else:
        return sum_blocks(blocks[:5]) + sum_blocks(blocks[5:])


@triton.jit
def dot_blocks(columns: tl.tuple, vector: tl.tuple) -> tl.tuple:
    """Return one block for each column, whose sum (`sum_blocks`) is the column's dot product."""
    P: tl.constexpr = len(vector)
    blocks = ()
    for j in tl.static_range(len(columns) // P):
        block = columns[j * P] * vector[0]
        for p in tl.static_range(1, P):
            block += columns[j * P + p] * vector[p]
        blocks = blocks + (block,)
    return blocks


# ---- arithmetic on pieces ----


@triton.jit
def multiply(a: tl.tuple, b: tl.tuple) -> tl.tuple:
    """Return a * b, feature by feature."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] * b[i],)
    return pieces


@triton.jit
def multiply_add(a: tl.tuple, b: tl.tuple, c: tl.tuple) -> tl.tuple:
    """Return a + b * c, feature by feature."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + b[i] * c[i],)
    return pieces


@triton.jit
def scale(a: tl.tuple, factor: tl.tensor) -> tl.tuple:
    """Return factor * a, where the factor is a number."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] * factor,)
    return pieces


@triton.jit
def add_scaled(a: tl.tuple, factor: tl.tensor, b: tl.tuple) -> tl.tuple:
    """Return a + factor * b, where the factor is a number."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + factor * b[i],)
    return pieces


@triton.jit
def add_zero(a: tl.tuple) -> tl.tuple:
    """Return a + 0."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + 0.0,)
    return pieces


@triton.jit
def contract_columns(columns: tl.tuple, weights: tl.tuple, P: tl.constexpr) -> tl.tuple:
    """Return the vector sum_j columns[j] * weights[j], feature by feature."""
    vector = ()
    for p in tl.static_range(P):
        piece = columns[p] * weights[p]
        for j in tl.static_range(1, len(columns) // P):
            piece += columns[j * P + p] * weights[j * P + p]
        vector = vector + (piece,)
    return vector


@triton.jit
def sum_scaled_columns(columns: tl.tuple, factors: tl.tuple, P: tl.constexpr) -> tl.tuple:
    """Return the vector sum_j factors[j] * columns[j], where the factors are numbers."""
    vector = ()
    for p in tl.static_range(P):
        piece = columns[p] * factors[0]
        for j in tl.static_range(1, len(factors)):
            piece += columns[j * P + p] * factors[j]
        vector = vector + (piece,)
    return vector


@triton.jit
def multiply_add_columns(columns: tl.tuple, weights: tl.tuple, vector: tl.tuple) -> tl.tuple:
    """Return columns[j] + weights[j] * vector for each j, feature by feature."""
    P: tl.constexpr = len(vector)
    pieces = ()
    for i in tl.static_range(len(columns)):
        pieces = pieces + (columns[i] + weights[i] * vector[i % P],)
    return pieces
