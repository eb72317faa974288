"""Walks a model sublayer by sublayer and expert by expert, and decides how every linear is rounded.

data.py              calibration sequences from quantkit's own text, a file or a data set
records.py           what a file or a data set holds; documents.py: which of the known forms a record has
templating.py        documents as the model's template writes them; taken.py: what was taken, and what is odd about it
source_model.py      the model that is calibrated: its table, config and units of work
hidden_states.py     of all calibration tokens, on the quantized and on the original path
sublayer.py          attention or feed-forward of one layer; layer_weights.py runs it, its inputs observed
observe.py           its first value: statistics of every linear's input
scale.py             its second: the scale of every group, proven to change nothing; scale_search.py: which scale
solve.py             its third: what the output holds; solver.py: from a linear and its input's statistics to a stored weight
expert_layer.py      the routed experts of a layer, streamed; experts.py solves a batch, routing.py is what they are asked
output_cost.py       what an error in the residual stream costs
unit_log.py          finished units, and what was found out
walk.py              the straight line over layers
"""
