"""Evaluation tasks.

definitions.py  YAML tasks and protocols; Problem and Grade
data.py         rows of a task as problems
prompts.py      rendering of prompts
needle.py       needle-in-a-haystack texts
"""
