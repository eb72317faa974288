"""Models that judge a quantization, trained on a GPU in two minutes: needs torch, transformers,
safetensors and numpy alone.

    python benchmarks/judge_text.py DIR ...                                        first, for DIR/tokens.bin and DIR/tokenizer.json
    python benchmarks/judge_models.py train DIR --model deepseek|dense|experts --out OUT.safetensors [--seconds 110]
    python benchmarks/judge_models.py build DIR OUT.safetensors --model ...        DIR/MODEL, a checkpoint in BF16

deepseek: DeepSeek-V3 with latent attention, a dense layer, 16 routed experts in 4 groups and a
shared one, its router balanced by biases
alone. dense: Qwen3. experts: Qwen3-MoE of 16 experts. Each has 30 to 32 million parameters and is
trained in the ordinary way: nothing is rescaled, and the rate falls to nothing as the time runs
out. transformers' own modules compute; only their norms and experts run as fewer, wider kernels.

    python benchmarks/judge_models.py blur DIR MODEL        DIR/MODEL-blurred

of a model whose weights were read from blocks of 32 4-bit codes (`make real`): uniform noise of half
a step, so that no method finds the codes again.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH, SEED = 512, 22
AUX_WEIGHT, BIAS_STEP = 0.01, 1e-3
"""Of Qwen3-MoE's balancing loss; by how much a step moves a bias of DeepSeek-V3's router."""
SHARED: dict[str, Any] = {
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": {
        "model_type": "deepseek_v3",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "dense": {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}


def make_model(kind: str) -> Any:
    fields = SHARED | MODELS[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


# --- fewer kernels
# ---------------------------------------------------------------------------------------------------------


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """The module's function as one kernel, in the dtype that linears read."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        normed = F.rms_norm(
            hidden_states,
            self.weight.shape,
            self.weight.to(hidden_states.dtype),
            self.variance_epsilon,
        )
    return normed.to(torch.bfloat16) if hidden_states.is_cuda else normed


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Every expert computed, its hidden units weighted, zero where it is not chosen: four times the
    arithmetic and no gather."""
    count, width, hidden = *self.gate_up_proj.shape[:2], self.down_proj.shape[1]
    shares = torch.zeros(
        len(hidden_states), count, dtype=torch.float32, device=hidden_states.device
    )
    shares = shares.scatter(1, top_k_index, top_k_weights.float())
    gate, up = (
        F.linear(hidden_states, self.gate_up_proj.flatten(0, 1))
        .unflatten(-1, (count, width))
        .chunk(2, dim=-1)
    )
    inner = F.silu(gate) * up * shares.unsqueeze(-1).to(gate.dtype)
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(hidden, -1))


def in_float32(route: Callable[..., Any]) -> Callable[..., Any]:
    """A router's function in float32, as DeepSeek-V3 has it, under autocast too."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return route(self, hidden_states.float())

    return forward


def quicken(model: nn.Module) -> None:
    for kind in {type(module) for module in model.modules()}:
        if kind.__name__.endswith("RMSNorm"):
            kind.forward = norm_forward
        elif kind.__name__.endswith("Experts"):
            kind.forward = experts_forward
        elif kind.__name__.endswith("Router"):
            kind.forward = in_float32(kind.forward)


# --- training
# --------------------------------------------------------------------------------------------------------------


class Routers:
    """What the model's routers chose in the last pass, and how they are kept even."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[tuple[Any, Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(
                    lambda router, _, out: self.found.append((router, out[0], out[2]))
                )

    def loads(self) -> list[Tensor]:
        """Share of the choices that fell on each expert, [E] a layer."""
        return [
            F.one_hot(chosen, logits.shape[-1]).float().mean((0, 1))
            for _, logits, chosen in self.found
        ]

    def loss(self) -> Tensor | float:
        """Switch's balancing loss, where a router has no biases of its own."""
        pairs = zip(self.found, self.loads(), strict=True)
        terms = [
            len(load) * (load * logits.float().softmax(-1).mean(0)).sum()
            for (router, logits, _), load in pairs
            if not biased(router)
        ]
        return AUX_WEIGHT * torch.stack(terms).sum() if terms else 0.0

    @torch.no_grad()
    def level(self, share: float) -> None:
        """Move biases towards experts that were asked too little; share: how far the training
        is."""
        for (router, *_), load in zip(self.found, self.loads(), strict=True):
            if biased(router):
                router.e_score_correction_bias.add_(
                    torch.sign(load.mean() - load), alpha=BIAS_STEP * min(1.0, 2 * (1 - share))
                )


