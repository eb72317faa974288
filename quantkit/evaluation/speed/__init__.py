"""Latency and throughput: a grid of input lengths and concurrencies, measured as evalscope perf
does.

  measure.py   the workload, times of requests, the summary of a grid cell
  engine.py    requests to the engine in this process; open_target for both kinds
  endpoint.py  requests to an OpenAI-compatible server
  report.py    the grid as HTML, next to published results
"""
