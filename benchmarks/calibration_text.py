"""Is the calibration text that ships with quantkit as good as a model's own? Two small models are
trained here, on text of this machine.

    python benchmarks/calibration_text.py train DIR [--minutes 12]       DIR/dense and DIR/experts, DIR/own.jsonl, DIR/held-out.jsonl
    python benchmarks/calibration_text.py compare DIR [--models dense,experts,tiny-r1] [--schemes
    awq-w4a16,int8-a8w8c16] [--seeds 3]
                                                                         KL on held-out own text,
                                                                         calibrated on own text and
                                                                         on ours

Own text is what a Python installation has: docstrings of its packages and the sources of its
standard library, in files of which some are held out. The models are a Qwen3 and a Qwen3-MoE of 5
to 7 million parameters, without a chat template. Both calibrations see as many sequences of as many
tokens, with the same seeds. A ratio is the KL with our text by the KL with own text.
"""

import argparse
import ast
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quantkit.common.assets import asset, builtin_model, calibration_text

VOCABULARY = 4096
LENGTH, BATCH = 256, 16
PACKAGES = (
    "sympy",
    "matplotlib",
    "torch",
    "numpy",
    "pydantic",
    "transformers",
    "rich",
    "pandas",
    "networkx",
)


def docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, RecursionError):
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and (text := ast.get_docstring(node))
            and len(text) > 300
        ):
            yield text


def own_text(rng: random.Random) -> list[str]:
    """Documents of at least 1,200 characters: prose of docstrings, a file's together, and source
    files."""
    site, library = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    prose = [
        path
        for name in PACKAGES
        for path in sorted((site / name).rglob("*.py"))
        if "test" not in path.name
    ]
    sources = [
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests"} & set(path.parts)
    ]
    rng.shuffle(prose)
    documents = ["\n\n".join(docstrings(path)) for path in prose[:4000]]
    documents += [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
    pieces = [
        document[at : at + 12_000]
        for document in documents
        for at in range(0, min(len(document), 60_000), 12_000)
    ]
    kept = [piece for piece in pieces if len(piece) >= 1200]
    rng.shuffle(kept)
    return kept


def make_tokenizer(documents: list[str], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator((document[:6000] for document in documents[:3000]), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def make_model(kind: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shared, num_hidden_layers=4, intermediate_size=768))
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "intermediate_size": 768,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shared, **experts, num_hidden_layers=3, norm_topk_prob=True, output_router_logits=True
        )
    )


def train(folder: Path, minutes: float) -> None:
    rng = random.Random(0)
    documents = own_text(rng)
    held_out, own = documents[:64], documents[64:]
    tokenizer = make_tokenizer(own, folder / "dense")
    for name, part in (("held-out", held_out), ("own", own[:528])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
    tokens = torch.tensor(
        [token for one in tokenizer.encode_batch_fast(own[528:8000]) for token in [*one.ids, 0]]
    )
    print(f"{len(documents)} documents, {len(tokens):,} tokens to train on", flush=True)
    for kind in ("dense", "experts"):
        torch.manual_seed(0)
        model = make_model(kind)
        fit(model, tokens, minutes * 60)
        model.to(torch.bfloat16).save_pretrained(folder / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / kind / name).write_bytes((folder / "dense" / name).read_bytes())


def fit(model: Any, tokens: torch.Tensor, seconds: float) -> None:
    """AdamW, the rate falling to nothing as the time runs out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start, step, mean = time.process_time(), 0, 0.0
    while (share := (time.process_time() - start) / seconds) < 1:
        rate = 3e-3 * min(1, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([tokens[one : one + LENGTH] for one in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, mean = step + 1, 0.95 * mean + 0.05 * loss.item()
        if step % 50 == 0:
            print(f"step {step}: loss {mean / (1 - 0.95**step):.3f}", flush=True)


def compare(folder: Path, kinds: list[str], schemes: list[str], seeds: int, **sizes: int) -> None:
    """A line for each model, scheme and seed: KL calibrated on own text, on ours, and their
    ratio."""
    from quantkit import perplexity, quantize

    for kind in kinds:
        model, own, judged = (folder / kind, folder / "own.jsonl", folder / "held-out.jsonl")
        if kind == "tiny-r1":
            model, own, judged = (
                Path(kind),
                builtin_model(kind) / "calibration.jsonl",
                asset("eval", "data", "tiny-heldout.jsonl"),
            )
        for scheme in schemes:
            for seed in range(seeds):
                row: dict[str, Any] = {"model": kind, "scheme": scheme, "seed": seed}
                for name, text in (("own", own), ("ours", calibration_text())):
                    out = folder / "out" / f"{kind}-{scheme}-{name}-{seed}"
                    quantize(
                        str(model),
                        out,
                        scheme,
                        calibration=text,
                        seed=seed,
                        device="cpu",
                        overwrite=True,
                        **sizes,
                    )
                    row[name] = perplexity(
                        out, judged, baseline=str(model), seq_len=512, limit=64
                    ).kl
                print(json.dumps(row | {"ratio": round(row["ours"] / row["own"], 3)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12, help="processor time for each model")
    parser.add_argument("--models", default="dense,experts,tiny-r1")
    parser.add_argument("--schemes", default="awq-w4a16,int8-a8w8c16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    given = parser.parse_args()
    if given.what == "train":
        train(given.folder, given.minutes)
    else:
        compare(
            given.folder,
            given.models.split(","),
            given.schemes.split(","),
            given.seeds,
            samples=given.samples,
            seq_len=given.seq_len,
        )


if __name__ == "__main__":
    main()
