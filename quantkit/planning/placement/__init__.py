"""Which device holds which routed experts, and of which it holds copies: from counts to a file that
an engine reads.

balance.py   one layer: copies, packing, refining
place.py     the straight line: counts and a model to a placement, its balance and what it takes
layouts.py   the file of each engine
"""
