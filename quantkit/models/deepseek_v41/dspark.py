"""DeepSeek-V4.1's DSpark head: reads the streams before its targets; stages weigh the streams for
each other as the main model's layers do."""

from dataclasses import replace
from typing import Any

from quantkit_kernels import rms_norm
from torch import Tensor

from quantkit.models import dspark
from quantkit.models.context import Context
from quantkit.models.deepseek_v41.ahead_streams import AheadStreams
from quantkit.models.deepseek_v41.architecture import DecoderLayer, layer_parameters
from quantkit.models.deepseek_v41.config import Config
from quantkit.models.hyper_connections import stream_mean
from quantkit.models.table import Parameter
from quantkit.models.weights import Weights

_PAIRS = ("embed", "head")


def stage_config(config: Config) -> Config:
    """Of the stages: a window and experts of their own number."""
    sizes = config.dspark
    return replace(
        config,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        ratios=(*config.ratios, *[0] * sizes.stages),
        sources=(*config.sources, *[-1] * sizes.stages),
    )


def head_parameters(config: Config) -> list[Parameter]:
    """As `dspark.head_parameters`."""
    own, first = stage_config(config), config.num_hidden_layers
    stages = [layer_parameters(own, first + stage) for stage in range(config.dspark.stages)]
    return dspark.head_parameters(config, [row for rows in stages for row in rows], _PAIRS)


class DSparkV41(dspark.BlockHead):
    def __init__(self, config: Config, weights: Weights) -> None:
        own, first = stage_config(config), config.num_hidden_layers
        numbers = range(first, first + config.dspark.stages)
        stages = [DecoderLayer(own, number, weights) for number in numbers]
        super().__init__(config, stages, weights, _PAIRS)
        self.streams = replace(config.streams, shared=0)

    @staticmethod
    def reads(sizes: dspark.DSparkSizes) -> tuple[int, ...]:
        return sizes.targets

    @staticmethod
    def read(config: Config, layer: Any, hidden: Tensor, context: Context) -> Tensor:
        assert layer is not None, "it reads inputs of layers"
        state = AheadStreams.unpack(hidden, config.streams)
        return stream_mean(layer.with_ngrams(state, context).streams)

    def run(self, token_ids: Tensor, embedded: Tensor, context: dspark.BlockContext) -> Tensor:
        state = AheadStreams.first(embedded, token_ids, self.streams)
        for stage in self.stages:
            state = stage.step(state, context, None)
        return rms_norm(state.merged(), self.norm, self.eps)


HEAD = DSparkV41
