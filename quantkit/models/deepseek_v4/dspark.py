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


def head_parameters(config: Config) -> list[Parameter]:
    """As `dspark.head_parameters`."""
    first, count = config.num_hidden_layers, config.dspark.stages
    rows = [
        row for number in range(first, first + count) for row in layer_parameters(config, number)
    ]
    merge = merge_parameters(with_prefix(config.streams, f"mtp.{count - 1}"))
    rows += [replace(row, layer=first + count - 1) for row in merge]
    return dspark.head_parameters(config, rows, _PAIRS)


class DSparkV4(dspark.BlockHead):
    def __init__(self, config: Config, weights: Weights) -> None:
        first, count = config.num_hidden_layers, config.dspark.stages
        stages = [DecoderLayer(config, number, weights) for number in range(first, first + count)]
        super().__init__(config, stages, weights, _PAIRS)
        self.count, self.streams = config.hc_mult, config.streams
        self.end = with_prefix(config.streams, f"mtp.{count - 1}").end(weights)

    @staticmethod
    def reads(sizes: dspark.DSparkSizes) -> tuple[int, ...]:
        return tuple(target + 1 for target in sizes.targets)

    @staticmethod
    def read(config: Config, layer: Any, hidden: Tensor, context: Context) -> Tensor:
        return stream_mean(unpack_streams(hidden, config.hc_mult)[0])

    def head_input(self, hidden: Tensor) -> Tensor:
        return self._merged(unpack_streams(hidden, self.count)[0])

    def run(self, token_ids: Tensor, embedded: Tensor, context: dspark.BlockContext) -> Tensor:
        streams = expand_streams(embedded, self.count)
        for stage in self.stages:
            _, streams = stage(token_ids, streams, context, self.norm)
        return self._merged(streams)

    def _merged(self, streams: Tensor) -> Tensor:
        normed, _ = self.end(streams, self.norm, self.eps)
        return normed


HEAD = DSparkV4
