"""Examples at the end of `quantkit COMMAND --help`: they run as they are, or with your own model
and files in place of the capitals."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "go": (
        "quantkit go tiny-r1 --devices cpu",
        "quantkit go deepseek-ai/DeepSeek-R1 --devices 8x910B1 --out R1",
        "quantkit go MODEL --devices 1xH100 --calibration text.jsonl --score --yes",
    ),
    "quantize": (
        "quantkit quantize tiny-r1 --scheme awq-w4a16 --out out/awq",
        "quantkit quantize MODEL --scheme awq-w4a16 --engine vllm --out out/awq",
        "quantkit quantize MODEL --scheme awq-w4a16 --calibration chats.jsonl",
        "quantkit quantize MODEL --scheme rtn-w4a16 --memory 16GiB",
    ),
    "plan": (
        "quantkit plan tiny-r1 --scheme awq-w4a16 --devices 1x24GiB",
        "quantkit plan deepseek-ai/DeepSeek-R1 --scheme awq-w4a16 --devices 8x64GiB",
        "quantkit plan MODEL --scheme int8-a8w8c16 --devices 8x910B1 --json",
        "quantkit plan MODEL --bits 8 --engine vllm-ascend --layout four-boxes",
    ),
    "convert": (
        "quantkit convert out/awq out/ct --format compressed-tensors",
        "quantkit convert deepseek-ai/DeepSeek-R1 R1-bf16 --dtype bf16",
    ),
    "inspect": (
        "quantkit inspect tiny-r1",
        "quantkit inspect out/awq --engine vllm",
    ),
    "check": (
        "quantkit check tiny-r1",
        "quantkit check out/awq --source tiny-r1 --report check.html",
        "quantkit check org/model --engine vllm --json",
        "quantkit check MODEL --source SRC --repair OUT",
    ),
    "run": (
        'quantkit run tiny-r1 --prompt "What is 12 * 12?"',
        "quantkit run out/awq",
        'quantkit run BASE-MODEL --raw --prompt "Once upon a time"',
    ),
    "eval": (
        "quantkit eval out/awq --tasks tiny-math --limit 50 --baseline tiny-r1",
        "quantkit eval http://127.0.0.1:8000 --tasks gsm8k --out results/awq",
        "quantkit eval out/awq --tasks tiny-math-2000 --plan --accuracy 0.95",
    ),
    "regrade": (
        "quantkit regrade results/awq",
        "quantkit regrade results/awq --baseline results/source --data-dir DATA",
    ),
    "compare": (
        "quantkit compare results/source results/awq",
        "quantkit compare results/source results/awq results/fp4 --out results/page",
    ),
    "ppl": (
        "quantkit ppl out/awq --text text.jsonl --baseline tiny-r1",
        "quantkit ppl tiny-r1 --text eval/data/tiny-heldout.jsonl --limit 20",
        "quantkit ppl http://127.0.0.1:8000 --sampled tiny-math --baseline tiny-r1",
    ),
    "bench": (
        "quantkit bench out/awq --input-len 128,1024 --concurrency 1,8",
        "quantkit bench http://127.0.0.1:8000 --out speed",
    ),
    "needle": (
        "quantkit needle tiny-r1 --out data/needle/test.jsonl --lengths 4k",
        "quantkit needle MODEL --out data/needle/test.jsonl --lengths 4k,16k,60k",
    ),
    "serve": (
        "quantkit serve out/awq",
        "quantkit serve out/awq --port 9000 --max-model-len 8192",
        "quantkit serve MODEL --tool-parser hermes --log-requests",
        "quantkit serve Qwen3-32B-AWQ --draft Qwen3-0.6B --prefix-cache",
    ),
    "playground": (
        "quantkit playground tiny-r1",
        "quantkit playground tiny-r1 out/awq --port 9001",
    ),
    "kernels": (
        "quantkit kernels",
        "quantkit kernels --check --device cpu",
    ),
    "place": (
        "quantkit place MODEL --counts c.json --devices 32 --engine sglang",
        "quantkit place MODEL --counts c.json --devices 8x64GiB --engine vllm-ascend",
    ),
    "deploy": (
        "quantkit deploy out/awq --engine vllm --devices 4",
        "quantkit deploy out/awq --engine vllm --devices 2x80GiB",
        "quantkit deploy out/awq --engine vllm-ascend --boxes 2 --context 32768",
        "quantkit deploy out/awq --engine vllm --layout four-boxes --draft-length 1",
        "quantkit deploy out/awq --engine vllm --boxes 2 --format slurm",
    ),
}


def epilog(command: str) -> str:
    """The examples of a command, one per line, as Typer prints them; empty if it has none."""
    return "\n".join(["Examples:", *EXAMPLES[command]]) if command in EXAMPLES else ""
