"""How fast a model answers: a grid of input lengths and concurrencies, measured the way evalscope
perf measures.

workload.py  what is asked: lengths, prompts, users who wait or requests that arrive
measure.py   what a request's times mean, and the summary of a cell of the grid
engine.py    requests to the engine in this process
endpoint.py  requests to an OpenAI-compatible server
report.py    the grid as HTML, with published figures beside it
"""
