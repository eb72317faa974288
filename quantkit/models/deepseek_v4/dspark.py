"""DeepSeek-V4's DSpark head (V4-Flash-0731, V4-Pro-0813): reads the streams after its targets, and
merges its own as the main model does.

Of the releases' code public ports and the engines' sources were read (vLLM and SGLang agree).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from quantkit.models import dspark
from quantkit.models.context import Context
from quantkit.models.deepseek_v4.architecture import Config, DecoderLayer, layer_parameters
from quantkit.models.deepseek_v4.config import WINDOW
from quantkit.models.hyper_connections import (
    expand_streams,
    merge_parameters,
    stream_mean,
    unpack_streams,
    with_prefix,
)
from quantkit.models.table import Parameter
from quantkit.models.weights import Weights

_PAIRS = ("markov_w1", "markov_w2")


def stage_config(config: Config) -> Config:
    """Of the stages: a window and experts of their own number."""
    sizes, first = config.dspark, config.num_hidden_layers
    return replace(
        config,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        kinds=(*config.kinds[:first], *[WINDOW] * sizes.stages),
    )


def head_parameters(config: Config) -> list[Parameter]:
    """As `dspark.head_parameters`."""
    own, first, count = stage_config(config), config.num_hidden_layers, config.dspark.stages
    rows = [row for number in range(first, first + count) for row in layer_parameters(own, number)]
    rows += merge_parameters(with_prefix(config.streams, f"mtp.{count - 1}"))
    return dspark.head_parameters(config, rows, _PAIRS)


class DSparkV4(dspark.BlockHead):
    def __init__(self, config: Config, weights: Weights) -> None:
        own, first, count = stage_config(config), config.num_hidden_layers, config.dspark.stages
        stages = [DecoderLayer(own, number, weights) for number in range(first, first + count)]
        super().__init__(config, stages, weights, _PAIRS)
        self.count = config.hc_mult
        self.end = with_prefix(config.streams, f"mtp.{count - 1}").end(weights)

    @staticmethod
    def reads(sizes: dspark.DSparkSizes) -> tuple[int, ...]:
        return tuple(target + 1 for target in sizes.targets)

    @staticmethod
    def read(config: Config, layer: Any, hidden: Tensor, context: Context) -> Tensor:
        return stream_mean(unpack_streams(hidden, config.hc_mult)[0])

    def run(self, token_ids: Tensor, embedded: Tensor, context: dspark.BlockContext) -> Tensor:
        streams = expand_streams(embedded, self.count)
        for stage in self.stages:
            _, streams = stage(token_ids, streams, context, self.norm)
        normed, _ = self.end(streams, self.norm, self.eps)
        return normed


HEAD = DSparkV4
