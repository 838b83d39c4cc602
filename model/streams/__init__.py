"""The residual streams of other papers, and the controls: a file each, like the variants in model/."""