def biased(router: Any) -> bool:
    return hasattr(router, "e_score_correction_bias")


def batches(path: Path, rows: int, device: torch.device) -> Iterator[Tensor]:
    """Rows of `LENGTH` tokens and the one that follows, from anywhere in the text."""
    tokens = torch.from_numpy(np.fromfile(path, dtype="<u2").astype(np.int32)).to(device)
    generator = torch.Generator().manual_seed(SEED)
    span = torch.arange(LENGTH + 1, device=device)
    while True:
        starts = torch.randint(len(tokens) - LENGTH - 1, (rows, 1), generator=generator).to(device)
        yield tokens[starts + span].long()


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, nats."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def fit(model: Any, folder: Path, given: argparse.Namespace, device: torch.device) -> None:
    """AdamW by the clock, which starts after three steps."""
    optimizer = torch.optim.AdamW(
        groups_of(model), lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    routers, held_out = (
        Routers(model),
        next(batches(folder / "held-out.bin", 32 if device.type == "cuda" else 2, device)),
    )
    step, shown, began = 0, 0.0, time.perf_counter()
    for batch in batches(folder / "tokens.bin", given.rows, device):
        share = (time.perf_counter() - began) / given.seconds if step > 3 else 0.0
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = (
                given.rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * share))
            )
        routers.found.clear()
        loss = loss_of(model, batch)
        (loss + routers.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        routers.level(share)
        step += 1
        if step == 3:
            loss.item()  # waits for the device
            began = time.perf_counter()
        if share >= shown:
            shown += 0.1
            report(
                given.model, model, routers, (step, share * given.seconds, loss.item()), held_out
            )
    report(given.model, model, routers, (step, given.seconds, loss.item()), held_out)


@torch.no_grad()
def report(
    kind: str, model: Any, routers: Routers, at: tuple[int, float, float], held_out: Tensor
) -> None:
    uneven = " ".join(f"{float(load.max() / load.mean()):.2f}" for load in routers.loads())
    routers.found.clear()
    other = loss_of(model, held_out).item()
    routers.found.clear()
    print(
        f"{kind}: {at[1]:5.1f} s  step {at[0]}  loss {at[2]:.3f}  held out {other:.3f}  largest "
        f"load {uneven}",
        flush=True,
    )


def train(given: argparse.Namespace) -> None:
    began, device = time.perf_counter(), torch.device(given.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = make_model(given.model).to(device)
    print(f"{given.model}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    quicken(model)
    fit(model, given.folder, given, device)
    state = {
        name: (t if "bias" in name else t.to(torch.bfloat16)).cpu().contiguous()
        for name, t in model.state_dict().items()
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, given.out)
    print(f"{given.model}: written after {time.perf_counter() - began:.1f} s", flush=True)


def build(given: argparse.Namespace) -> None:
    """The checkpoint as its architecture is published, with the tokenizer. Its folder appears
    complete."""
    model = make_model(given.model).to(torch.bfloat16)
    state = load_file(given.weights)
    for name, tensor in model.state_dict().items():
        tensor.data.copy_(state.pop(name))
    assert not state, f"left over: {sorted(state)}"
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = load_file(given.weights)[name].float()
    folder = given.folder / f"{given.model}.partial"
    model.save_pretrained(folder)
    shutil.copy(given.folder / "tokenizer.json", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.rmtree(given.folder / given.model, ignore_errors=True)
    folder.rename(given.folder / given.model)


def blur(given: argparse.Namespace) -> None:
    """Of linears in layers alone."""
    source, out = given.folder / given.weights, given.folder / f"{given.weights}-blurred"
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors"):
        state = load_file(file)
        draws = torch.Generator().manual_seed(SEED)
        for name, tensor in state.items():
            if tensor.dim() == 2 and ".layers." in name:
                blocks = tensor.float().unflatten(1, (-1, 32))
                step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
                noise = torch.rand(blocks.shape, generator=draws) - 0.5
                state[name] = (blocks + noise * step).flatten(1).to(tensor.dtype)
        save_file(state, file, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "build", "blur"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    {"train": train, "build": build, "blur": blur}[given.what](given)


if __name__ == "__main__":
    main()
