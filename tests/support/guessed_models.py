"""Small models that others guess for, and what is asked of them: of tests of draft models and
heads."""

from pathlib import Path
from typing import Any

from tied_model import TIED

from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams

LLAMA: dict[str, Any] = TIED | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
QWEN3: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(6)]
MIXED = [
    SamplingParams(
        max_new_tokens=14 + i, temperature=0.8 * (i % 2), top_p=0.9, seed=i, ignore_eos=True
    )
    for i in range(6)
]


def load(path: Path, draft: Path | None = None, **options: Any) -> Engine:
    return Engine.load(
        path,
        device="cpu",
        dtype="float32",
        draft=draft,
        **{"max_batch": 4, "max_model_len": 128, **options},
    )


def tokens(
    engine: Engine,
    params: SamplingParams | list[SamplingParams],
    prompts: list[list[int]] = PROMPTS,
) -> list[list[int]]:
    done = sorted(engine.generate(prompts, params), key=lambda one: one.index)
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
    return [one.token_ids for one in done]


def measured(engine: Engine) -> float:
    """The share of guesses that were kept since it was asked last."""
    acceptance = engine.speculation.acceptance
    assert acceptance.drafted > 15
    rate = acceptance.rate
    acceptance.drafted = acceptance.accepted = 0
    return rate


def in_place(step: Any, lengths: list[int]) -> Any:
    """As a graph behaves: computes on the buffers that the step was made with, and leaves results
    where the first ones lay."""
    kept = step()

    def replay() -> Any:
        for old, new in zip(kept, step()) if isinstance(kept, tuple) else [(kept, step())]:
            old.copy_(new)
        return kept

    return replay
