"""The table of launches, which `launch.py` reads.

It is a file of its own so that stored figures can tell another launch, which concerns its own
kernel, from other code, which concerns every kernel.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    num_warps: int
    stages: int  # tokens in flight to shared memory, the one that is computed included; 1: none
    programs: int  # of each multiprocessor at a time
    # tokens that the L2 cache is asked for ahead: costs no registers and no shared memory
    prefetch: int = 0
    # the parameters are loaded for each token again, from the L1 cache: they do not fit registers
    reload: bool = False


L2 = {"stages": 1, "prefetch": 2}

# At widths of up to 768, and above: the best by registers and latency, not yet by time; then two
# that --tune measures.
KERNELS = {
    "add_norm forward": [(Launch(2, 3, 8), Launch(1, 3, 16), Launch(2, programs=8, **L2))] * 2,
    "add_norm backward": [(Launch(2, 3, 8), Launch(1, 3, 16), Launch(2, programs=8, **L2))] * 2,
    "expand forward": [(Launch(4, 2, 8), Launch(2, 2, 16), Launch(4, 1, 8))] * 2,
    "expand backward": [(Launch(4, 2, 4), Launch(2, 2, 4), Launch(4, 1, 4))] * 2,
    "step forward v=1": [(Launch(2, 3, 8), Launch(1, 3, 11), Launch(2, programs=8, **L2))] * 2,
    "step forward v=2": [
        (Launch(2, 2, 6), Launch(2, 3, 6), Launch(2, programs=6, **L2)),
        (Launch(2, 2, 4), Launch(2, 3, 4), Launch(2, programs=4, **L2)),
    ],
    "step forward v=4": [
        (Launch(2, 2, 4), Launch(2, 3, 4), Launch(2, programs=4, **L2)),
        (Launch(4, 2, 3), Launch(4, 3, 2), Launch(4, programs=3, **L2)),
    ],
    "step forward v=8": [
        (Launch(4, 2, 2), Launch(4, programs=2, **L2), Launch(4, 3, 2)),
        (Launch(8, 2, 1), Launch(4, programs=2, reload=True, **L2), Launch(8, 3, 1)),
    ],
    "step backward v=1": [
        (Launch(4, 3, 4), Launch(2, 3, 4), Launch(4, programs=4, **L2)),
        (Launch(4, 3, 3), Launch(4, 2, 3), Launch(4, programs=3, **L2)),
    ],
    "step backward v=2": [
        (Launch(4, 2, 3), Launch(4, 3, 3), Launch(4, programs=3, **L2)),
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
    ],
    "step backward v=4": [
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 3, 1)),
    ],
    "step backward v=8": [
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 2, 1, reload=True)),
        (Launch(8, 2, 1, reload=True), Launch(8, programs=1, reload=True, **L2), Launch(8, 2, 1)),
    ],
    "step forward v=2 K>1": [
        (Launch(4, 2, 3), Launch(2, 2, 4), Launch(4, programs=3, **L2)),
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
    ],
    "step forward v=4 K>1": [
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 3, 1)),
    ],
    "step forward v=8 K>1": [(Launch(8, 2, 1), Launch(8, programs=1, **L2), Launch(8, 3, 1))] * 2,
    "step backward v=2 K>1": [
        (Launch(4, programs=2, reload=True, **L2), Launch(4, 2, 2), Launch(4, 2, 2, reload=True)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 2, 1, reload=True)),
    ],
    "step backward v=4 K>1": [
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(4, 2, 2, reload=True)),
        (
            Launch(8, 2, 1, reload=True),
            Launch(8, 3, 1, reload=True),
            Launch(8, programs=1, reload=True, **L2),
        ),
    ],
    "step backward v=8 K>1": [
        (
            Launch(8, programs=1, reload=True, **L2),
            Launch(8, 2, 1, reload=True),
            Launch(8, 3, 1, reload=True),
        ),
    ]
    * 2,
}
