"""Calibration: walk a model sublayer by sublayer and choose how every linear is quantized.

data, documents      calibration sequences from the built-in text, a file or a `datasets` data set
recipe               all settings of a run
source_model         the source's parameters, work units and tensors in float32
output               writes work units in one format, and accounts for every tensor of the source
walk                 the loop over layers: observe, scale, solve, propagate
sublayer, hidden_states, ranks     running one sublayer over all tokens
input_statistics, input_sums     1. Hessians of all linear inputs
scales               2. AWQ / SmoothQuant scales, folded and verified
sublayer_solver, linear_solver                    3. quantized weights by GPTQ and descent
expert_layer, experts    routed experts, streamed in batches; the source and plain rounding next to them
output_cost          what an error in the residual stream costs
sensitivity          predicted KL of every linear on every grid, for mixed precision
"""
