"""Judge: lm-evaluation-harness scores log-likelihoods through `quantkit serve`, and each is held
against a pass in this process.

    python tests/judges/lm_eval_loglikelihood.py --lm-eval .venv-lm-eval/bin/lm_eval        (`make test-lm-eval`)

lm-eval's local-completions sends prompts with echo and logprobs, and picks the continuation's
tokens out of the answer. Its tasks here are
of its own kinds: multiple choice, loglikelihood of a continuation, rolling loglikelihood of a
document. In this process the model reads each text whole, without cache, batches or server. Every
log-likelihood must agree, and so must what lm-eval takes for greedy.
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
    """Word problems of the model's own kind, with four answers."""
    text = (Path(__file__).parents[2] / "eval/data/tiny-heldout.jsonl").read_text()
    documents = [json.loads(line) for line in text.splitlines()][:PROBLEMS]
    found = []
    for number, document in enumerate(documents):
        shown = document.get("text") or " ".join(
            message["content"] for message in document["messages"]
        )
        words = shown.split(" ")
        half = len(words) // 2
        choices = [" ".join(words[half : half + 3]), "a b c", "the answer is", str(number)]
        found.append(
            {
                "context": " ".join(words[:half]),
                "continuation": " " + " ".join(words[half:]),
                "choices": choices,
                "text": shown,
            }
        )
    return found


def task(name, kind, folder, **fields):
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }
    return {"task": name, "output_type": kind, **data, **fields}


def write_tasks(folder):
    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    perplexity = [
        {
            "metric": "word_perplexity",
            "aggregation": "weighted_perplexity",
            "higher_is_better": False,
        }
    ]
    tasks = [
        task(
            "q_choice",
            "multiple_choice",
            folder,
            doc_to_text="{{context}}",
            doc_to_target=0,
            doc_to_choice="{{choices}}",
            metric_list=accuracy,
        ),
        task(
            "q_likely",
            "loglikelihood",
            folder,
            doc_to_text="{{context}}",
            doc_to_target="{{continuation}}",
            metric_list=accuracy,
        ),
        task(
            "q_rolling",
            "loglikelihood_rolling",
            folder,
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=perplexity,
        ),
    ]
    for one in tasks:
        (folder / f"{one['task']}.yaml").write_text(
            yaml.safe_dump({**one, "metadata": {"version": 1}})
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return [one["task"] for one in tasks]


def lm_eval(program, url, folder, tasks):
    """Its samples."""
    arguments = f"model={MODEL},base_url={url}/completions,tokenizer={find_model(MODEL)},num_concurrent=2,max_length=1000"
    command = [
        program,
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        ",".join(tasks),
        "--include_path",
        str(folder),
    ]
    command += ["--log_samples", "--output_path", str(folder / "out")]
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
        self.tokenizer, self.model = (
            ChatTokenizer(path),
            TracedModel(load_model(path, device="cpu")),
        )

    @torch.inference_mode()
    def score(self, context, continuation):
        """Log-likelihood of the continuation, whether every token of it is the likeliest, and how
        many they are.

        Where nothing stands before it lm-eval puts the token that begins a text, also before one
        that has it already.
        """
        begin = (
            self.tokenizer.encode(context)
            if context
            else [self.tokenizer.tokenizer.token_to_id(self.tokenizer.bos)]
        )
        ids = (
            self.tokenizer.encode(context + continuation)
            if context
            else begin + self.tokenizer.encode_rendered(continuation)
        )
        first = len(begin)
        logits = self.model.loaded.model.logits(self.model([torch.tensor(ids)]).final)[
            first - 1 : -1
        ].float()
        chosen = torch.tensor(ids[first:])
        scores = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        return float(scores.sum()), bool((logits.argmax(-1) == chosen).all()), len(chosen)


def differences(samples, peer):
    """Log-likelihoods, tokens, the largest difference a token, and what is wrong."""
    count = tokens = 0
    worst, wrong = 0.0, []
    for sample in samples:
        for request, reply in zip(
            sample["arguments"].values()
            if isinstance(sample["arguments"], dict)
            else sample["arguments"],
            sample["resps"],
        ):
            values = list(request.values()) if isinstance(request, dict) else list(request)
            said = reply[0] if isinstance(reply[0], list) else reply
            context, continuation = (values[0], values[1]) if len(values) > 1 else ("", values[0])
            expected, greedy, length = peer.score(context, continuation)
            count, tokens = count + 1, tokens + length
            difference = abs(float(said[0]) - expected)
            worst = max(worst, difference / length)
            if difference > TOLERANCE * length + SHARE * abs(expected) or (
                len(said) > 1 and str(said[1]) != str(greedy)
            ):
                wrong.append(
                    json.dumps(
                        {
                            "context": context[-60:],
                            "continuation": continuation[:60],
                            "lm-eval": said,
                            "ours": [expected, greedy],
                        }
                    )
                )
    return count, tokens, worst, wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lm-eval", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tasks = write_tasks(folder)
        with serve(MODEL, MODEL) as url:
            samples = lm_eval(options.lm_eval, url, folder, tasks)
    count, tokens, worst, wrong = differences(samples, InProcess())
    print(
        json.dumps(
            {
                "loglikelihoods": count,
                "tokens": tokens,
                "largest_difference_per_token": round(worst, 6),
                "wrong": len(wrong),
            }
        )
    )
    for line in wrong[:20]:
        print("WRONG", line)
    sys.exit(1 if wrong or count < 4 * PROBLEMS else 0)


if __name__ == "__main__":
    main()
