"""The engine: a loaded model, its cache and its tokenizer, and the loop that continues many prompts
together.

    engine = Engine.load("path/to/model", max_batch=64)
    for completion in engine.generate([engine.tokenizer.encode_chat(messages)],
    SamplingParams(max_new_tokens=512)):
        print(completion.text)

`step` is the whole of it: schedule, compute, choose, append. A server calls add, step and cancel
from one thread. With several ranks this is rank 0, which leads the others (`leader.Leader`); their
engines do what it tells them (`leader.follow`).

What goes wrong with one sequence (its text cannot be decoded, its row cannot be sampled) finishes
that sequence with the reason "error" and its `fault`; the others go on. `step` raises only where
nothing can be computed any more.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.common.devices import HostCopy, set_current_device
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.checks import check_amounts, check_request, check_usable
from quantkit.executor.dp_step import DpStep
from quantkit.executor.memory_budget import check_finite_logits, plan_kv_cache, prefill_tokens
from quantkit.executor.options import EngineOptions, lookahead_of
from quantkit.executor.rank0 import Leader
from quantkit.executor.ranks.parallel import SINGLE, join
from quantkit.executor.ranks.rank_processes import environment_rank
from quantkit.executor.runner.graph_warmup import warm_up_graphs
from quantkit.executor.runner.prefill_tuner import measure
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import Sampler, check_not_nan, row_logprobs, score_prompts
from quantkit.executor.sampling.grammar import Grammars
from quantkit.executor.sampling.params import SamplingParams, check_defaults
from quantkit.executor.scheduler.data_parallel import DataParallelScheduler
from quantkit.executor.scheduler.scheduler import ScheduledStep, Scheduler
from quantkit.executor.scheduler.sequence import Completion, Delta, FinishReason, Sequence
from quantkit.executor.speculation.draft_model import check_draft, load_draft, make_drafter
from quantkit.executor.speculation.eagle_head import LoadedEagleHead
from quantkit.executor.speculation.mtp_drafter import make_mtp_drafter
from quantkit.executor.speculation.speculation import Proposer, Speculation
from quantkit.executor.weights.expert_counter import ExpertCounter
from quantkit.executor.weights.load import LoadedModel, open_asked, prepare
from quantkit.tokenizer.chat import ChatTokenizer


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: ChatTokenizer,
        plan: CachePlan,
        *,
        max_batch: int,
        prefill_tokens: int,
        num_drafts: int = 0,
        num_looked_up: int = 0,
        measure_steps: bool = False,
        prefix_cache: bool = False,
        count_experts: bool = False,
        draft: LoadedModel | LoadedEagleHead | None = None,
    ) -> None:
        self.loaded, self.tokenizer, self.plan, self.max_model_len = (
            loaded,
            tokenizer,
            plan,
            plan.max_model_len,
        )
        self.parallel, homes = loaded.weights.ranks, loaded.weights.expert_ranks.size
        own_batch = -(-max_batch // homes)
        self._guesses = (lookahead := lookahead_of(num_drafts, num_looked_up)) > 0
        self.cache = loaded.new_cache(plan.num_blocks, own_batch, lookahead)
        self.expert_counter: ExpertCounter | None = None
        eager = "experts are counted" if count_experts else ""
        self.runner = Runner(
            loaded.model, self.cache, eager=eager, experts=loaded.weights.expert_ranks
        )
        reach = max(lookahead, int(self.runner.can_launch_async))
        amounts = {
            "max_batch": own_batch,
            "prefill_tokens": -(-prefill_tokens // homes),
            "lookahead": reach,
        }
        make = partial(Scheduler, plan, **amounts, prefix_cache=prefix_cache)
        self.scheduler: Scheduler | DataParallelScheduler = (
            make() if homes == 1 else DataParallelScheduler(homes, make)
        )
        drafter: Proposer | None = None
        if draft is not None:
            drafter = make_drafter(
                draft, loaded, plan, self.runner, num_drafts, self.parallel, shared=prefix_cache
            )
        elif num_drafts:
            drafter = make_mtp_drafter(loaded.mtp_layers, self.runner, num_drafts, self.parallel)
        self.runner.prefill_runner.keep_all_hidden = drafter is not None or count_experts
        # On a CPU without ranks to wait for a step takes what its thread computes: other work makes
        # now this one long, now that one.
        clock = (
            time.thread_time
            if loaded.device.type == "cpu" and self.parallel.size == homes == 1
            else time.perf_counter
        )
        self.speculation = Speculation(drafter, num_looked_up, measured=measure_steps, clock=clock)
        self.leader = Leader(self.parallel)
        self.grammars = Grammars(tokenizer.tokenizer, loaded.config.vocab_size, tokenizer.eos_ids)
        self.sampler = Sampler(
            loaded.config.vocab_size, loaded.device, lambda: self.tokenizer.eos_ids
        )
        self.while_computing: Callable[[list[Sequence]], None] = lambda brought: None
        """Done while the device computes a step, once or twice: handing out what the step before it
        brought, and earlier passes of this step, whose sequences it is given: answers do not wait
        for the prompts that are computed after them."""

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
        prefill_tokens: int | None = None,
        measure_steps: bool = False,
        num_drafts: int = 0,
        draft: Path | str | None = None,
        num_looked_up: int = 0,
        prefix_cache: bool = False,
        cache: str | None = None,
        tp: int = 1,
        dp: int = 1,
        collectives: str | None = None,
        count_experts: bool = False,
    ) -> "Engine":
        """Load a checkpoint directory.

        max_batch: requests computed together. max_model_len: longest prompt plus answer (None: what
        model and cache allow).
        cache_tokens: tokens the cache holds, over all requests (None: what max_batch full contexts
        need, within a share of the memory).
        prefill_tokens: prompt tokens of a step (None: `headroom.prefill_tokens`). measure_steps:
        whether it is measured, which takes some passes, how many of them a step computes beside
        running answers, where prefill_tokens is None, and whether in one pass with these
        (`budget.measure`): for servers, where each token is waited for. Then fewer are guessed
        where that is faster (`guessing.Guessing`).
        num_drafts: tokens that the checkpoint's MTP layer guesses a step (0: none); the answers are
        the same, `speculation` counts.
        draft: a checkpoint directory of a smaller model with the same tokens, or of a head of
        EAGLE-3, which guesses instead; up to 4 where num_drafts is 0.
        num_looked_up: tokens that are guessed from what prompt and answer said before, where the
        last three tokens stand there.
        prefix_cache: whether requests that begin alike share what is computed of that. cache: int8
        or fp8 keeps keys and values, or latents, in 8 bits; the model's 16 otherwise. tp: ranks
        that share the model; this process is rank 0 and starts the others on this machine, unless
        torchrun started them all: then each gets its rank's engine, and those above 0 are for
        `leader.follow` (`follower.lead_or_follow` does both). dp: ranks that answer requests of
        their own (homes.py) and share the routed experts alone; max_batch, cache_tokens and
        prefill_tokens are of all together. collectives: int8 or fp8 adds prompts over ranks in 8
        bits (`coded_sums`). count_experts: `expert_counter` counts what every token asks of the
        routed experts; decode steps are then not captured. Raises QuantkitError where something
        does not fit.
        """
        return cls.open(
            EngineOptions(
                Path(model_path),
                device=device,
                backend=backend,
                dtype=dtype,
                max_batch=max_batch,
                max_model_len=max_model_len,
                cache_tokens=cache_tokens,
                prefill_tokens=prefill_tokens,
                measure_steps=measure_steps,
                num_drafts=num_drafts,
                draft=None if draft is None else Path(draft),
                num_looked_up=num_looked_up,
                prefix_cache=prefix_cache,
                cache=cache,
                tp=tp,
                dp=dp,
                collectives=collectives,
                count_experts=count_experts,
            )
        )

    @classmethod
    def open(
        cls, options: EngineOptions, tell: Callable[[str], None] = lambda text: None
    ) -> "Engine":
        """As `load`. tell: takes a line for every stage that is behind it."""
        path, began = options.model_path, time.perf_counter()
        check_amounts(options)
        tokenizer = ChatTokenizer(path)
        check_defaults(tokenizer.sampling_defaults, path / "generation_config.json")
        if options.draft is not None:
            check_draft(options.draft, tokenizer)
        # Before others start, which would have to end; a rank that they started tells its fault to
        # those it has met.
        opened = (
            open_asked(options, tokenizer.eos_ids)
            if environment_rank(options.ranks) is None
            else None
        )
        parallel = join(options)
        try:
            opened = opened or open_asked(options, tokenizer.eos_ids)
            loaded = prepare(
                opened, *((parallel, SINGLE) if options.dp == 1 else (SINGLE, parallel))
            )
            tell(f"weights are there after {time.perf_counter() - began:.1f} s")
            check_finite_logits(loaded)
            draft = None if options.draft is None else load_draft(options.draft, loaded, options)
            plan = plan_kv_cache(loaded, options, draft)
            engine = cls(
                loaded,
                tokenizer,
                plan,
                max_batch=options.max_batch,
                prefill_tokens=options.prefill_tokens
                if options.prefill_tokens is not None
                else prefill_tokens(loaded, plan, draft),
                num_drafts=options.most_drafts,
                num_looked_up=options.num_looked_up,
                measure_steps=options.measure_steps,
                prefix_cache=options.prefix_cache,
                count_experts=options.count_experts,
                draft=draft,
            )
            if options.measure_steps:
                given, asked = engine.scheduler.budget, options.prefill_tokens is not None
                engine.scheduler.budget = measure(
                    engine.runner, parallel, given, options.max_batch, asked=asked
                )
                beside = engine.scheduler.budget.with_decodes
                tell(
                    f"steps are measured after {time.perf_counter() - began:.1f} s: {beside} "
                    "tokens of prompts beside answers"
                )
                warm_up_graphs(
                    engine.runner,
                    parallel,
                    options.max_batch * (1 + options.lookahead),
                    engine.max_model_len,
                )
            if options.count_experts:  # only now: measuring is nobody's text
                engine.expert_counter = ExpertCounter(loaded)
            return engine
        except Exception:
            parallel.close()
            raise

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> Iterator[Completion]:
        """Continue all prompts together; completions come as they finish, `index` is the prompt's
        place in the list.

        A prompt that cannot be continued for a fault of its own comes as a completion with that
        `fault`. Every prompt is checked before anything is computed. Closing the iterator early
        cancels what is unfinished.
        """
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

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Continue one prompt; its text comes as it is written. Raises what goes wrong with it."""
        sequence = self.submit(prompt, params)
        try:
            while sequence.finish_reason is None:
                self.step()
                if sequence.fault is not None:
                    raise sequence.fault
                text = sequence.take_text()
                if text or sequence.finish_reason:
                    yield Delta(text, sequence.completion() if sequence.finish_reason else None)
        finally:
            self.cancel(sequence)

    def submit(self, prompt: list[int], params: SamplingParams, index: int = 0) -> Sequence:
        """Queue a request whose text is streamed. Raises QuantkitError where it can never run."""
        sequence = self.sequence(prompt, params, index)
        self.add(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Queue a request made by `sequence`."""
        self.leader.add(sequence)
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """Stop a request and free its cache; nothing happens where it has finished."""
        if sequence.finish_reason is None:
            self.withdraw(sequence, reason)
            self.leader.cancel(sequence)

    def withdraw(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a request on this rank, whatever the others do."""
        self.scheduler.remove(sequence)
        sequence.finish(reason)

    def close(self) -> None:
        """End the other ranks; without any, nothing needs ending."""
        self.leader.dismiss()
        self.parallel.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Sequence]:
        """Compute one step for everybody who can run. Returns the sequences that got tokens or
        failed; finished ones are already removed.

        Raises where the device, or with tp > 1 the ranks' agreement, is lost.
        """
        if (wanted := self.speculation.choose()) is not None:
            self.leader.guess(*wanted)
        self.leader.step()
        advanced = self.compute_step()
        for sequence, fault in [(one, one.fault) for one in advanced if one.fault is not None]:
            self.cancel(sequence, "error")
            sequence.fail(fault)
        return advanced

    @torch.inference_mode()
    def compute_step(self) -> list[Sequence]:
        """The step of this rank: as `step`, but sequences with a fault that are not finished stay
        until rank 0 cancels them."""
        set_current_device(self.loaded.device)  # threads begin with the first one
        began, mixed = self.speculation.clock(), self.scheduler.budget.mixed
        # A chunk that ends no prompt is not waited for: behind the launched pass, it and a mixed
        # one would lie between two tokens.
        step = self.scheduler.schedule(decode_only=mixed and self.runner.has_async)
        rows = len(step.decode) + (
            sum([len(one.drafts) for one in step.decode]) if self._guesses else 0
        )
        accepted = self.speculation.acceptance.accepted
        advanced: list[Sequence] = []
        if not step.decode:
            self.runner.drop_async()
        for one in step.passes(mixed):
            advanced += self._pass(
                one, [sequence for sequence in advanced if sequence.fault is None]
            )
        if step.decode and not step.prefill:
            self.speculation.record_step(
                step.decode, rows, self.speculation.acceptance.accepted - accepted, began
            )
        for sequence in [one for one in advanced if one.finish_reason]:
            self.scheduler.remove(sequence)
        return advanced

    def _pass(self, step: ScheduledStep, brought: list[Sequence]) -> list[Sequence]:
        """One pass over what is scheduled. brought: by the step's earlier passes. Returns the
        sequences that got tokens or failed.

        Where it fails, each sequence has a pass of its own: those that fail again are finished for
        that.
        """
        began, cached = (
            time.perf_counter(),
            {sequence: sequence.num_cached for sequence, _ in step.prefill},
        )
        try:
            if step.prefill:
                self.while_computing([])  # a prompt may take the host as long as the device
            joint = (
                DpStep(step, self.parallel)
                if isinstance(self.scheduler, DataParallelScheduler)
                else None
            )
            computed = (
                self._compute(step) if joint is None else joint.compute(self.sampler, self.runner)
            )
            return self._finish_pass(computed, joint, brought)
        except Exception as fault:
            self.runner.drop_async()
            check_usable(self.loaded.device, fault, alone=self.leader.alone)
            done: list[Sequence] = []
            alone = step.per_sequence()
            for sequence, own in alone:
                if sequence.last_token >= began:  # it had its token when the pass failed
                    done.append(sequence)
                    continue
                sequence.num_cached = cached.get(sequence, sequence.num_cached)
                if len(alone) > 1:
                    done += self._pass(own, brought)
                else:
                    sequence.fail(fault)
                    done.append(sequence)
            return done

    def _compute(self, step: ScheduledStep) -> ForwardPass:
        self.sampler.prepare(step)
        if not step.prefill:
            return self.runner.decode(step.decode)
        return (
            self.runner.mixed(step.decode, step.prefill)
            if step.decode
            else self.runner.prefill(step.prefill)
        )

    def _finish_pass(
        self, done: ForwardPass, joint: DpStep | None, brought: list[Sequence]
    ) -> list[Sequence]:
        """Choose the successors, guess behind them, append what the ranks agree on, and guess on.
        Returns the sequences that got tokens."""
        score_prompts(done, self.runner.model)
        chosen = self.sampler.choose(done, self.runner.draw) if done.counts else None
        guessed = self.speculation.begin(done, chosen)
        coming = None
        if chosen is not None and joint is None:
            both = None if guessed is None else torch.cat((chosen.token_ids, guessed))
            coming = HostCopy(chosen.token_ids if both is None else both)
            # Before others are listened to, who may add requests on this rank alone.
            if (
                self.runner.can_launch_async
                and done.is_read_once
                and self.scheduler.decodes_again(done.counts)
            ):
                self.speculation.launch_async_decode(self.runner, self.parallel, done, chosen, both)
        self.while_computing(brought)
        advanced, guesses = [sequence for sequence, _ in done.counts], list[int]()
        if joint is not None:
            advanced += self._append_all(
                done, joint, done.hidden.new_empty(0) if chosen is None else chosen.token_ids
            )
        elif coming is not None:  # here the host waits for the device, once for tokens and guesses
            agreed, number = self.parallel.agree(coming), len(done.rows)
            guesses = agreed[number:]
            self._append(done, agreed[:number])
        self.speculation.finish(done, advanced, guesses)
        return advanced

    def _append_all(self, done: ForwardPass, joint: DpStep, chosen: Tensor) -> list[Sequence]:
        """Every rank's tokens go to its sequences, here too. Returns those of other ranks."""
        token_ids, elsewhere = joint.share(chosen)
        if token_ids:
            self._append(done, token_ids)
        for sequence, tokens in elsewhere:
            self._keep(sequence, tokens, time.perf_counter())
        joint.report()
        return [sequence for sequence, _ in elsewhere]

    def _append(self, done: ForwardPass, token_ids: list[int]) -> None:
        """The rows' tokens go to their sequences, which keep them as long as their drafts were
        right."""
        assert done.logits is not None, done.counts
        now, row = time.perf_counter(), 0
        logprobs = row_logprobs(done.counts, done.logits, token_ids)
        if not logprobs and len(token_ids) == len(done.counts):  # nobody had a draft
            for (sequence, _), token_id in zip(done.counts, token_ids):
                sequence.follow(token_id, now)
            return
        for sequence, count in done.counts:
            kept = self._keep(sequence, token_ids[row : row + count], now)
            if logprobs and sequence.params.logprobs is not None:
                sequence.logprobs += logprobs[row : row + kept]
                check_not_nan(sequence, logprobs[row : row + kept])
            row += count

    def _keep(self, sequence: Sequence, token_ids: list[int], now: float) -> int:
        """Tokens of one sequence, as long as its drafts were right. Returns how many."""
        kept = sequence.extend(token_ids, now)
        if len(token_ids) > 1:
            self.speculation.record_acceptance(sequence, len(token_ids) - 1, kept - 1)
        return kept

    def sequence(
        self, prompt: list[int], params: SamplingParams, index: int = 0, *, streams: bool = True
    ) -> Sequence:
        """A request that is checked and not yet queued; touches nothing that `step` does, so any
        thread may call it."""
        check_request(prompt, params, self.max_model_len, self.loaded.config.vocab_size)
        guide = (
            None
            if params.grammar is None
            else self.grammars.guide(params.grammar, params.grammar_after)
        )
        return Sequence(
            index, prompt, params, self.tokenizer, self.max_model_len, streams=streams, guide=guide
        )
