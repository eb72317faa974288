"""Did accuracy hold? Tasks, replies, grades, statistics, reports.

tasks.py prompts.py data.py        what to ask: YAML tasks under a protocol, rows from files, rendered prompts
generators/                        one protocol to reach a model, at a server or in this process; is it still the same model?
openai_server.py                   what every client of a server shares: address, key, events, errors
reasoning.py answers.py            what follows </think>, and the answer in it
grading.py math_equal.py programs.py sandbox/   from answer to grade; untrusted programs and slow mathematics in processes of their own
statistics/                        bounds, figures, held / lost / cannot tell, how much a verdict takes
results/                           the folder a run resumes from, what it found, pages, others' figures beside ours, another tool's format
asking.py run.py                   one task against one model; the straight line through all of it
regrading.py planning.py           grades made anew from what is kept; what a verdict will take
distance/ speed/                   distance from the original, token by token; how fast it answers
"""
