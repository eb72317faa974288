"""Options of `quantkit bench` beyond those of the engine."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.common.options import option
from quantkit.evaluation.options import ServerModelOptions, seed_option


@dataclass(frozen=True)
class BenchOptions(ServerModelOptions):
    """Lists are comma-separated."""

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
