"""Which tensors are linears in an architecture that quantkit does not know, from the modules that
transformers builds of its config.json.

The model is built without weights and never run. A tensor is a linear if it is the weight of an
nn.Linear in the stack of decoder layers, or of an expert there, under its name in published
checkpoints. So embeddings, heads, vision towers and projectors, which are outside the stack,
convolutions and GPT-2's transposed linears are excluded. Excluded inside the stack are:

- routers: as many outputs as there are experts, in the module that holds the experts, or alone in a
  submodule of it; and gates with one output;
- indexers of sparse attention: linears below a module of a class with that name;
- in a module with a convolution (state spaces, linear attention), linears that neither read nor
  write the residual stream, or do so through a bottleneck, as what decays a state;
- hyper-connections: linears that read or write several residual streams at once.

No code of a checkpoint is run: the classes are transformers' own.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.stacked_experts import Stack
from quantkit.common.errors import QuantkitError
from quantkit.models.hf_traced.experts import UnsupportedExperts, experts_modules, trace_experts

_MOST = {"num_hidden_layers": 1000} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 10_000
)
"""Limits for a model that is built."""
_MOST_ASSEMBLED = 2**24
"""Values of a tensor whose published parts are looked for."""
_STREAMS = ("hc_mult", "hc_count")
"""Config names of the number of residual streams."""
_BOTTLENECK = 8
"""A linear of linear attention with this many times fewer channels than the stream controls it."""

RTN_REMEDY = "use --scheme rtn-w4a16, which needs no calibration"


@dataclass(frozen=True)
class ModuleTree:
    """linears: published names of their tensors, or names of the parts of `stacks` of experts; None
    where there is no tree, for the reason `why`."""

    linears: frozenset[str] | None
    why: str = ""
    stacks: tuple[Stack, ...] = ()


def read_tree(config: Mapping[str, Any]) -> ModuleTree:
    """The tree of a config.json. Errors of building it are returned, not raised: linears are then
    identified by name. Raises QuantkitError without transformers, which must not decide what is
    rounded."""
    if importlib.util.find_spec("transformers") is None:
        raise QuantkitError(
            f"model_type {config.get('model_type')!r} is not one that quantkit has a file for, and "
            "transformers, which says what its linears are, is not installed",
            "pip install -U transformers",
        )
    why = not_built(config)
    if why:
        return ModuleTree(None, why)
    import transformers

    try:
        model = build_model(config)
        stacks = tuple(published_stacks(model))
        parts = {name for stack in stacks for names in stack.parts for name in names}
        return ModuleTree(
            frozenset(_published_linears(model, linear_weights(model))) | parts, stacks=stacks
        )
    except Exception as fault:  # transformers' classes may fail in any way
        return ModuleTree(
            None,
            f"transformers {transformers.__version__} does not build it ({in_words(fault)})",
        )


def in_words(fault: Exception) -> str:
    """An error of transformers' code as a reason: weights that no layer is given have no values."""
    if "device meta" in str(fault) or "meta tensor" in str(fault):
        return "it reads weights outside its layers, such as embeddings for every layer"
    return f"{type(fault).__name__}: {fault!s:.120}"


def not_built(config: Mapping[str, Any]) -> str:
    """Why transformers cannot build a config.json, as far as known before trying; else empty."""
    model_type = config.get("model_type")
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    import transformers

    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        return f"transformers {transformers.__version__} does not know {model_type!r}"
    odd = (
        f"config.json has {key} = {value!r:.40}"
        for key, value in _counts(config)
        if not isinstance(value, int) or value > _MOST[key]
    )
    return next(odd, "")


def check_built(config: Mapping[str, Any]) -> None:
    """Raise QuantkitError where config.json names no architecture, and where transformers, an
    optional dependency, is missing or does not know it."""
    if not config.get("model_type"):
        raise QuantkitError(
            "it has no model_type, by which the model's code is chosen",
            "use the config.json that came with the model",
        )
    if why := not_built(config):
        without = "" if "not installed" in why else f", or {RTN_REMEDY}"
        raise QuantkitError(
            f"model_type {config.get('model_type')!r} is not one that quantkit has a file for, "
            f"and {why}",
            f"pip install -U transformers{without}",
        )


