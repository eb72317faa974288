"""Walks a model block by block and expert by expert, and decides how every linear is rounded.

data.py        calibration sequences from a text, a JSON-lines file or a data set
events.py      what a run tells while it works
layer_weights.py  one decoder layer in float32, its inputs observed
statistics.py  sums over tokens: Hessians and sizes of activations
solver.py      from a linear and the statistics of its input to a stored weight
scale_search.py   scale groups: choosing s, folding it, proving that nothing changed
experts.py     the routed experts, streamed a few at a time
walk.py        the straight line over blocks
"""
