"""From what the user names to something that answers requests."""

from quantkit.evaluation.generators.generator import check_own_cache
from quantkit.evaluation.speed.endpoint import EndpointTarget
from quantkit.evaluation.speed.engine import EngineTarget
from quantkit.evaluation.speed.measure import Target
from quantkit.hub import find_model


def open_target(
    name: str,
    *,
    max_batch: int,
    max_model_len: int,
    device: str,
    backend: str,
    cache: str | None = None,
    tp: int = 1,
    dp: int = 1,
    api_key: str | None = None,
    model: str | None = None,
) -> Target:
    """A URL is a server, anything else a model to load. `max_model_len` counts prompt and reply; `model` is the server's name for it.

    cache, tp, dp: of a model loaded here, as `EngineOptions` has them. Raises QuantkitError where a server is to have another cache.
    """
    if name.startswith(("http://", "https://")):
        check_own_cache(name, cache)
        return EndpointTarget(name, model, api_key=api_key)
    from quantkit.executor.follower import lead_or_follow
    from quantkit.executor.options import EngineOptions

    path = find_model(name)
    options = EngineOptions(path, device, backend, max_batch=max_batch, max_model_len=max_model_len, cache=cache, tp=tp, dp=dp)
    engine = lead_or_follow(options)
    return EngineTarget(engine, f"{name} on {engine.loaded.device}", max_batch)
