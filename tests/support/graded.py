"""One reply through a grader."""

from functools import cache

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.tasks.data import map_fields
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task

setting_of = cache(lambda name: find_setting(find_task(name), "r1"))


def graded(grader, fields, reply):
    """grader: one, or its name; fields: of the problem; reply: a text or a ModelReply."""
    made = find_grader(grader) if isinstance(grader, str) else grader
    completion = ModelReply(0, reply) if isinstance(reply, str) else reply
    return grade(made, Problem("p", fields, made.gold(fields)), completion, False)


def graded_row(name, row, reply):
    """The reply to a row of a task's data set."""
    setting = setting_of(name)
    return graded(setting.grader, map_fields(setting.task, row, 0), reply)
