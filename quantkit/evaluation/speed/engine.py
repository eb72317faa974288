"""Requests to the engine in this process: no server, no tokenizer in between."""

import random
from collections.abc import Iterator

from quantkit.errors import QuantkitError
from quantkit.evaluation.speed.measure import RequestTimes
from quantkit.executor.engine import Engine
from quantkit.executor.sampling import SamplingParams
from quantkit.executor.sequence import Sequence


class EngineTarget:
    def __init__(self, engine: Engine, name: str, max_batch: int) -> None:
        self.engine, self.name, self.max_batch = engine, name, max_batch

    def check(self, input_len: int, output_len: int, concurrency: int) -> None:
        if input_len + output_len > self.engine.max_model_len:
            raise QuantkitError(
                f"{input_len} input and {output_len} output tokens exceed the context of {self.engine.max_model_len}",
                "lower --input-len or --output-len",
            )
        if concurrency > self.max_batch:
            raise QuantkitError(f"concurrency {concurrency} exceeds the engine's batch of {self.max_batch}", "lower --concurrency")

    def run(self, input_len: int, output_len: int, concurrency: int, requests: int, seed: int) -> Iterator[RequestTimes]:
        """A new request is sent the moment one finishes, as a closed loop of `concurrency` users does."""
        generator = random.Random(seed)
        params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)
        vocab = self.engine.loaded.config.vocab_size
        open_requests: list[Sequence] = []
        sent = 0
        while sent < requests or open_requests:
            while sent < requests and len(open_requests) < concurrency:
                prompt = [generator.randrange(vocab) for _ in range(input_len)]
                open_requests.append(self.engine.submit(prompt, params, index=sent))
                sent += 1
            self.engine.step()
            for sequence in [one for one in open_requests if one.finish_reason]:
                if sequence.fault is not None:
                    raise sequence.fault
                open_requests.remove(sequence)
                yield RequestTimes(sequence.arrival, sequence.first_token, sequence.last_token, input_len, len(sequence.generated))

    def close(self) -> None:
        self.engine.close()
