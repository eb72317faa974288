"""Files of Python that no package holds, as modules."""

import importlib.util
import sys


def module_at(path, name=None):
    """The file run as a module `name`, by default its stem, under which others find it."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
