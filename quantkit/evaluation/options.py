"""Options of `eval`, `regrade`, `ppl` and `bench`, and of the Python functions `evaluate` and
`perplexity`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.common.options import option
from quantkit.common.result import JsonObject
from quantkit.executor.options import ModelOptions


def seed_option() -> Any:
    return option(0, "Random seed; the same seed draws the same.")


@dataclass(frozen=True)
class ServerModelOptions:
    """Access to an OpenAI-compatible server."""

    served_model: str | None = option(
        None, "The server's name for the model; the server is asked by default."
    )
    api_key: str | None = option(None, "API key of the server.")


@dataclass(frozen=True)
class GradingOptions:
    """How replies are graded and compared with a baseline."""

    margin: float = option(0.01, "Loss that counts as lost, as a share.")
    allow_code_exec: bool = option(False, "Run programs that the model wrote, in the sandbox.")
    allow_weak_sandbox: bool = option(
        False, "Run them even where only resource limits contain them."
    )
    format: str | None = option(None, "Also write the results as: evalscope.", "--format")
    judge: str | None = option(None, "Server whose model judges what no rule can (simpleqa).")
    judge_model: str | None = option(None, "That server's name for the model.")
    judge_key: str | None = option(None, "API key of that server.")


@dataclass(frozen=True)
class RegradeOptions(GradingOptions):
    """Options of `quantkit regrade`."""

    data_dir: Path | None = option(None, "Folder with the tasks' data files, if it has moved.")
    baseline: Path | None = option(None, "The --out folder of another run, to compare with.")


@dataclass(frozen=True)
class EvaluateOptions(GradingOptions, ServerModelOptions, ModelOptions):
    """Options of `evaluate`."""

    data_dir: Path | None = option(None, "Folder with the tasks' data files.")
    limit: int | None = option(None, "Problems of each task, over all its subjects.", min=1)
    repeats: int | None = option(
        None, "Replies per problem; the task's own number by default.", min=1
    )
    protocol: str | None = option(
        None, "r1, r1-0528, report, evalscope, evalscope-1.0.1 or lm-eval."
    )
    baseline: str | Path | None = option(
        None, "A model, or the --out folder of an earlier run, to compare with."
    )
    out: Path | None = option(
        None, "Folder for results, samples and the report; an interrupted run resumes there."
    )
    max_tokens: int | None = option(
        None, "Longest reply, tokens; the protocol's by default.", min=1
    )
    temperature: float | None = option(None, "0 is greedy; the protocol's by default.", min=0)
    top_p: float | None = option(None, "Nucleus sampling; the protocol's by default.", min=0, max=1)
    seed: int = seed_option()
    concurrency: int = option(64, "Requests in flight, or prompts in a batch.", min=1)
    sequential: bool = option(
        False,
        "Ask in stages, where answers vary, and stop when the verdict on these problems is known; "
        "needs --baseline and --out.",
    )
    token_budget: int | None = option(
        None, "Say before the run which loss this many tokens can detect.", min=1
    )
    model_revision: str | None = option(
        None, "What the server runs, if it does not say so: a revision, a hash."
    )
    timeout: float = option(
        600.0, "Longest wait for the next piece of a server's reply, seconds.", min=0.1
    )
    retries: int = option(5, "Further attempts of a request that failed temporarily.", min=0)
    extra_body: str | None = option(
        None,
        "Fields of every request to a server, as JSON; null leaves one out, as in "
        '{"top_k": 20, "stream_options": null}.',
        metavar="JSON",
    )
    chat_template_kwargs: str | None = option(
        None,
        'Variables of the server\'s chat template, as JSON, as in {"enable_thinking": false}.',
        metavar="JSON",
    )
    reasoning_effort: str | None = option(None, "Sent to the server: low, medium or high.")
    no_seed: bool = option(False, "Send no seed, for a server that refuses it.")
    trust_kept: bool = option(
        False, "Reuse stored replies without checking that it is still the same model."
    )
    count_experts: Path | None = option(
        None,
        "Write how many tokens were routed to each expert, for `quantkit place`.",
        metavar="FILE",
    )

    @property
    def generation(self) -> JsonObject:
        """Sampling parameters that replace the protocol's."""
        given = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def request_fields(self) -> JsonObject:
        """Fields that every request to a server gets; None leaves one out. Raises QuantkitError for
        what is no JSON object."""
        fields: JsonObject = {"seed": None} if self.no_seed else {}
        if self.reasoning_effort is not None:
            fields["reasoning_effort"] = self.reasoning_effort
        if self.chat_template_kwargs is not None:
            given = _json_object("--chat-template-kwargs", self.chat_template_kwargs)
            fields["chat_template_kwargs"] = given
        if self.extra_body is not None:
            fields |= _json_object("--extra-body", self.extra_body)
        return fields


def _json_object(flag: str, text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise QuantkitError(
            f"{flag} {text!r} is no JSON object", f"give {flag} '{{\"name\": value}}'"
        )
    return value


@dataclass(frozen=True)
class PerplexityOptions(ServerModelOptions, ModelOptions):
    """Options of `perplexity`."""

    baseline: str | Path | None = option(
        None,
        "The source model: adds KL divergence and agreement at the scored tokens, and the error "
        "per layer.",
    )
    seq_len: int = option(2048, "Longest document, tokens; longer ones are cut into pieces.", min=2)
    stride: int | None = option(
        None,
        "Distance of sliding windows of --seq-len tokens over whole documents; each scores its new "
        "tokens.",
        min=1,
    )
    sampled: str | None = option(
        None,
        "Instead of a text: a task on whose prompts the baseline, or the server, samples reasoning.",
    )
    data_dir: Path | None = option(None, "Folder with that task's data files.")
    max_tokens: int | None = option(None, "Longest sampled reply, tokens.", min=1)
    seed: int = seed_option()
    limit: int | None = option(
        None, "Only the first documents, pieces of --seq-len of a .txt, replies or problems.", min=1
    )
    out: Path | None = option(None, "Folder for ppl.json and ppl.html.")
    count_experts: Path | None = option(
        None,
        "Write how many tokens were routed to each expert, for `quantkit place`.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class BenchOptions(ServerModelOptions):
    """Options of `quantkit bench` beyond those of the engine. Lists are comma-separated."""

    input_len: str = option("128,1024", "Prompt tokens, comma-separated.")
    concurrency: str = option("1,8", "Concurrent requests, comma-separated.")
    output_len: int = option(512, "Tokens of every reply.", min=1)
    requests: int = option(2, "Measured requests per concurrent slot.", min=1)
    num_prompts: int | None = option(
        None,
        "Measured requests of a cell in total, instead of --requests; 100 with --request-rate.",
        min=1,
    )
    request_rate: str | None = option(
        None,
        "Requests/s of Poisson arrivals, comma-separated; --concurrency is then the upper limit.",
    )
    goodput: str | None = option(
        None,
        "Limits in ms, such as ttft:200,tpot:30,e2el:5000: adds the requests/s that meet all.",
    )
    prompts: Path | None = option(
        None,
        "Prompts instead of random ones: .jsonl, .txt, or .json like ShareGPT's; replies end at "
        "the end-of-sequence token.",
    )
    warmup: int = option(1, "Requests per slot before each cell that are not measured.", min=0)
    seed: int = seed_option()
    out: Path | None = option(None, "Folder for bench.json and bench.html.")
