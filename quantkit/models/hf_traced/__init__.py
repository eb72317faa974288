"""Architectures without a file of their own, computed by transformers' modules and analysed by
tracing.

    skeleton.py        the model without weights: its decoder layers, how they are called, tensor names in checkpoints
    layer.py           one decoder layer over weights that the caller provides, whole or in two halves
    scale_groups.py    probe weights, and scale groups found by scaling norms and linears and tracing the readers
    sublayers.py       what was found for each kind of layer: its halves, shared inputs, scale groups
    embed_and_head.py  what comes before the first layer and after the last
    experts.py         stacked routed experts: what one computes, and where checkpoints store it
    full_model.py      a whole checkpoint in memory, for measurements
    architecture.py    all of it as an `Architecture`, with the rows of a checkpoint

No code of a checkpoint is run: the classes are transformers' own.
"""
