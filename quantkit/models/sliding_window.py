"""Sliding windows: which layers of a decoder have one, as transformers reads it from
config.json."""

from collections.abc import Callable

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.models.config import check_count, refusal

_FULL, _SLIDING = "full_attention", "sliding_attention"


def refuse_windows(config: JsonObject) -> None:
    """For an architecture without windows: raises QuantkitError where config.json has one."""
    if config.get("use_sliding_window"):
        raise QuantkitError(
            f"config.json has use_sliding_window = {config['use_sliding_window']!r}",
            "this architecture has full attention",
        )
    # Qwen's configs have a window next to use_sliding_window: false. Without that flag, engines
    # disagree on what the window means.
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise QuantkitError(
            f"config.json has sliding_window = {config['sliding_window']!r}",
            "this architecture has full attention",
        )
    others = sorted({*_layer_types(config)} - {_FULL})
    if others:
        raise QuantkitError(
            f"config.json has layer_types {', '.join(others)}",
            "this architecture has full attention",
        )


def read_windows(
    config: JsonObject, num_layers: int, sliding: Callable[[int], bool]
) -> tuple[int, ...]:
    """For each layer the number of tokens that a token sees, itself included, 0 for all; empty if
    all layers have full attention.

    sliding: which layers have a window if one is set and config.json has no layer_types. Raises
    QuantkitError for kinds of attention that are neither full nor sliding, for a list of another
    length, and for sliding layers without a window.
    """
    window = config.get("sliding_window")
    if window is not None:
        window = check_count("sliding_window", window)
    listed = _layer_types(config)
    kinds = listed or [
        _SLIDING if window and sliding(layer) else _FULL for layer in range(num_layers)
    ]
    others = sorted({*kinds} - {_FULL, _SLIDING})
    if others:
        raise QuantkitError(
            f"config.json has layer_types {', '.join(others)}",
            f"quantkit computes {_FULL} and {_SLIDING}",
        )
    if len(kinds) != num_layers:
        raise refusal("layer_types", listed, f"one for each of num_hidden_layers = {num_layers}")
    if _SLIDING not in kinds:
        return ()
    if window is None:
        raise QuantkitError(
            f"config.json has layer_types {_SLIDING} and no sliding_window",
            "use the config.json that came with the model",
        )
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def read_switched_windows(
    config: JsonObject, num_layers: int, sliding: Callable[[int], bool]
) -> tuple[int, ...]:
    """As `read_windows`, for architectures whose window is only active with use_sliding_window,
    such as Qwen."""
    on = config.get("use_sliding_window")
    if on not in (None, False, True):
        raise refusal("use_sliding_window", on, "true or false")
    return read_windows(config if on else {**config, "sliding_window": None}, num_layers, sliding)


def read_qwen_windows(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Windows of dense Qwen models: in the layers from max_window_layers on."""
    first = max_window_layers(config)
    return read_switched_windows(config, num_layers, lambda layer: layer >= first)


def max_window_layers(config: JsonObject) -> int:
    named = config.get("max_window_layers")
    # 28 is transformers' default.
    return 28 if named is None else check_count("max_window_layers", named, least=0)


def _layer_types(config: JsonObject) -> list[str]:
    listed = config.get("layer_types") or []
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise refusal("layer_types", listed, "a list of texts")
    return listed
