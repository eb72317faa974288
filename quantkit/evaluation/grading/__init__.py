"""From a reply to a grade.

graders.py                       the graders of the tasks; `grade`
reasoning.py, typesetting.py     strip reasoning and formatting
answers.py, boxes.py, prose.py   find a numeric answer: boxes, statements, last sentence
claims.py, clauses.py, roles.py, question.py   which number of a sentence answers the question
quantities.py, values.py, units.py, conversions.py, requested_units.py   parse it
expressions.py, notation.py, math_equal.py   mathematics, compared by math-verify
choices.py, options.py, unstated_choices.py  multiple choice
programs.py, code_blocks.py, source_names.py  programs, run in the sandbox
instructions.py, languages.py, sentences.py   IFEval
"""
