"""Did accuracy hold? Tasks, replies, grades, statistics, reports.

tasks/                  what to ask: YAML tasks under a protocol, rows from files, rendered prompts, texts with hidden numbers
generators/             one protocol to reach a model, at a server or in this process; is it still the same model?
openai_server.py        what every client of a server shares: address, key, events, errors
grading/                from a reply to a grade: reasoning is cut off, typesetting goes, the answer is found (answers, choices, expressions,
                        programs) and read whole (quantities, values) or compared by math-verify;
                        IFEval's instructions
sandbox/                programs of a model, in processes of their own
statistics/             bounds, figures, held / lost / cannot tell, how much a verdict takes
results/                the folder a run resumes from, what it found, pages, others' figures beside ours, another tool's format
asking.py run.py        one task against one model; the straight line through all of it
regrading.py planning/plan.py   grades made anew from what is kept; what a verdict will take
distance/ speed/        distance from the original, token by token; how fast it answers
"""
