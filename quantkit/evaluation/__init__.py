"""Did accuracy hold? Tasks, replies, grades, statistics, reports.

tasks.py prompts.py data.py        what to ask: YAML tasks under a protocol, rows from files, rendered prompts
generator.py endpoint.py local.py  one protocol to reach a model, at a server or in this process
openai_server.py                   what every client of a server shares: address, key, events, errors
reasoning.py answers.py            what follows </think>, and the answer in it
grading.py math_equal.py programs.py sandbox/   from answer to grade; untrusted programs and slow mathematics in processes of their own
statistics.py comparison.py        figures, and held / lost / cannot tell
store.py results.py baseline.py    the folder a run resumes from, what it found, what it is compared with
report.py plots.py published.py evalscope_format.py   a page, others' figures beside ours, another tool's format
run.py                             the straight line through all of it
perplexity.py                      distance from the original, token by token
"""
