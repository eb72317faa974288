"""Latency and throughput: a grid of input lengths and concurrencies, measured as evalscope perf
does.

  measure.py  the workload, times of requests, the summary of a grid cell, the grid as HTML
  targets.py  requests to the engine in this process, or to an OpenAI-compatible server
"""