def build_layers(config: Mapping[str, Any], label: str) -> Any:
    """The model, as `build_model` builds it, to be run. label: of it in an error."""
    try:
        return build_model(config, "sdpa").eval()
    except Exception:  # an unsupported attention implementation or config
        try:
            return build_model(config, "eager").eval()
        except Exception as fault:
            raise QuantkitError(
                f"{label}: transformers does not build it ({in_words(fault)})", RTN_REMEDY
            ) from fault


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values in config.json, its text model included, of the fields in _MOST."""
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, dict) else (config,):
        yield from ((key, part[key]) for key in _MOST if part.get(key) is not None)


def build_model(config: Mapping[str, Any], attention: str = "eager") -> nn.Module:
    """transformers' model of a config.json in float32 with all tensors on the meta device.
    attention: one of its implementations."""
    import transformers

    transformers.logging.set_verbosity_error()  # its remarks on a config are of no use here
    given = {key: _number(value) for key, value in config.items() if key != "quantization_config"}
    made = transformers.AutoConfig.for_model(**given)
    classes = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    known = [one for one in classes if type(made) in one._model_mapping]
    # Some architectures also have a class for the text model alone, with other tensor names:
    # `architectures` says which one wrote the checkpoint.
    written = (
        one
        for one in known
        if getattr(one._model_mapping[type(made)], "__name__", "")
        in (config.get("architectures") or ())
    )
    chosen = next(written, known[0] if known else transformers.AutoModel)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = chosen.from_config(
            made, attn_implementation=attention, dtype=torch.float32
        )
    return model


def _number(value: Any) -> Any:
    """A value of config.json with infinities and NaN in transformers' encoding decoded."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {key: _number(one) for key, one in value.items()}
        )
    return [_number(one) for one in value] if isinstance(value, list) else value


def linear_weights(model: Any) -> dict[str, Tensor]:
    """Weights of linears and experts in the decoder layers, by transformers' names."""
    hidden = model.get_input_embeddings().weight.shape[-1]
    streams = stream_count(model) * hidden
    found: dict[str, Tensor] = {}
    for layer_name, layer in decoder_stack(model):
        modules = dict(layer.named_modules())
        for name, module in modules.items():
            above = [modules[name.rsplit(".", cut)[0]] for cut in range(1, name.count(".") + 1)]
            if len(above) == 1:  # a router may be a sibling of the module of experts
                above.append(layer)
            if isinstance(module, nn.Linear) and not (
                _is_router(module, above)
                or _is_inside_mixer(module, above, hidden)
                or _is_in_indexer(above)
                or (streams > hidden and streams in (module.in_features, module.out_features))
            ):
                found[f"{layer_name}.{name}.weight"] = module.weight
        for name, weight in layer.named_parameters():
            if weight.dim() == 3 and not _is_filter(name, modules):
                found[f"{layer_name}.{name}"] = weight
    return found


def _is_router(linear: nn.Linear, above: list[nn.Module]) -> bool:
    """above: the modules that contain the linear, innermost first."""
    if linear.out_features == 1:
        return True
    holders = above[:1] + (
        above[1:2]
        if above and sum(isinstance(one, nn.Linear) for one in above[0].modules()) == 1
        else []
    )
    return any(linear.out_features in _experts(holder) for holder in holders)


def _experts(module: nn.Module) -> set[int]:
    """Numbers of experts that a module may have: stacked in a tensor, or as a list."""
    holders = [one for one in module.modules() if not isinstance(one, nn.Conv1d)]
    stacked = {
        weight.shape[0]
        for one in holders
        for weight in one.parameters(recurse=False)
        if weight.dim() == 3
    }
    return stacked | {len(one) for one in module.modules() if isinstance(one, nn.ModuleList)}


def _is_in_indexer(above: list[nn.Module]) -> bool:
    return any("Indexer" in type(module).__name__ for module in above)


