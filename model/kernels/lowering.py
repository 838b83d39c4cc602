"""Register our operators with Inductor in advance, so that deep models compile in finite time.

At the first call of an operator without a lowering rule, torch before 2.13 formats all arguments,
each with the operations that produced it, for a log message that is disabled. The cost grows
exponentially with the depth: with `expand_backward`, which comes last, CC-EC of width 64 took 8, 77
and more than 300 CPU-seconds to compile at 2, 3 and 4 layers, and 7, 8 and 11 with the rules
(`results/lowering_torch211.json`). The rule is the one that Inductor then makes for itself.
"""

import torch


def register() -> None:
    """Give each of our operators a lowering rule, where torch needs that.

    Operators are defined by the modules that are imported for a model, so this must be called
    whenever a model has got its stream.

    Raises:
        ImportError: an older version of torch without the private names that are used here
    """
    # newer versions format arguments only if the log is enabled
    if torch.__version__ >= (2, 13):
        return
    from torch._inductor import lowering

    for name in torch.ops.ddl:
        operator = getattr(torch.ops.ddl, name).default
        if operator not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(operator, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(operator, layout_constraint=constraint)
