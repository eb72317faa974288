"""Distance of a quantized model from its original.

perplexity.py  `measure`: over texts or sampled replies; ppl.json and ppl.html
replies.py     replies of the baseline, of a server, or stored by `quantkit eval`
documents.py   texts as token ids, sliding windows
tracing.py     models that record hidden states and routed experts
quality.py     sums over tokens and the metrics, `Quality`
"""
