"""Packed weights cut for 2 ranks, and one kind for 4: tiny-r1 in every grid answers as one process
does."""

import pytest
from engines import completions, load
from packed_model import write_packed

from quantkit import SamplingParams
from quantkit.checkpoint.formats import awq, compressed_int4, modelopt
from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid

CASES = {
    "awq": (awq.FORMAT, IntGrid(4, 128, False)),
    "compressed-tensors int4": (compressed_int4.FORMAT, IntGrid(4, 128, True)),
    "modelopt FP4": (modelopt.FORMAT, Nvfp4Grid()),
}
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def plain():
    """tiny-r1's config without its quantization, and its tensors decoded, but for the MTP layer."""
    checkpoint = Checkpoint.open(find_model("tiny-r1"))
    config = {
        key: value for key, value in checkpoint.config.items() if key != "quantization_config"
    } | {"num_nextn_predict_layers": 0}
    skipped = f"model.layers.{config['num_hidden_layers']}."
    tensors = {
        f"{module}.weight": dequantize(checkpoint.weight(module)).bfloat16()
        for module in checkpoint.linears
    }
    inner = {name for linear in checkpoint.linears.values() for name in linear.tensors}
    tensors |= {name: checkpoint.read(name) for name in checkpoint.tensors if name not in inner}
    return config, {
        name: tensor for name, tensor in tensors.items() if not name.startswith(skipped)
    }


def answers(path, tp):
    """With their log-probabilities; and bytes of this rank's weights."""
    engine = load(path, max_model_len=128, tp=tp)
    prompts = [
        engine.tokenizer.encode_chat([{"role": "user", "content": f"What is {i * 7}+{i + 5}?"}])
        for i in range(4)
    ]
    done = completions(engine, prompts, GREEDY)
    engine.close()
    return done, engine.loaded.nbytes


def write(path, plain, format, grid):
    write_packed(path, *plain, format, grid)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / file).write_bytes((find_model("tiny-r1") / file).read_bytes())
    return path


@pytest.mark.parametrize("name", CASES)
def test_ranks_answer_as_one(tmp_path, plain, name):
    path = write(tmp_path / "model", plain, *CASES[name])
    alone, whole = answers(path, 1)
    for tp, share in ((2, 0.75), (4, 0.6)) if name == "awq" else ((2, 0.75),):
        together, held = answers(path, tp)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone], (
            f"{tp} ranks"
        )
        assert held < share * whole, "a rank holds more than its share and what is replicated"
