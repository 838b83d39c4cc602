"""What the kernels share: vectors of the state's width, held in pieces.

Triton's blocks are powers of two, and few widths are: a vector of width D is a tuple of blocks, 768
= 3 x 256, and no lane is idle. Several vectors, the columns of a state, are one tuple, a column's
pieces after the other's.
"""

import os

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# PTX, where it is fewer instructions than what Triton makes: the kernels' limit is issue as much as
# memory.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
BLOCKS = (1024, 512, 256)


def block_of(d: int) -> int:
    """Features of a piece: the largest block that leaves the fewest lanes idle at width d."""
    return min(
        (*BLOCKS, min(triton.next_power_of_2(d), BLOCKS[0])),
        key=lambda block: (-(-d // block) * block, -block),
    )


def dense(*tensors):
    """Each as the kernels read it.

    Inside an operator: what a compiler took to be contiguous may not be.
    """
    return [t if t is None else t.contiguous() for t in tensors]


def rows_and_columns(state) -> tuple[int, int]:
    """Strides of state (B, T, v, d) from token to token and from column to column.

    An expanded embedding has columns at stride 0. ValueError: features are not contiguous, or
    sequences have gaps.
    """
    if state.stride(3) != 1 or (
        state.shape[0] > 1 and state.stride(0) != state.shape[1] * state.stride(1)
    ):
        raise ValueError(
            f"a state of shape {tuple(state.shape)} and strides {state.stride()}: make it "
            "contiguous"
        )
    return state.stride(1), state.stride(2)


@triton.jit
def widened(x):
    """x in fp32."""
    if PTX and x.dtype == tl.bfloat16:
        # A copy, because $0 may be given $2's register.
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
def rounded(x, dtype: tl.constexpr):
    """fp32 x as it would be read after it was stored in dtype."""
    if PTX and dtype == tl.bfloat16:
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
def sigmoid(x):
    if PTX:
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
def prefetch(ptr, here, COUNT: tl.constexpr):
    """Begin to bring COUNT values at ptr into the L2 cache, if `here`: one instruction of one
    thread, on sm_90.
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
            bulk, "=r,l,r,r", [ptr, here.to(tl.int32), size], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load(ptr, own, D: tl.constexpr, BLOCK: tl.constexpr):
    """Pieces in fp32 of the vector at ptr.

    own: whether to load it at all, zeros if not; None: it is.
    """
    pieces = ()
    for p in tl.static_range((D + BLOCK - 1) // BLOCK):
        features = p * BLOCK + tl.arange(0, BLOCK)
        if own is None and (p + 1) * BLOCK <= D:
            piece = tl.load(ptr + features)
        elif own is None:
            piece = tl.load(ptr + features, features < D, other=0.0)
        else:
            piece = tl.load(ptr + features, (features < D) & own, other=0.0)
        pieces = pieces + (widened(piece),)
    return pieces


@triton.jit
def load_columns(ptr, stride, own, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Pieces of V vectors that lie `stride` apart."""
    columns = ()
    for j in tl.static_range(V):
        columns = columns + load(ptr + j * stride, own, D, BLOCK)
    return columns


@triton.jit
def store(ptr, pieces, own, D: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors one after the other, in ptr's dtype; not if `own` is false."""
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    for i in tl.static_range(len(pieces)):
        features = i % P * BLOCK + tl.arange(0, BLOCK)
        place, piece = ptr + i // P * D + features, pieces[i].to(ptr.dtype.element_ty)
        if own is None and (i % P + 1) * BLOCK <= D:
            tl.store(place, piece)
        elif own is None:
            tl.store(place, piece, features < D)
        else:
            tl.store(place, piece, (features < D) & own)


@triton.jit
def zeros(COUNT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    pieces = ()
    for _ in tl.static_range(COUNT * ((D + BLOCK - 1) // BLOCK)):
        pieces = pieces + (tl.zeros((BLOCK,), tl.float32),)
    return pieces


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def totals(blocks):
    """Sums of each of the blocks, in one reduction: the program's warps meet once for up to six."""
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
        return totals(blocks[:5]) + totals(blocks[5:])


@triton.jit
def products(columns, vector):
    """For each column, its product with the vector: one block, which `totals` sums."""
    P: tl.constexpr = len(vector)
    blocks = ()
    for j in tl.static_range(len(columns) // P):
        block = columns[j * P] * vector[0]
        for p in tl.static_range(1, P):
            block += columns[j * P + p] * vector[p]
        blocks = blocks + (block,)
    return blocks


@triton.jit
def times(a, b):
    """Piece by piece."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] * b[i],)
    return pieces


@triton.jit
def plus(a, factor, b):
    """a + factor b, piece by piece. factor: a number."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + factor * b[i],)
    return pieces


@triton.jit
def combined(columns, weights, P: tl.constexpr):
    """The vector sum_j columns[j] weights[j]."""
    vector = ()
    for p in tl.static_range(P):
        piece = columns[p] * weights[p]
        for j in tl.static_range(1, len(columns) // P):
            piece += columns[j * P + p] * weights[j * P + p]
        vector = vector + (piece,)
    return vector


@triton.jit
def numbers(vector, V: tl.constexpr):
    """A block of V as a tuple of V numbers."""
    if V == 1:
        return (tl.sum(vector, 0),)
    elif V == 2:
        return tl.split(vector)
    else:
        even, odd = tl.split(tl.reshape(vector, (V // 2, 2)))
        evens, odds, every = numbers(even, V // 2), numbers(odd, V // 2), ()
        for j in tl.static_range(V // 2):
            every = every + (evens[j], odds[j])
        return every


@triton.jit
def fma(a, b, c):
    """a + b c, piece by piece."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + b[i] * c[i],)
    return pieces


@triton.jit
def scaled(a, factor):
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] * factor,)
    return pieces


@triton.jit
def shifted(a):
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (a[i] + 0.0,)
    return pieces


@triton.jit
def outer(columns, weights, vector):
    """Each column plus its weight times the vector, piece by piece."""
    P: tl.constexpr = len(vector)
    pieces = ()
    for i in tl.static_range(len(columns)):
        pieces = pieces + (columns[i] + weights[i] * vector[i % P],)
    return pieces


@triton.jit
def weighted(columns, factors, P: tl.constexpr):
    """The vector sum_j factors[j] columns[j]; factors: numbers."""
    vector = ()
    for p in tl.static_range(P):
        piece = columns[p] * factors[0]
        for j in tl.static_range(1, len(factors)):
            piece += columns[j * P + p] * factors[j]
        vector = vector + (piece,)
    return vector


@triton.jit
def load_again(ptr, turn, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Pieces of N vectors, one after the other, loaded where they are used: neither kept in
    registers nor prefetched.

    turn: of the loop, 0 or more. That it is asked is what keeps the loads where they are.
    """
    pieces = zeros(N, D, BLOCK)
    if turn >= 0:
        pieces = load_columns(ptr, D, None, N, D, BLOCK)
    return pieces


@triton.jit
def load_numbers(ptr, V: tl.constexpr):
    # As a block: loads of blocks are pipelined, loads of numbers are not.
    return numbers(tl.load(ptr + tl.arange(0, V)), V)


@triton.jit
def store_numbers(ptr, values):
    # One by one: to make a block of them costs more.
    for j in tl.static_range(len(values)):
        tl.store(ptr + j, values[j])
