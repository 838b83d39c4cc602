"""Inductor told beforehand that our operators are kernels of their own, so that deep models
compile.

At the first call of an operator that it has no rule for, torch before 2.13 writes all arguments
out, each with the operations that made it, for a log that is off. That grows exponentially with
what came before: with `expand_backward`, which comes last, CC-EC of width 64 took 8, 77 and more
than 300 CPU-seconds at 2, 3 and 4 layers, and 7, 8 and 11 with the rules
(`results/lowering_torch211.json`). The rule is the one that Inductor then makes for itself.
"""

import torch


def register() -> None:
    """Give every operator of ours that is there by now its rule. Nothing from torch 2.13 on.

    Operators come with the modules that define them: call it when a model has its stream, and again
    with the next.
    ImportError: a torch that is older and has none of the names used here, which are private.
    """
    if torch.__version__ >= (2, 13):
        return
    from torch._inductor import lowering

    for name in torch.ops.ddl:
        operator = getattr(torch.ops.ddl, name).default
        if operator not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(operator, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(operator, layout_constraint=constraint)
