"""Stand-ins for packages that a loader imports and does not need to load: kernels for a device,
image processing.

`absent("torchvision", ...)` lets these packages, and every module and name within them, be
imported. What is called gives a stand-in again, or, as a decorator, the function itself: nothing is
computed, and a weight that went through one would not come out right.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Nothing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _named(name))  # the same one whenever it is asked for
        return cls.__dict__[name]

    def __call__(cls, *args, **kwargs):
        if (
            len(args) == 1
            and not kwargs
            and callable(args[0])
            and not isinstance(args[0], _Nothing)
        ):
            return args[0]
        return _named(cls.__name__)

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())

    def __bool__(cls):
        return False


def _named(name):
    return _Nothing(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _named(name))
        return self.__dict__[name]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        inside = any(
            fullname == package or fullname.startswith(f"{package}.") for package in self.packages
        )
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0.0"


def absent(*packages):
    sys.meta_path.insert(0, _Finder(packages))
