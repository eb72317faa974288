"""The engine: a loaded model, its cache and its tokenizer, and the loop that continues many prompts together.

    engine = Engine.load("path/to/model", max_batch=64)
    for completion in engine.generate([engine.tokenizer.encode_chat(messages)], SamplingParams(max_new_tokens=512)):
        print(completion.text)

`step` is the whole of it: schedule, compute, choose, append. A server calls submit, step and cancel from one thread.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.executor.cache import CachePlan, PagedCache, plan_cache
from quantkit.executor.chat import ChatTokenizer
from quantkit.executor.devices import free_bytes
from quantkit.executor.load import LoadedModel, load_model
from quantkit.executor.runner import Runner
from quantkit.executor.sampling import Batch, SamplingParams, log_probabilities, sample
from quantkit.executor.scheduler import Scheduler
from quantkit.executor.sequence import Completion, FinishReason, Sequence, TokenLogprob

CACHE_DTYPE = torch.bfloat16
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer; `completion` comes with the last one."""

    text: str
    completion: Completion | None


class Engine:
    def __init__(self, loaded: LoadedModel, tokenizer: ChatTokenizer, plan: CachePlan, *, max_batch: int, prefill_tokens: int) -> None:
        self.loaded, self.tokenizer, self.plan = loaded, tokenizer, plan
        self.max_model_len = plan.max_model_len
        config = loaded.config
        self.cache = PagedCache(
            config.num_hidden_layers,
            plan.num_blocks,
            config.cache_width,
            block_size=plan.block_size,
            dtype=CACHE_DTYPE,
            device=loaded.device,
        )
        self.scheduler = Scheduler(plan, max_batch=max_batch, prefill_tokens=prefill_tokens)
        self.runner = Runner(loaded.model, self.cache)

    @classmethod
    def load(
        cls,
        model_path: Path | str,
        *,
        device: str = "auto",
        backend: str = "auto",
        dtype: str | None = None,
        max_batch: int = 64,
        max_model_len: int | None = None,
        cache_tokens: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> "Engine":
        """Load a checkpoint directory.

        max_batch: requests computed together. max_model_len: longest prompt plus answer (None: what model and cache allow).
        cache_tokens: tokens the cache holds, over all requests (None: what max_batch full contexts need, within a share of the memory).
        prefill_tokens: prompt tokens computed between two decode steps. Raises QuantkitError where something does not fit.
        """
        path = Path(model_path)
        tokenizer = ChatTokenizer(path)
        loaded = load_model(path, device=device, backend=backend, dtype=dtype)
        config = loaded.config
        plan = plan_cache(
            bytes_per_token=config.num_hidden_layers * config.cache_width * CACHE_DTYPE.itemsize,
            free_bytes=free_bytes(loaded.device),
            device_type=loaded.device.type,
            max_batch=max_batch,
            context_len=config.max_position_embeddings,
            max_model_len=max_model_len,
            cache_tokens=cache_tokens,
        )
        return cls(loaded, tokenizer, plan, max_batch=max_batch, prefill_tokens=prefill_tokens)

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> Iterator[Completion]:
        """Continue all prompts together; completions come as they finish, `index` is the prompt's place in the list.

        Every prompt is checked before anything is computed. Closing the iterator early cancels what is unfinished.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        assert len(each) == len(prompts), (len(each), len(prompts))
        open_sequences = [self.sequence(prompt, one, index, streams=False) for index, (prompt, one) in enumerate(zip(prompts, each))]
        for sequence in open_sequences:
            self.scheduler.add(sequence)
        unfinished = set(open_sequences)
        try:
            while unfinished:
                done = [sequence for sequence in self.step() if sequence in unfinished and sequence.finish_reason]
                unfinished.difference_update(done)
                yield from (sequence.completion() for sequence in done)
        finally:
            for sequence in unfinished:
                self.cancel(sequence)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Continue one prompt; its text comes as it is written."""
        sequence = self.submit(prompt, params)
        try:
            while sequence.finish_reason is None:
                self.step()
                text = sequence.take_text()
                if text or sequence.finish_reason:
                    yield Delta(text, sequence.completion() if sequence.finish_reason else None)
        finally:
            self.cancel(sequence)

    def submit(self, prompt: list[int], params: SamplingParams, index: int = 0) -> Sequence:
        """Queue a request whose text is streamed. Raises QuantkitError where it can never run."""
        sequence = self.sequence(prompt, params, index)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """Stop a request and free its cache; nothing happens where it has finished."""
        if sequence.finish_reason is None:
            self.scheduler.remove(sequence)
            sequence.finish(reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Compute one step for everybody who can run. Returns the sequences that got tokens; finished ones are already removed."""
        step = self.scheduler.schedule()
        advanced: list[Sequence] = []
        if step.decode:
            advanced += self._choose(step.decode, self.runner.decode(step.decode))
        if step.prefill:
            advanced += self._choose(*self.runner.prefill(step.prefill))
        for sequence in advanced:
            if sequence.finish_reason:
                self.scheduler.remove(sequence)
        return advanced

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> list[Sequence]:
        """Sample a token for each row and append it. The one place where the host waits for the device."""
        if not sequences:
            return []
        params = [sequence.params for sequence in sequences]
        batch = Batch.of(params, [sequence.seed for sequence in sequences], logits.device)
        positions = torch.tensor([len(sequence.token_ids) for sequence in sequences], device=logits.device)
        chosen = sample(logits, batch, positions)
        counts = [one.logprobs for one in params if one.logprobs is not None]
        if counts:
            self._note_logprobs(sequences, logits, chosen, max(counts))
        token_ids, now = chosen.tolist(), time.perf_counter()
        for sequence, token_id in zip(sequences, token_ids):
            sequence.append(token_id, now)
        return sequences

    def _note_logprobs(self, sequences: list[Sequence], logits: Tensor, chosen: Tensor, count: int) -> None:
        found = log_probabilities(logits, chosen, count)
        rows = zip(sequences, chosen.tolist(), found.chosen.tolist(), found.top_ids.tolist(), found.top_values.tolist())
        for sequence, token_id, logprob, top_ids, top_values in rows:
            if sequence.params.logprobs is not None:
                top = tuple(zip(top_ids, top_values))[: sequence.params.logprobs]
                sequence.logprobs.append(TokenLogprob(token_id, logprob, top))

    def sequence(self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True) -> Sequence:
        """A request that is checked and not yet queued; touches nothing that `step` does, so any thread may call it."""
        if not prompt:
            raise QuantkitError("the prompt is empty", "give at least one token")
        if len(prompt) >= self.max_model_len:
            raise QuantkitError(
                f"the prompt has {len(prompt)} tokens, the context is {self.max_model_len}", "shorten it, or raise --max-model-len"
            )
        vocab = self.loaded.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise QuantkitError(f"the prompt has token ids outside 0..{vocab - 1}", "use the model's own tokenizer")
        return Sequence(index, prompt, params, self.tokenizer, self.max_model_len, streams=streams)
