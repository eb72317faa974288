"""Distance of a quantized model from its original.

perplexity.py  `measure`: over texts or sampled replies
replies.py     replies of the baseline or of a server; greedy replies compared
stored_replies.py  replies that `quantkit eval` stored
documents.py   texts as token ids, sliding windows
tracing.py     models that record hidden states and routed experts
quality.py     sums over tokens and the metrics, `Quality`
report.py      ppl.json and ppl.html
"""
