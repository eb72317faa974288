"""From a reply to a grade.

graders.py                     the graders of the tasks; `grade`
reasoning.py, typesetting.py   strip reasoning and formatting
answers.py, numbers.py         find an answer: box, statement, last sentence; read its number
choices.py                     multiple choice
expressions.py, math_equal.py  mathematics, compared by math-verify
programs.py, code_blocks.py    programs, run in the sandbox
instructions.py                IFEval
"""
