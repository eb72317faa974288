"""What an engine is asked for is looked at before ranks are started and weights are read."""

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.executor import engine
from quantkit.executor.engine import Engine


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*given: Any, **named: Any) -> None:
        raise AssertionError("ranks are started")

    monkeypatch.setattr(engine, "join", begun)


@pytest.mark.parametrize(
    "asked",
    [
        *({name: value} for name in ("max_batch", "cache_tokens", "prefill_tokens", "tp", "dp") for value in (0, -3)),
        *({"max_model_len": value} for value in (1, 0, -5)),
        *({"max_batch": value} for value in (2.5, "8", True)),
    ],
    ids=str,
)
def test_amounts_that_are_none_are_refused(tiny_checkpoint: Path, asked: dict[str, Any]) -> None:
    """A batch or a chunk of nothing would never end."""
    ((name, value),) = asked.items()
    with pytest.raises(QuantkitError, match=rf"^{name} is {value!r}; give a whole number of at least [12]$"):
        Engine.load(tiny_checkpoint, device="cpu", **asked)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"tp": 3}, "^the model has num_attention_heads = [0-9]+, which 3 ranks cannot share evenly; use another --tp$"),
        ({"dp": 3}, "^layer 1 has 8 routed experts, which 3 ranks cannot share evenly; use another --dp$"),
        ({"max_model_len": 10**8}, "^context of 100000000 tokens asked for, the model has [0-9]+; ask for no more than that$"),
    ],
    ids=str,
)
def test_what_the_model_refuses_starts_no_ranks(tiny_checkpoint: Path, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(QuantkitError, match=told):
        Engine.load(tiny_checkpoint, device="cpu", **asked)
