"""Inductor told beforehand that our operators are kernels of their own, so that deep models compile.

For an operator that it has no rule for, torch before 2.13 first writes all arguments out for its log, and each argument
with the operations that made it: seconds that grow exponentially with depth (3, 37 and 350 at 3, 4 and 5 layers of
CC-EC, for a log that is off). The rule is the one that Inductor then makes for itself.
"""

import torch


def register() -> None:
    """Give every operator of ours that is there by now its rule. Nothing from torch 2.13 on, which logs lazily.

    Operators come with the modules that define them: call it when a model has its stream, and again with the next.
    ImportError: a torch that is older and has none of the names used here, which are private.
    """
    if torch.__version__ >= (2, 13):
        return
    from torch._inductor import lowering

    for name in torch.ops.ddl:
        operator = getattr(torch.ops.ddl, name).default
        if operator not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(operator, with_default=True)
            lowering.make_fallback(operator, layout_constraint=lowering.tag_to_layout_constraint(tag))
