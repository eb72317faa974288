"""Linears on several grids in one compressed-tensors checkpoint: stored as each grid's own format
stores it, and described so."""

import make_quantized
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match
from nearest import quantize_int
from refused import refused
from torch import nn

from quantkit.checkpoint.formats import compressed
from quantkit.checkpoint.formats.compressed_mixed import FORMAT
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize, round_to_nearest
from quantkit.grids.fp8_block import Fp8BlockGrid, Fp8BlockWeight
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid, Nvfp4Quantizer, global_scale

N, K = 64, 256
W4, W4_FINE, W8, W8_GROUPS, W4A8 = (
    IntGrid(4, 128, symmetric=False),
    IntGrid(4, 32, symmetric=True),
    IntGrid(8, None, symmetric=True),
    IntGrid(8, 64, symmetric=True),
    IntGrid(4, 64, symmetric=True, activation_bits=8),
)


def weight(grid):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if isinstance(grid, IntGrid):
        return quantize_int(w, grid, scale_dtype=FORMAT.scale_dtype_of(grid))
    if isinstance(grid, Nvfp4Grid):
        quantizer = Nvfp4Quantizer(global_scale(w.abs().amax()))
        return quantizer.encode(*round_to_nearest(w, quantizer))
    return Fp8BlockWeight(w.to(torch.float8_e4m3fn), torch.tensor([[0.5, 1.25]]))


GRIDS = (W4, W4_FINE, W8, W8_GROUPS, W4A8, Nvfp4Grid(), Fp8BlockGrid())
LAYOUT = {
    "model.layers.0.self_attn.q_proj": W8,
    "model.layers.1.self_attn.q_proj": W4,
    "model.layers.1.mlp.experts.0.down_proj": Nvfp4Grid(),
    "model.layers.1.mlp.experts.1.down_proj": Nvfp4Grid(),
    "model.layers.2.mlp.experts.0.down_proj": W4_FINE,
    "model.layers.2.mlp.experts.1.down_proj": W4_FINE,
    "model.layers.11.self_attn.q_proj": Fp8BlockGrid(),
}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: type(grid).__name__ + str(grid.group_size))
def test_a_linear_comes_back_as_it_was(grid):
    before = weight(grid)
    tensors = FORMAT.pack("m", before)
    found = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    assert found == {one.name: (one.dtype, one.shape) for one in FORMAT.specs("m", (N, K), grid)}
    assert torch.equal(dequantize(FORMAT.unpack("m", tensors)), dequantize(before))
    assert FORMAT.activation_bits_of(grid) == (8 if grid in (W8, W4A8) else 16)


@pytest.mark.parametrize("ignore", [[], ["lm_head"], ["re:.*o_proj$"]])
@pytest.mark.parametrize(
    "targets",
    [
        *(["Linear"], ["Embedding"], ["Linear", "Embedding"], ["lm_head"], ["re:.*embed_tokens$"]),
        *(["re:.*self_attn.*"], ["model.embed_tokens"], ["Conv2d"], ["Conv2d", "lm_head"]),
    ],
    ids=str,
)
def test_a_group_is_for_the_modules_that_the_library_matches(targets, ignore):
    """vLLM 54304: a group for embeddings is for no linear, nor one for linears for embeddings."""
    block = {"ignore": ignore, "config_groups": {"group_0": {"targets": targets}}}
    ignored = compressed.ignored({"quantization_config": block})
    for name, module in (
        ("model.embed_tokens", nn.Embedding(2, 2)),
        ("lm_head", nn.Linear(2, 2)),
        ("model.layers.0.self_attn.o_proj", nn.Linear(2, 2)),
        ("model.layers.0.mlp.down_proj", nn.Linear(2, 2)),
    ):
        assert ignored(name) is not is_match(name, module, targets, ignore), name


def described(layout):
    return FORMAT.config_block(
        None,
        dict(layout),
        [TensorSpec("model.layers.0.mlp.down_proj.weight", torch.bfloat16, (N, K))],
    )


def test_the_library_finds_every_module_in_the_group_of_its_grid():
    block = described(LAYOUT)
    config = QuantizationConfig.model_validate(block)
    assert config.format == "mixed-precision"
    formats = {
        W8: "int-quantized",
        W4: "pack-quantized",
        W4_FINE: "pack-quantized",
        Nvfp4Grid(): "nvfp4-pack-quantized",
    }
    for module, grid in LAYOUT.items():
        (found,) = (
            group
            for group in config.config_groups.values()
            if any(is_match(module, nn.Linear(1, 1), target) for target in group.targets)
        )
        assert found.format == formats.get(grid, "float-quantized"), module
        if isinstance(grid, IntGrid):
            weights = found.weights
            assert (weights.num_bits, weights.group_size) == (grid.bits, grid.group_size)
    assert not any("Linear" in g.targets for g in config.config_groups.values())


def write(path, layout, told):
    """A checkpoint whose tensors are of one layout and whose config.json is of another."""
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.zeros(N, K, dtype=torch.bfloat16)}
    for module, grid in layout.items():
        tensors |= FORMAT.pack(module, weight(grid))
    return make_quantized.write_stored(path, tensors, described(told))


def test_a_checkpoint_is_read_by_what_its_tensors_are(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path / "a", LAYOUT, LAYOUT))
    assert {module: linear.grid for module, linear in checkpoint.linears.items()} == LAYOUT
    for module, grid in LAYOUT.items():
        assert torch.equal(dequantize(checkpoint.weight(module)), dequantize(weight(grid)))
        part, first = checkpoint.weight_slice(module, "N", 8, 16)
        assert torch.equal(dequantize(part)[8 - first : 16 - first], dequantize(weight(grid))[8:16])


@pytest.mark.parametrize("wrong", [Nvfp4Grid(), W8, IntGrid(4, 64, symmetric=False)], ids=str)
def test_a_description_that_says_another_grid_is_refused(tmp_path, wrong):
    module = "model.layers.1.self_attn.q_proj"
    with refused(f"{module} is described as"):
        Checkpoint.open(write(tmp_path / "a", LAYOUT, {**LAYOUT, module: wrong}))
