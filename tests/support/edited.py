"""JSON files of a model's folder, changed in place."""

import json
from contextlib import contextmanager


@contextmanager
def edited(file):
    """What a file holds, which is written back as the `with` leaves it."""
    value = json.loads(file.read_text())
    yield value
    file.write_text(json.dumps(value))
