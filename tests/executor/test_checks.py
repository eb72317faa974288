"""What an engine is asked for is looked at before ranks are started and weights are read."""

import pytest
from refused import refused

from quantkit import Engine
from quantkit.executor import engine


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    def begun(*given, **named):
        raise AssertionError("ranks are started")

    monkeypatch.setattr(engine, "join", begun)


@pytest.mark.parametrize(
    "asked",
    [
        *(
            {name: value}
            for name in ("max_batch", "max_model_len", "cache_tokens", "chunk_tokens", "tp", "dp")
            for value in (0, -3)
        ),
        *({"max_batch": value} for value in (2.5, "8", True)),
    ],
    ids=str,
)
def test_amounts_that_are_none_are_refused(tiny_checkpoint, asked):
    """A batch or a chunk of nothing would never end."""
    ((name, value),) = asked.items()
    with refused(rf"^{name} is {value!r}.*; give "):
        Engine.load(tiny_checkpoint, device="cpu", **asked)
