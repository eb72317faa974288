"""An engine for architectures without a file: transformers' own forward and cache, one request
after the other, one token a step. A model whose cache is none of keys and values, such as RWKV,
computes the whole text for each.

It offers of `Engine` what run and eval ask for.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.devices import select_device
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import Batch, SamplingParams, check_defaults, sample
from quantkit.executor.scheduler.sequence import Completion, Delta, Sequence
from quantkit.executor.worker import lead_or_follow
from quantkit.models import is_known
from quantkit.models.hf_traced.full_model import TransformersModel, transformers_warning
from quantkit.tokenizer.chat import ChatTokenizer

_CONTEXT = 4096
"""Tokens of the longest text where config.json says nothing."""


def open_engine(options: EngineOptions) -> "Engine | WholeEngine":
    """Rank 0's engine, as `lead_or_follow`; for an architecture without a file the slow one."""
    if is_known(read_json(options.model_path / "config.json")):
        return lead_or_follow(options)
    return WholeEngine(options)


class WholeEngine:
    """Raises QuantkitError for options that it does not have."""

    expert_counter = speculation = None

    def __init__(self, options: EngineOptions) -> None:
        unsupported = {
            "--tp": options.tp > 1,
            "--dp": options.dp > 1,
            "--collectives": options.collectives,
            "--draft-length": options.draft_length,
            "--draft": options.draft,
            "--prompt-lookup": options.prompt_lookup,
            "--cache": options.cache,
            "--count-experts": options.count_experts,
        }
        if found := [name for name, given in unsupported.items() if given]:
            raise QuantkitError(
                f"{options.model_path} is computed by transformers, which has no "
                f"{', '.join(found)} here",
                "leave it out",
            )
        path = Path(options.model_path)
        self.tokenizer = ChatTokenizer(path)
        check_defaults(self.tokenizer.sampling_defaults, path / "generation_config.json")
        self.loaded = load_whole(path, options.device)
        longest = self.loaded.max_position_embeddings or _CONTEXT
        self.max_model_len = min(longest, options.max_model_len or longest)

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> Iterator[Completion]:
        """As `Engine.generate`, one prompt after the other."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        sequences = [
            self._sequence(prompt, one, index)
            for index, (prompt, one) in enumerate(zip(prompts, each))
        ]
        for sequence in sequences:
            try:
                for _ in self._steps(sequence):
                    pass
            except Exception as fault:  # of this request alone
                sequence.fail(fault)
            yield sequence.completion()

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        """As `Engine.stream`."""
        sequence = self._sequence(prompt, params, 0)
        for _ in self._steps(sequence):
            if sequence.fault is not None:
                raise sequence.fault
            if (delta := sequence.take_delta()) is not None:
                yield delta

    def close(self) -> None:
        """Nothing needs ending."""

    def _sequence(self, prompt: list[int], params: SamplingParams, index: int) -> Sequence:
        if not prompt or len(prompt) >= self.max_model_len:
            raise QuantkitError(
                f"the prompt has {len(prompt)} tokens, the context is {self.max_model_len}",
                "give one that fits",
            )
        if (
            params.grammar is not None
            or params.penalizes
            or params.logit_bias
            or params.logprobs is not None
        ):
            raise QuantkitError(
                "grammars, penalties and log-probabilities are not had through transformers",
                "leave them out",
            )
        return Sequence(index, prompt, params, self.tokenizer, self.max_model_len, streams=True)

    @torch.inference_mode()
    def _steps(self, sequence: Sequence) -> Iterator[None]:
        """One token each, until the sequence is finished."""
        cache, fresh = None, sequence.token_ids
        sequence.started = time.perf_counter()
        batch = Batch.of([sequence.params], [sequence.seed], self.loaded.device)
        while sequence.finish_reason is None:
            logits, cache = self.loaded.next_logits(fresh, cache)
            if not bool(torch.isfinite(logits).all()):
                raise QuantkitError(
                    "the model's logits are not numbers",
                    "quantkit check names the tensor that is damaged",
                )
            position = torch.tensor([len(sequence.token_ids) - 1], device=self.loaded.device)
            token = int(sample(logits, batch, position))
            sequence.extend([token], time.perf_counter())
            fresh = sequence.token_ids if cache is None else [token]
            yield


def slow(path: Path) -> str:
    """Notice for a model that transformers computes; empty for any other."""
    return "" if is_known(read_json(path / "config.json")) else transformers_warning(path)


def load_whole(path: Path, device: str = "auto") -> TransformersModel:
    """A checkpoint of an architecture without a file, in float32 on a CPU and bfloat16
    elsewhere."""
    where = select_device(device)
    return TransformersModel(
        Checkpoint.open(path), where, torch.float32 if where.type == "cpu" else torch.bfloat16
    )
