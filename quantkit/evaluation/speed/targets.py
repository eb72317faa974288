"""From what the user names to something that answers requests."""

from collections.abc import Sequence

from quantkit.checkpoint.hub import find_model
from quantkit.evaluation.generators.generator import check_own_cache
from quantkit.evaluation.speed.endpoint import EndpointTarget
from quantkit.evaluation.speed.engine import EngineTarget, as_chat
from quantkit.evaluation.speed.measure import Target
from quantkit.tokenizer.chat import ChatTokenizer


def open_target(
    name: str,
    *,
    max_batch: int,
    input_len: int,
    output_len: int,
    prompts: Sequence[str] = (),
    device: str,
    backend: str,
    cache: str | None = None,
    tp: int = 1,
    dp: int = 1,
    api_key: str | None = None,
    model: str | None = None,
) -> Target:
    """A URL is a server, anything else a model to load. input_len, output_len: of the longest
    prompt and reply, tokens; prompts: in the place of random ones, which the model's tokenizer
    counts. `model` is the server's name for it.

    cache, tp, dp: of a model loaded here, as `EngineOptions` has them. Raises QuantkitError where a
    server is to have another cache.
    """
    if name.startswith(("http://", "https://")):
        check_own_cache(name, cache)
        return EndpointTarget(name, model, api_key=api_key)
    from quantkit.executor.options import EngineOptions
    from quantkit.executor.worker import lead_or_follow

    path = find_model(name)
    tokenizer = ChatTokenizer(path)
    longest = output_len + (
        max(len(as_chat(tokenizer, text)) for text in prompts) if prompts else input_len
    )
    options = EngineOptions(
        path, device, backend, max_batch=max_batch, max_model_len=longest, cache=cache, tp=tp, dp=dp
    )
    engine = lead_or_follow(options)
    return EngineTarget(engine, f"{name} on {engine.loaded.device}", max_batch)
