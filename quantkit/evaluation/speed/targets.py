"""From what the user names to something that answers requests."""

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
    tp: int = 1,
    api_key: str | None = None,
    model: str | None = None,
) -> Target:
    """A URL is a server, anything else a model to load. `max_model_len` counts prompt and reply; `model` is the server's name for it.

    tp: ranks that share a model loaded here.
    """
    if name.startswith(("http://", "https://")):
        return EndpointTarget(name, model, api_key=api_key)
    from quantkit.executor.follower import lead_or_follow
    from quantkit.executor.options import EngineOptions

    path = find_model(name)
    engine = lead_or_follow(EngineOptions(path, device, backend, max_batch=max_batch, max_model_len=max_model_len, tp=tp))
    return EngineTarget(engine, f"{name} on {engine.loaded.device}", max_batch)
