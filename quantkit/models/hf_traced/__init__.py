"""Architectures without a file of their own, computed by transformers' modules and analysed by
tracing.

    module_tree.py     the model as transformers builds it: its linears, and the names of its tensors
    skeleton.py        the model without weights: its decoder layers and how they are called
    layer.py           one decoder layer over weights that the caller provides, or half of it
    scale_groups.py    probe weights, and scale groups found by scaling norms and linears
    sublayers.py       the structure of each kind of layer: halves, shared inputs, scale groups
    embed_and_head.py  what comes before the first layer and after the last
    experts.py         stacked routed experts: what one computes, and where it is stored
    full_model.py      a whole checkpoint in memory, for measurements
    architecture.py    all of it as an `Architecture`, with the rows of a checkpoint

No code of a checkpoint is run: the classes are transformers' own.
"""
