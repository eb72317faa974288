"""Architectures without a file of their own, computed by transformers' modules.

    skeleton.py      the model without weights: its decoder layers, how they are called, and the names of their tensors on disk
    layer.py         one decoder layer over whatever weights the caller gives it, whole or in two halves
    stand_ins.py     weights for a forward that is only watched: sparse random linears, whatever the size of the layer
    groups.py        scale groups, found by watching what a scale of a norm or a linear does to everything that reads it
    kinds.py         what was found of each kind of layer: its halves, what reads one tensor, its groups
    ends.py          what comes before the first layer and after the last
    experts.py       stacked routed experts: what one computes, and where checkpoints have it
    whole.py         a whole checkpoint in memory, to be measured
    architecture.py  all of it as an `Architecture`, with the rows of a checkpoint

Nothing of a checkpoint is run: the classes are transformers' own.
"""