def _is_inside_mixer(linear: nn.Linear, above: list[nn.Module], hidden: int) -> bool:
    sizes = (linear.in_features, linear.out_features)
    mixes = any(isinstance(one, nn.Conv1d) for module in above for one in module.children())
    return mixes and (hidden not in sizes or min(sizes) * _BOTTLENECK <= hidden)


def stream_count(model: Any) -> int:
    """Number of residual streams of a model with hyper-connections; 1 for any other."""
    config = model.config.get_text_config()
    return next((found for name in _STREAMS if (found := getattr(config, name, None))), 1)


def _is_filter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    return isinstance(modules.get(name.rpartition(".")[0]), nn.Conv1d)


def text_model(model: Any) -> Any:
    """The module that holds the decoder layers: the model's decoder; its base model where the
    decoder has no layers (a head may be called decoder); or, where the decoder is the model itself,
    its only part with layers and embedding."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = found if _lists(found) else model.base_model
    embedding = model.get_input_embeddings()
    inner = [
        one
        for one in model.children()
        if _lists(one) and any(part is embedding for part in one.modules())
    ]
    return inner[0] if found is model and len(inner) == 1 else found


def _lists(module: nn.Module) -> list[nn.ModuleList]:
    return [one for one in module.modules() if isinstance(one, nn.ModuleList)]


def decoder_stack(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers of the text model, by name: its first list with num_hidden_layers modules,
    or else its first list."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = _lists(text_model(model))
    if not lists:
        raise QuantkitError(
            f"transformers' {type(model).__name__} has no list of layers",
            "use a model that has one",
        )
    layers = next((one for one in lists if len(one) == count), lists[0])
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for number, layer in enumerate(layers):
        yield f"{prefix}.{number}", layer


def _published_linears(model: Any, weights: dict[str, Tensor]) -> Iterator[str]:
    """The published names of these weights. Experts that are published stacked are not linears."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, weight in revert_weight_conversion(model, weights).items():
        if weight.dim() == 2:
            yield name


def published_stacks(model: Any) -> Iterator[Stack]:
    """Published tensors that hold all routed experts of a layer, of the kinds that
    `hf_traced.experts` supports."""
    published = published_names(model)
    for prefix, layer in decoder_stack(model):
        for name, module in experts_modules(layer):
            if any(f"{prefix}.{name}.{key}" in published for key in module._parameters):
                with suppress(UnsupportedExperts):
                    yield from trace_experts(model, f"{prefix}.{name}", module).stacks


def published_names(model: Any) -> dict[str, str]:
    """transformers' name of a tensor -> its published name, for tensors published in the same
    form."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = dict(model.state_dict())
    own = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {
        own[id(tensor)]: name
        for name, tensor in revert_weight_conversion(model, tensors).items()
        if id(tensor) in own
    }


@dataclass(frozen=True)
class Assembled:
    """A tensor of transformers that checkpoints hold as its own values in another order, such as
    one convolution that is published as three. parts: shapes by stored name; places: of the values
    of all parts, one after the other, in the tensor, int64."""

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]
    places: Tensor

    def of(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor. read: a stored tensor by name."""
        values = torch.cat([read(name).flatten() for name in self.parts])
        made = torch.empty_like(values)
        made[self.places.to(values.device)] = values
        return made.view(self.shape)


def assembled_tensors(model: Any, names: Iterable[str]) -> dict[str, Assembled]:
    """Those of the tensors `names` that checkpoints hold in another order, by transformers' name:
    found by passing numbered values through transformers' own conversion to published names."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors, found = model.state_dict(), {}
    for name in names:
        shape = tuple(tensors[name].shape)
        count = math.prod(shape)
        if count > _MOST_ASSEMBLED:
            continue
        numbered = torch.arange(count).view(shape)
        try:
            parts = revert_weight_conversion(model, {name: numbered})
        except Exception:  # a conversion may need the values of a weight
            continue
        places = torch.cat([part.flatten() for part in parts.values()])
        if len(places) == count and torch.equal(places.sort().values, numbered.flatten()):
            found[name] = Assembled(
                shape, {disk: tuple(part.shape) for disk, part in parts.items()}, places
            )
    return found
