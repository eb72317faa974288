"""Judge: lm-evaluation-harness scores log-likelihoods through `quantkit serve`, and each is held
against a pass in this process.

    python tests/judges/lm_eval_loglikelihood.py --lm-eval .venv-lm-eval/bin/lm_eval        (`make test-lm-eval`)

lm-eval's local-completions sends prompts with echo and logprobs, and picks the continuation's
tokens out of the answer. Its tasks here are of its own kinds: loglikelihood of a continuation,
rolling loglikelihood of a document. In this process the model reads each text whole, without cache,
batches or server. Every log-likelihood must agree, and so must what lm-eval takes for greedy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from serving import serve

from quantkit.checkpoint.hub import find_model
from quantkit.evaluation.distance.tracing import TracedModel
from quantkit.executor.weights.load import load_model
from quantkit.tokenizer.chat import ChatTokenizer

MODEL = "tiny-r1"
PROBLEMS = 12
TOLERANCE, SHARE = 0.02, 0.005
"""Nats a token, and of its log-likelihood: sums go in another order, and their results have 16
bits. Of these answers, at -30 to -100 nats, both ways are up to 0.4 nats from float32, and 0.2 from
each other. Wrong places differ by nats."""


def rows():
    """Word problems of the model's own kind, cut in half."""
    text = (Path(__file__).parents[2] / "eval/data/tiny-heldout.jsonl").read_text()
    for document in map(json.loads, text.splitlines()[:PROBLEMS]):
        said = document.get("text") or " ".join(one["content"] for one in document["messages"])
        words = said.split(" ")
        first, second = words[: len(words) // 2], words[len(words) // 2 :]
        yield {"text": said, "first": " ".join(first), "second": " ".join(["", *second])}


def write_tasks(folder):
    """Their names."""
    data = {"data_files": {"test": str(folder / "rows.jsonl")}}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    for kind, text, target, metric, aggregation in (
        ("loglikelihood", "{{first}}", "{{second}}", "acc", "mean"),
        ("loglikelihood_rolling", "", "{{text}}", "word_perplexity", "weighted_perplexity"),
    ):
        about = {
            "task": f"q_{kind}",
            "output_type": kind,
            "dataset_path": "json",
            "dataset_kwargs": data,
            "test_split": "test",
            "doc_to_text": text,
            "doc_to_target": target,
            "metric_list": [{"metric": metric, "aggregation": aggregation}],
            "metadata": {"version": 1},
        }
        (folder / f"q_{kind}.yaml").write_text(yaml.safe_dump(about))
        yield f"q_{kind}"


def lm_eval(program, url, folder, tasks):
    """Its samples."""
    arguments = f"model={MODEL},base_url={url}/completions,tokenizer={find_model(MODEL)},num_concurrent=2,max_length=1000"
    words = f"--model local-completions --tasks {','.join(tasks)} --include_path {folder}"
    words += f" --log_samples --output_path {folder}/out --model_args"
    command = [program, *words.split(), arguments]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    subprocess.run(command, check=True, env={**os.environ, **offline}, timeout=900)
    files = sorted((folder / "out").rglob("samples_*.jsonl"))
    assert len(files) == len(tasks), files
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class InProcess:
    """The same model, one text a pass."""

    def __init__(self):
        path = find_model(MODEL)
        self.tokenizer = ChatTokenizer(path)
        self.model = TracedModel(load_model(path, device="cpu"))

    @torch.inference_mode()
    def score(self, context, continuation):
        """Log-likelihood of the continuation, whether every token of it is the likeliest, and how
        many they are.

        Where nothing stands before it lm-eval puts the token that begins a text, also before one
        that has it already.
        """
        encoder = self.tokenizer
        if context:
            first, ids = len(encoder.encode(context)), encoder.encode(context + continuation)
        else:
            begin = encoder.tokenizer.token_to_id(encoder.bos)
            first, ids = 1, [begin, *encoder.encode_rendered(continuation)]
        final = self.model([torch.tensor(ids)]).final
        logits = self.model.loaded.model.logits(final)[first - 1 : -1].float()
        chosen = torch.tensor(ids[first:])
        scores = logits.log_softmax(-1).gather(1, chosen[:, None])
        return float(scores.sum()), bool((logits.argmax(-1) == chosen).all()), len(chosen)


def differences(samples, peer):
    """Of each log-likelihood: by how much it differs a token, and what is wrong, or nothing."""
    for sample in samples:
        asked = sample["arguments"]
        asked = asked.values() if isinstance(asked, dict) else asked
        for request, reply in zip(asked, sample["resps"]):
            values = list(request.values()) if isinstance(request, dict) else list(request)
            said = reply[0] if isinstance(reply[0], list) else reply
            context, continuation = values[:2] if len(values) > 1 else ("", values[0])
            expected, greedy, length = peer.score(context, continuation)
            apart = abs(float(said[0]) - expected)
            far = apart > TOLERANCE * length + SHARE * abs(expected)
            other = len(said) > 1 and str(said[1]) != str(greedy)
            told = f"{context[-60:]!r} {continuation[:60]!r} {said} {expected} {greedy}"
            yield apart / length, told if far or other else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lm-eval", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tasks = list(write_tasks(folder))
        with serve(MODEL, MODEL) as url:
            samples = lm_eval(options.lm_eval, url, folder, tasks)
    found = list(differences(samples, InProcess()))
    wrong = [told for _, told in found if told]
    print(f"{len(found)} log-likelihoods, at most {max(found)[0]:.6f} a token apart")
    for line in wrong[:20]:
        print("WRONG", line)
    sys.exit(1 if wrong or len(found) < 2 * PROBLEMS else 0)


if __name__ == "__main__":
    main()
