"""The engine: a loaded model, its cache and its tokenizer, and the loop that generates for many
requests together.

    engine = Engine.load("path/to/model", max_batch=64)
    prompt = engine.tokenizer.encode_chat(messages)
    for completion in engine.generate([prompt], SamplingParams(max_new_tokens=512)):
        print(completion.text)

`step` is the core: schedule, compute, sample, append. A server calls add, step and cancel from one
thread. With several ranks this is rank 0, which leads the others (rank0.py).

A fault of one sequence (its text cannot be decoded, its row cannot be sampled) finishes that
sequence with the reason "error" and its `fault`; the others go on. `step` raises only if nothing
can be computed any more.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.hub import find_model
from quantkit.common.devices import HostCopy, set_current_device
from quantkit.common.errors import QuantkitError
from quantkit.common.options import documented, read_options
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.dp_step import DpStep
from quantkit.executor.memory_budget import (
    LONGEST_PREFILL_TOKENS,
    check_finite_logits,
    default_chunk_tokens,
    plan_kv_cache,
)
from quantkit.executor.options import EngineOptions, check_amounts
from quantkit.executor.rank0 import Leader
from quantkit.executor.ranks.parallel import SINGLE, join
from quantkit.executor.ranks.rank_processes import environment_rank
from quantkit.executor.runner.decode_batch import DecodeRows
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.runner.prefill_tuner import measure
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import (
    SampledTokens,
    Sampler,
    check_not_nan,
    row_logprobs,
    score_prompts,
)
from quantkit.executor.sampling.grammar import Grammars
from quantkit.executor.sampling.params import SamplingParams, check_defaults
from quantkit.executor.scheduler.data_parallel import DataParallelScheduler
from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler
from quantkit.executor.scheduler.sequence import (
    Completion,
    Delta,
    FinishReason,
    Sequence,
    check_request,
)
from quantkit.executor.speculation.block_drafter import BlockDrafter
from quantkit.executor.speculation.draft_model import check_draft, load_draft, make_drafter
from quantkit.executor.speculation.eagle_head import LoadedEagleHead
from quantkit.executor.speculation.mtp_drafter import make_mtp_drafter
from quantkit.executor.speculation.speculation import Proposer, Speculation
from quantkit.executor.weights.expert_counter import ExpertCounter
from quantkit.executor.weights.load import LoadedModel, open_given, prepare
from quantkit.tokenizer.chat import ChatTokenizer


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: ChatTokenizer,
        plan: CachePlan,
        options: EngineOptions,
        draft: LoadedModel | LoadedEagleHead | None = None,
    ) -> None:
        """draft: the model or head that `options.draft` names."""
        chunk_tokens = options.chunk_tokens or default_chunk_tokens(loaded, plan, draft)
        draft_length, lookahead = options.max_draft_length, options.lookahead
        self.loaded, self.tokenizer, self.plan, self.max_model_len = (
            loaded,
            tokenizer,
            plan,
            plan.max_model_len,
        )
        self.parallel, dp_size = loaded.weights.ranks, loaded.weights.expert_ranks.size
        rank_batch = -(-options.max_batch // dp_size)
        self.longest_chunk: int | None = None
        """Prompt tokens that a step may have where they are faster; None where the user chose."""
        if options.chunk_tokens is None:
            longest = default_chunk_tokens(loaded, plan, draft, LONGEST_PREFILL_TOKENS)
            self.longest_chunk = -(-max(chunk_tokens, longest) // dp_size)
        kept = options.prefix_cache and loaded.checkpoint_bytes(lookahead) > 0
        assert plan.checkpoints or not kept, "a plan by plan_kv_cache"
        self._speculates = lookahead > 0
        self.cache = loaded.new_cache(plan.num_blocks, rank_batch, lookahead, plan.checkpoints)
        self.expert_counter: ExpertCounter | None = None
        eager = "experts are counted" if options.count_experts else ""
        one_cpu_rank = loaded.device.type == "cpu" and self.parallel.size == dp_size == 1
        self.runner = Runner(
            loaded.model,
            self.cache,
            eager=eager,
            repeats=one_cpu_rank and not eager,
            experts=loaded.weights.expert_ranks,
        )
        make = partial(
            Scheduler,
            plan,
            max_batch=rank_batch,
            chunk_tokens=-(-chunk_tokens // dp_size),
            lookahead=max(lookahead, int(self.runner.can_launch_async)),
            prefix_cache=options.prefix_cache,
        )
        self.scheduler: Scheduler | DataParallelScheduler = (
            make() if dp_size == 1 else DataParallelScheduler(dp_size, make)
        )
        drafter: Proposer | None = None
        if draft is not None:
            drafter = make_drafter(
                draft,
                loaded,
                plan,
                self.runner,
                draft_length,
                self.parallel,
                shared=options.prefix_cache,
            )
        elif draft_length and loaded.block_head is not None:
            drafter = BlockDrafter(
                loaded.block_head, self.runner, draft_length, self.parallel, lookahead
            )
        elif draft_length:
            drafter = make_mtp_drafter(loaded.mtp_layers, self.runner, draft_length, self.parallel)
        self.runner.prefill_runner.keep_all_hidden = drafter is not None or options.count_experts
        # On a CPU with one rank, thread time is not disturbed by other work on the machine.
        self._clock = time.thread_time if one_cpu_rank else time.perf_counter
        self.speculation = Speculation(
            drafter, options.prompt_lookup, adaptive=options.measure_steps
        )
        self.leader = Leader(self.parallel)
        self.grammars = Grammars(tokenizer.tokenizer, loaded.config.vocab_size, tokenizer.eos_ids)
        self.sampler = Sampler(
            loaded.config.vocab_size, loaded.device, lambda: self.tokenizer.eos_ids
        )
        self.while_computing: Callable[[list[Sequence]], None] = lambda advanced: None
        """Called while the device computes, once or twice a step, with the sequences that earlier
        passes of the step advanced. A server sends tokens here, so that they do not wait for the
        prompts computed after them."""

    @classmethod
    @documented(EngineOptions)
    def load(
        cls, model_path: Path | str, options: EngineOptions | None = None, **keywords: Any
    ) -> "Engine":
        """Load a model: a directory, tiny-r1, or a hub id. Options are a value, keywords, or both.
        Raises QuantkitError where options do not fit the model or the machine.

        With several ranks this process is rank 0 and starts the others on this machine, unless
        torchrun started them all: then each gets its rank's engine, and those above 0 are for
        `rank0.follow` (`worker.lead_or_follow` does both).
        """
        chosen = read_options(EngineOptions, options, keywords)
        return cls.open(replace(chosen, model_path=find_model(str(model_path))))

    @classmethod
    def open(
        cls, options: EngineOptions, log: Callable[[str], None] = lambda text: None
    ) -> "Engine":
        """As `load`. log: receives a line after every stage."""
        path, began = options.model_path, time.perf_counter()
        check_amounts(options)
        tokenizer = ChatTokenizer(path)
        check_defaults(tokenizer.sampling_defaults, path / "generation_config.json")
        draft_path = None if options.draft is None else Path(options.draft)
        if draft_path is not None:
            check_draft(draft_path, tokenizer)
        # Open before other ranks start, so that a fault here ends nothing; a rank started by rank 0
        # reports its fault to the ranks it has met.
        opened = open_given(options) if environment_rank(options.ranks) is None else None
        parallel = join(options)
        try:
            opened = opened or open_given(options)
            ranks = (parallel, SINGLE) if options.dp == 1 else (SINGLE, parallel)
            loaded = prepare(opened, *ranks)
            log(f"weights loaded after {time.perf_counter() - began:.1f} s")
            check_finite_logits(loaded)
            draft = None if draft_path is None else load_draft(draft_path, loaded, options)
            plan = plan_kv_cache(loaded, options, draft)
            engine = cls(loaded, tokenizer, plan, options, draft)
            if options.measure_steps:
                engine.scheduler.budget = measure(
                    engine.runner,
                    parallel,
                    engine.scheduler.budget,
                    options.max_batch,
                    engine.longest_chunk,
                )
                log(
                    f"steps measured after {time.perf_counter() - began:.1f} s: "
                    f"{engine.scheduler.budget.with_decodes} prompt tokens a step while sequences "
                    "decode"
                )
                rows = options.max_batch * (1 + options.lookahead)
                warm_up_graphs(engine.runner, parallel, rows, engine.max_model_len)
            if options.count_experts:  # only now, as the passes so far had synthetic tokens
                engine.expert_counter = ExpertCounter(loaded)
            return engine
        except Exception:
            parallel.close()
            raise

    def generate(
        self, prompts: Iterable[list[int] | str], params: SamplingParams | list[SamplingParams]
    ) -> Iterator[Completion]:
        """Generate for all prompts together, token ids or texts to be continued; yields completions
        as they finish, `index` is the prompt's place in the list.

        Every prompt is checked before anything is computed. A fault of one request alone is in its
        completion's `fault`. Closing the iterator early cancels what is unfinished.
        """
        if isinstance(prompts, str):
            raise QuantkitError("the prompts are one text", "give a list of prompts")
        prompts = [*prompts]
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        assert len(each) == len(prompts), (len(each), len(prompts))
        open_sequences = [
            self.sequence(prompt, one, index, streams=False)
            for index, (prompt, one) in enumerate(zip(prompts, each))
        ]
        for sequence in open_sequences:
            self.add(sequence)
        unfinished = set(open_sequences)
        try:
            while unfinished:
                done = [
                    sequence
                    for sequence in self.step()
                    if sequence in unfinished and sequence.finish_reason
                ]
                unfinished.difference_update(done)
                yield from (sequence.completion() for sequence in done)
        finally:
            for sequence in unfinished:
                self.cancel(sequence)

    def stream(self, prompt: list[int] | str, params: SamplingParams) -> Iterator[Delta]:
        """Generate for one prompt; yields text as it is decoded. Raises the request's fault."""
        sequence = self.submit(prompt, params)
        try:
            while sequence.finish_reason is None:
                self.step()
                if sequence.fault is not None:
                    raise sequence.fault
                if (delta := sequence.take_delta()) is not None:
                    yield delta
        finally:
            self.cancel(sequence)

    def submit(self, prompt: list[int] | str, params: SamplingParams, index: int = 0) -> Sequence:
        """Queue a request whose text is streamed. Raises QuantkitError if it can never run."""
        sequence = self.sequence(prompt, params, index)
        self.add(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Queue a request made by `sequence`."""
        self.leader.add(sequence)
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """Stop a request and free its cache; does nothing if it has finished."""
        if sequence.finish_reason is None:
            self.withdraw(sequence, reason)
            self.leader.cancel(sequence)

    def withdraw(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a request on this rank only."""
        self.scheduler.remove(sequence)
        sequence.finish(reason)

    def close(self) -> None:
        """End the other ranks, if any."""
        self.leader.dismiss()
        self.parallel.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Sequence]:
        """Compute one step for all sequences that can run. Returns the sequences that got tokens or
        failed; finished ones are already removed. Raises if the device, or a rank, is lost."""
        if self._speculates and (lengths := self.speculation.choose()) is not None:
            self.leader.guess(*lengths)
        self.leader.step()
        advanced = self.compute_step()
        for sequence, fault in [(one, one.fault) for one in advanced if one.fault is not None]:
            self.cancel(sequence, "error")
            sequence.fail(fault)
        return advanced

    @torch.inference_mode()
    def compute_step(self) -> list[Sequence]:
        """The step of this rank: as `step`, but sequences with a fault stay until rank 0 cancels
        them."""
        set_current_device(self.loaded.device)  # threads start with the first one
        began, mixed = self._clock(), self.scheduler.budget.mixed
        # With a decode pass in flight, a chunk would delay its tokens, also if it ends no prompt.
        step = self.scheduler.schedule(decode_only=mixed and self.runner.has_async)
        self._copy_states(step)
        rows, accepted = len(step.decode), self.speculation.acceptance.accepted
        if self._speculates:
            rows += sum([len(one.drafts) for one in step.decode])
        advanced: list[Sequence] = []
        if not step.decode:
            self.runner.drop_async()
        for one in step.passes(mixed):
            advanced += self._run_pass(
                one, [sequence for sequence in advanced if sequence.fault is None]
            )
        if self._speculates and step.decode and not step.prefill:
            accepted = self.speculation.acceptance.accepted - accepted
            self.speculation.record_step(step.decode, rows, accepted, self._clock() - began)
        for sequence in [one for one in advanced if one.finish_reason]:
            self.scheduler.remove(sequence)
        return advanced

    def _copy_states(self, step: ScheduledStep) -> None:
        """This rank's copies between sequences and the prefix cache."""
        divided, states = isinstance(self.scheduler, DataParallelScheduler), self.cache.checkpoints
        for copy in step.copies:
            if not divided or copy.dp_rank == self.parallel.rank:
                move = states.restore if copy.restores else states.save
                move(copy.slot, copy.place, copy.tokens)

    def _run_pass(self, step: ScheduledStep, advanced: list[Sequence]) -> list[Sequence]:
        """One forward pass. advanced: by earlier passes of the step. Returns the sequences that got
        tokens or failed. If the pass fails, each sequence gets a pass of its own, and those that
        fail again are finished."""
        began = time.perf_counter()
        cached = {sequence: sequence.num_cached for sequence, _ in step.prefill}
        try:
            if step.prefill:
                self.while_computing([])  # a prompt may take the host as long as the device
            if isinstance(self.scheduler, DataParallelScheduler):
                return self._dp_pass(DpStep(step, self.parallel), advanced)
            return self._finish_pass(self._forward(step), advanced)
        except Exception as fault:
            self.runner.drop_async()
            _check_usable(self.loaded.device, fault, alone=self.leader.alone)
            done: list[Sequence] = []
            retries = step.per_sequence()
            for sequence, own in retries:
                if sequence.last_token >= began:  # it had its token when the pass failed
                    done.append(sequence)
                    continue
                sequence.num_cached = cached.get(sequence, sequence.num_cached)
                if len(retries) > 1:
                    done += self._run_pass(own, advanced)
                else:
                    sequence.fail(fault)
                    done.append(sequence)
            return done

    def _forward(self, step: ScheduledStep) -> ForwardPass:
        self.sampler.prepare(step)
        if not step.prefill:
            return self.runner.decode(step.decode)
        if not step.decode:
            return self.runner.prefill(step.prefill)
        return self.runner.mixed(step.decode, step.prefill)

    def _finish_pass(self, output: ForwardPass, advanced: list[Sequence]) -> list[Sequence]:
        """Sample, draft, append the tokens that all ranks agree on. Returns the sequences that got
        tokens."""
        score_prompts(output, self.runner.model)
        sampled = self.sampler.sample(output, self.runner.draw) if output.counts else None
        drafts = self.speculation.launch(output, sampled) if self._speculates else None
        fetched = None
        if sampled is not None:
            token_ids = sampled.token_ids
            if drafts is not None:
                token_ids = torch.cat((token_ids, drafts))
            fetched = HostCopy(token_ids)
            # Before listening to other ranks, which may add requests on this rank alone.
            self._launch_async(output, sampled, None if drafts is None else token_ids)
        self.while_computing(advanced)
        agreed, number = list[int](), len(output.logit_rows)
        if fetched is not None:  # the host waits for the device, once for tokens and drafts
            agreed = self.parallel.agree(fetched)
            self._append(output, agreed[:number])
        sequences = [sequence for sequence, _ in output.counts]
        if self._speculates:
            self.speculation.finish(output, sequences, agreed[number:])
        return sequences

    def _launch_async(
        self, output: ForwardPass, sampled: SampledTokens, with_drafts: Tensor | None
    ) -> None:
        """Launch the next decode pass if it has the same sequences. with_drafts: sampled tokens and
        what `Speculation.launch` returned."""
        if not (
            self.runner.can_launch_async
            # The logits of `output` are overwritten.
            and isinstance(output.batch, DecodeRows)
            and all([sequence.params.logprobs is None for sequence, _ in output.counts])
            and self.scheduler.decodes_again(output.counts)
        ):
            return
        if with_drafts is not None:
            if self.speculation.controller.lookup == 0:  # nothing replaces the drafts
                tokens, number = self.parallel.first(with_drafts), len(output.logit_rows)
                self.runner.launch_async_verification(
                    output.counts, tokens[:number], tokens[number:]
                )
        elif not (output.has_drafts or (self._speculates and self.speculation.is_active)):
            # Greedy tokens are the same on every rank: gathered logits have the same bits.
            self.runner.launch_async_decode(
                sampled.token_ids
                if sampled.batch is None
                else self.parallel.first(sampled.token_ids)
            )

    def _dp_pass(self, step: DpStep, advanced: list[Sequence]) -> list[Sequence]:
        """A pass of all data-parallel ranks: every rank's tokens are appended to its sequences on
        every rank."""
        output = step.compute(self.sampler, self.runner)
        score_prompts(output, self.runner.model)
        sampled = self.sampler.sample(output, self.runner.draw) if output.counts else None
        if self._speculates:
            self.speculation.launch(output, sampled)
        self.while_computing(advanced)
        token_ids, others = step.share(
            output.hidden.new_empty(0) if sampled is None else sampled.token_ids
        )
        if token_ids:
            self._append(output, token_ids)
        for sequence, tokens in others:
            self._extend(sequence, tokens, time.perf_counter())
        step.report_logprobs()
        sequences = [sequence for sequence, _ in output.counts + others]
        if self._speculates:
            self.speculation.finish(output, sequences, [])
        return sequences

    def _append(self, output: ForwardPass, token_ids: list[int]) -> None:
        """Append the rows' tokens to their sequences, for as long as their drafts were accepted."""
        assert output.logits is not None, output.counts
        now, row = time.perf_counter(), 0
        logprobs = row_logprobs(output.counts, output.logits, token_ids)
        if not logprobs and len(token_ids) == len(output.counts):  # no drafts
            for (sequence, _), token_id in zip(output.counts, token_ids):
                sequence.append(token_id, now)
            return
        for sequence, count in output.counts:
            kept = self._extend(sequence, token_ids[row : row + count], now)
            if logprobs and sequence.params.logprobs is not None:
                sequence.logprobs += logprobs[row : row + kept]
                check_not_nan(sequence, logprobs[row : row + kept])
            row += count

    def _extend(self, sequence: Sequence, token_ids: list[int], now: float) -> int:
        """Append tokens to one sequence, for as long as its drafts were accepted. Returns how
        many."""
        kept = sequence.extend(token_ids, now)
        if len(token_ids) > 1:
            self.speculation.record_acceptance(sequence, len(token_ids) - 1, kept - 1)
        return kept

    def sequence(
        self,
        prompt: list[int] | str,
        params: SamplingParams,
        index: int = 0,
        *,
        streams: bool = True,
    ) -> Sequence:
        """A checked request, not yet queued. Shares no state with `step`, so any thread may call
        it."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        check_request(prompt, params, self.max_model_len, self.loaded.config.vocab_size)
        guide = (
            None
            if params.grammar is None
            else self.grammars.guide(params.grammar, params.grammar_after)
        )
        return Sequence(
            index, prompt, params, self.tokenizer, self.max_model_len, streams=streams, guide=guide
        )


def _check_usable(device: torch.device, fault: Exception, *, alone: bool) -> None:
    """Raise `fault` where it concerns more than one forward pass: other ranks wait in that pass, or
    the device no longer computes."""
    if not alone:
        raise fault
    try:
        torch.ones(1, device=device).sum().item()
    except Exception:
        raise fault from None
