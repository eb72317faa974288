"""Two folders run in environments of their own (make test-ascend) and are left out elsewhere.

lowered needs triton-ascend, which takes the name of triton; schemas needs torch_npu, which replaces
parts of torch when imported.
"""

from importlib.metadata import PackageNotFoundError, distribution

import pytest

FORMATS = {"rtn-w4a16": "compressed-tensors"}
"""Where it is not the scheme's first: so that both formats of int4 are seen, with their fp16 and
bf16 scales."""
ENVIRONMENTS = {"lowered": "triton-ascend", "schemas": "torch_npu"}


def _installed(package):
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


collect_ignore = [folder for folder, package in ENVIRONMENTS.items() if not _installed(package)]


@pytest.fixture(scope="module")
def called():
    """Within it backend torch_npu runs on the double; the names of the operators that were
    called."""
    from ascend import npu_double

    with npu_double.installed() as names:
        yield names


R1_ATTENTION = {
    "hidden_size": 1024,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "n_routed_experts": 16,
}
"""DeepSeek-R1's sizes of latent attention, for which torch_npu has operators of its own; the rest
is small."""


@pytest.fixture(scope="session")
def r1_attention(tmp_path_factory):
    """A random model with R1's latent attention on a scheme's grid, made once; scheme bf16 is the
    model itself, halves that with rotary pairs half a head apart, as openPangu-Ultra-MoE has them,
    and int8-attention int4 by that preset."""
    import make_model
    from quantized import quantized as write

    from quantkit.calibrate.recipe import Recipe
    from quantkit.quantization.mixed_precision import Mixture

    folder, config = tmp_path_factory.mktemp("r1_attention"), make_model.tiny_config(**R1_ATTENTION)
    tensors = make_model.random_tensors(config)
    source = make_model.write_dense(folder / "bf16", config, tensors)
    make_model.write_dense(folder / "halves", {**config, "rope_interleave": False}, tensors)

    def make(scheme):
        if not (folder / scheme).exists():
            mixture = Mixture(preset="int8-attention") if scheme == "int8-attention" else Mixture()
            recipe = Recipe(scheme="rtn-w4a16" if mixture.preset else scheme, methods=())
            write(source, folder / scheme, recipe, mixture=mixture)
        return folder / scheme

    return make


@pytest.fixture(scope="session")
def quantized(tmp_path_factory):
    """The built-in model rounded to nearest on a scheme's grid, made once."""
    from quantized import quantized as write

    from quantkit.calibrate.recipe import Recipe
    from quantkit.common.assets import builtin_model

    made = {}

    def make(scheme):
        if scheme not in made:
            made[scheme] = tmp_path_factory.mktemp("quantized") / scheme
            recipe = Recipe(scheme=scheme, methods=())
            target = FORMATS.get(scheme, "auto")
            write(builtin_model("tiny-r1"), made[scheme], recipe, target)
        return made[scheme]

    return make
