"""DeepSeek-V4.1's DSpark head: reads the streams before its targets; stages weigh the streams for
each other as the main model's layers do."""

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


def head_parameters(config: Config) -> list[Parameter]:
    """As `dspark.head_parameters`."""
    first = config.num_hidden_layers
    stages = [layer_parameters(config, first + stage) for stage in range(config.dspark.stages)]
    return dspark.head_parameters(config, [row for rows in stages for row in rows], _PAIRS)


class DSparkV41(dspark.BlockHead):
    def __init__(self, config: Config, weights: Weights) -> None:
        first = config.num_hidden_layers
        numbers = range(first, first + config.dspark.stages)
        stages = [DecoderLayer(config, number, weights) for number in numbers]
        super().__init__(config, stages, weights, _PAIRS)
        self.streams = config.of_layer(first).streams

    @staticmethod
    def reads(sizes: dspark.DSparkSizes) -> tuple[int, ...]:
        return sizes.targets

    @staticmethod
    def read(config: Config, layer: Any, hidden: Tensor, context: Context) -> Tensor:
        assert layer is not None, "it reads inputs of layers"
        state = AheadStreams.unpack(hidden, config.streams)
        return stream_mean(layer.with_ngrams(state, context).streams)

    def head_input(self, hidden: Tensor) -> Tensor:
        return self._merged(AheadStreams.unpack(hidden, self.streams))

    def run(self, token_ids: Tensor, embedded: Tensor, context: dspark.BlockContext) -> Tensor:
        state = AheadStreams.first(embedded, token_ids, self.streams)
        for stage in self.stages:
            state = stage.step(state, context, None)
        return self._merged(state)

    def _merged(self, state: AheadStreams) -> Tensor:
        return rms_norm(state.merged(), self.norm, self.eps)


HEAD = DSparkV41
