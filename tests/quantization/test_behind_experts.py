"""A norm behind the routed experts, as openPangu-Ultra-MoE has it, a linear behind that, as Kimi-K3
has it, and the mixing of streams, as DeepSeek-V4 has it: calibration, pruning, the choice of grids
and what the report says heed them."""

import json

import make_model
import pytest
import torch
from letters import write_letters
from plain_weights import PlainWeights
from quantized import quantized
from small_recipe import SMALL, sequences_of
from tiny_models import CONFIGS, write

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.quantization.mixed_precision import Mixture

PANGU = {
    **make_model.tiny_config(num_hidden_layers=3, num_experts_per_tok=4),
    "model_type": "pangu_ultra_moe",
    "rope_theta": 25600000.0,
}
for absent in ("rope_scaling", "n_group", "topk_group", "topk_method"):
    PANGU.pop(absent)


def config_of(name, experts):
    if name == "pangu":
        return {**PANGU, "n_routed_experts": experts}
    if name == "deepseek_v4":
        return {**CONFIGS[name], "n_routed_experts": experts, "num_experts_per_tok": 4}
    kimi = CONFIGS["kimi_k3"]
    counts = {"num_experts": experts, "num_experts_per_token": 4}
    return {**kimi, "text_config": {**kimi["text_config"], **counts}}


def written(folder, name, experts):
    """Norms far from 1, as those behind the experts are: what experts add without it is of another
    size altogether."""
    config = config_of(name, experts)
    generator, tensors = torch.Generator().manual_seed(3), {}
    architecture = find_architecture(config)
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=generator)
        if row.role == "router_table":
            order = torch.rand(len(noise), experts, generator=generator).argsort(1)
            tensors[row.name] = order[:, : row.shape[1]]
            continue
        value = (
            0.3 * noise.exp()
            if row.role == "norm"
            else noise * (1.0 if row.role in ("embedding", "head") else row.shape[-1] ** -0.5)
        )
        tensors[row.name] = value if row.role == "router_bias" else value.bfloat16()
    write_letters(folder / "text.txt", 1500)
    return make_model.write_dense(folder / name, config, tensors)


@pytest.fixture(scope="module", params=["pangu", "kimi_k3", "deepseek_v4"])
def source(request, tmp_path_factory):
    """Every token asks every expert: none is chosen otherwise for a last bit."""
    return written(tmp_path_factory.mktemp("models"), request.param, 4)


def recipe_of(source, prune=0.0):
    sizes = SMALL | {"samples": 10, "held_out": 4, "seq_len": 48}
    text = str(source.parent / "text.txt")
    return Recipe(scheme="awq-w4a16", calibration=text, prune=prune, **sizes)


def said(path, sequences):
    """Log-probabilities of the next tokens by the whole model over what is stored."""
    checkpoint = Checkpoint.open(path)
    architecture = find_architecture(checkpoint.config)
    config = architecture.Config.from_dict(checkpoint.config)
    rows = [
        row
        for row in architecture.parameters(config)
        if not row.mtp and not (row.optional and row.name not in checkpoint.tensors)
    ]
    linears = checkpoint.linears
    tensors = {
        row.name: dequantize(checkpoint.weight(row.module))
        if row.module in linears
        else checkpoint.read(row.name).float()
        for row in rows
    }
    model = architecture.Model(config, PlainWeights(tensors, config.mixture.linears))
    with torch.inference_mode():
        return torch.cat(
            [model.logits(model(ids, CausalContext([len(ids)]))) for ids in sequences]
        ).log_softmax(-1)


def agrees(source, out, recipe):
    """KL that the report tells, and that of the whole models on the same text."""
    report = quantized(source, out, recipe)
    held_out = sequences_of(recipe, source).held_out
    before, after = (said(path, held_out) for path in (source, out))
    assert report.findings.next_token["kl"] == pytest.approx(
        float((before.exp() * (before - after)).sum(-1).mean()), rel=0.02
    )


def test_the_report_says_what_the_whole_models_say(source, tmp_path):
    agrees(source, tmp_path / "out", recipe_of(source))


@pytest.mark.parametrize("name", ["pangu", "kimi_k3", "deepseek_v4"])
def test_of_experts_that_were_left_out_too(name, tmp_path):
    source = written(tmp_path, name, 8)
    agrees(source, tmp_path / "out", recipe_of(source, 0.5))


def test_experts_that_token_ids_choose_are_others_where_theirs_are_gone(tmp_path):
    """Each token has as many as before, those that are kept in their places."""
    source = write(tmp_path / "v4", "deepseek_v4")
    write_letters(tmp_path / "text.txt", 1500)
    quantized(source, tmp_path / "out", recipe_of(source, 0.5))
    kept = json.loads((tmp_path / "out/pruning.json").read_text())["layers"]["0"]["kept"]
    before, after = (
        Checkpoint.open(path).read("layers.0.ffn.gate.tid2eid")
        for path in (source, tmp_path / "out")
    )
    alike = before == torch.tensor(kept)[after]
    assert torch.equal(alike, torch.isin(before, torch.tensor(kept)))
    assert not alike.all()
    assert (after.sort(1).values.diff(dim=1) > 0).all()


def test_grids_are_chosen_by_their_cost(source, tmp_path):
    """Within the bits that were asked for; the curve goes down to what costs nothing."""
    report = quantized(source, tmp_path / "out", recipe_of(source), mixture=Mixture(bits=6.0))
    told = json.loads((tmp_path / "out/report.json").read_text())["allocation"]
    assert told["bits"] <= 6.0
    assert told["size"] == report.output_bytes
    kls = [point["kl"] for point in told["curve"]]
    assert kls == sorted(kls, reverse=True)
    assert kls[0] > 0
    assert kls[-1] == 0
