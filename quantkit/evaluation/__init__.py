"""Measure whether a quantized model keeps its accuracy: tasks, replies, grades, statistics,
reports.

  run.py          score a model on tasks (run_evaluation); regrading.py grades stored replies again
  generation.py   one task against one model: prompts, stored and new replies, grades
  planning.py     how many problems and repeats a verdict needs
  tasks/          YAML tasks and protocols, their rows, prompts, needle-in-a-haystack texts
  generators/     one interface to a model, in this process or at an OpenAI-compatible server
  grading/        from a reply to a grade: numbers, choices, expressions, programs, instructions
  sandbox/        isolated processes for programs that a model wrote
  statistics/     bounds on means, paired comparison (held / lost / cannot tell), power
  results/        output folder, results, comparison with a baseline, HTML pages, evalscope export
  distance/       perplexity, KL divergence and error per layer against the original model
  speed/          latency and throughput
"""
