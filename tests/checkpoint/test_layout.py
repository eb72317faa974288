"""The layout: shards that any safetensors reader takes, and the same ones every time."""

from dataclasses import replace

import torch

from quantkit.checkpoint.header import TensorSpec, plan_layout

_SPECS = [
    TensorSpec(f"model.layers.{layer}.p.{part}", dtype, shape)
    for layer in range(4)
    for part, dtype, shape in (
        ("weight", torch.uint8, (5, 3)),
        ("scale", torch.float8_e4m3fn, (5,)),
        ("bias", torch.float32, (3,)),
    )
]


def test_shards_are_full_but_no_fuller_and_keep_modules_together():
    module_bytes = 15 + 5 + 12
    layout = plan_layout(_SPECS, shard_bytes=2 * module_bytes)
    assert [shard.name for shard in layout.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert {tensor.shard for name, tensor in layout.tensors.items() if ".2." in name} == {
        "model-00002-of-00002.safetensors"
    }
    assert layout.total_size == 4 * module_bytes
    assert sum(shard.size for shard in layout.shards) == 4 * module_bytes + sum(
        len(shard.header) for shard in layout.shards
    )
    assert len(plan_layout(_SPECS, shard_bytes=2 * module_bytes - 1).shards) == 4


def test_a_module_larger_than_a_shard_gets_one_of_its_own():
    assert len(plan_layout(_SPECS, shard_bytes=1).shards) == 4


def test_every_tensor_is_aligned_and_none_overlap():
    layout = plan_layout(_SPECS, shard_bytes=10**9)
    end = len(layout.shards[0].header)
    for tensor in sorted(layout.tensors.values(), key=lambda tensor: tensor.offset):
        assert tensor.offset == end
        assert tensor.offset % tensor.dtype.itemsize == 0
        end += tensor.nbytes
    assert end == layout.shards[0].size


def test_the_digest_tells_layouts_apart():
    digests = {
        plan_layout(specs, shard_bytes).digest
        for specs, shard_bytes in [
            (_SPECS, 10**9),
            (_SPECS, 64),
            (_SPECS[:-1], 10**9),
            ([*_SPECS[:-1], replace(_SPECS[-1], dtype=torch.int32)], 10**9),
        ]
    }
    assert len(digests) == 4
    assert plan_layout(list(_SPECS), 10**9).digest in digests
