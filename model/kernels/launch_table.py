"""The table of launches, which `launch.py` reads.

It is a file of its own, so that stored figures can tell another launch, which concerns one kernel,
from other code, which concerns every kernel.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    # warps of a program, for vectors of 513 to 1024 features
    num_warps: int

    # tokens whose loads to shared memory are in flight, including the one that is computed; 1 for
    # no pipelining
    stages: int

    # programs that run on a multiprocessor at the same time
    programs: int

    # number of tokens ahead of the current one that are prefetched to the L2 cache, which takes
    # neither registers nor shared memory; 0 for none
    prefetch: int = 0

    # whether parameters are loaded again for each token, from the L1 cache, because they do not fit
    # into registers
    reload: bool = False


# For each kernel the launch at widths of up to 768, and that at larger widths. For v=4 and v=1 at widths
# of up to 768 it is the fastest of those measured on an H200 (results/gpu/pack1_call2.json and
# pack3_call1.json), but for "step forward v=1", where 27.6 microseconds are as good as 26.2; the others
# were chosen by registers and latency, not by time. v is the number of value channels d_v, K the number of
# tokens that a read covers.
KERNELS: dict[str, tuple[Launch, Launch]] = {
    "step forward v=1": (Launch(num_warps=2, stages=3, programs=8),) * 2,
    "step forward v=2": (
        Launch(num_warps=2, stages=2, programs=6),
        Launch(num_warps=2, stages=2, programs=4),
    ),
    "step forward v=4": (
        Launch(num_warps=2, stages=3, programs=4),
        Launch(num_warps=4, stages=2, programs=3),
    ),
    "step forward v=8": (
        Launch(num_warps=4, stages=2, programs=2),
        Launch(num_warps=8, stages=2, programs=1),
    ),
    # 60 microseconds for 16 x 1,024 tokens, and 72 with 4 warps
    "step backward v=1": (
        Launch(num_warps=2, stages=3, programs=4),
        Launch(num_warps=4, stages=3, programs=3),
    ),
    "step backward v=2": (
        Launch(num_warps=4, stages=2, programs=3),
        Launch(num_warps=4, stages=2, programs=2),
    ),
    "step backward v=4": (
        Launch(num_warps=4, stages=3, programs=2),
        Launch(num_warps=4, stages=1, programs=2, prefetch=2, reload=True),
    ),
    "step backward v=8": (
        Launch(num_warps=4, stages=1, programs=2, prefetch=2, reload=True),
        Launch(num_warps=8, stages=2, programs=1, reload=True),
    ),
    "step forward v=2 K>1": (
        Launch(num_warps=4, stages=2, programs=3),
        Launch(num_warps=4, stages=2, programs=2),
    ),
    "step forward v=4 K>1": (
        Launch(num_warps=4, stages=1, programs=4, prefetch=2),
        Launch(num_warps=4, stages=1, programs=2, prefetch=2, reload=True),
    ),
    "step forward v=8 K>1": (Launch(num_warps=8, stages=2, programs=1),) * 2,
    "step backward v=2 K>1": (Launch(num_warps=4, stages=1, programs=2, prefetch=2, reload=True),)
    * 2,
    "step backward v=4 K>1": (
        Launch(num_warps=4, stages=1, programs=2, prefetch=2, reload=True),
        Launch(num_warps=8, stages=2, programs=1, reload=True),
    ),
    "step backward v=8 K>1": (Launch(num_warps=8, stages=1, programs=1, prefetch=2, reload=True),)
    * 2,
}
