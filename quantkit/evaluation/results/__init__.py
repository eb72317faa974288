"""Results of an evaluation and what is written of them.

task_results.py      samples, scores, warnings: TaskResult, EvalResults
folder.py            the output folder: lock, reply journal, looks
baseline.py          comparison with a baseline, and of several runs
report.py, pages.py  files of a run, HTML pages and plots, evalscope's report schema
published.py         scores and speeds published by others
"""
