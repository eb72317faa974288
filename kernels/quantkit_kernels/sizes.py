"""Sizes of the products that plans are measured for and kernels are timed with: N and K of linears by what they are in the model.

shared_gu, dense_gu: gate and up side by side of DeepSeek-R1's shared expert and of its first layers; shared_dn, dense_dn: down.
"""

R1_LINEARS = {
    "q_a+kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "shared_gu": (4096, 7168),
    "shared_dn": (7168, 2048),
    "dense_gu": (36864, 7168),
    "dense_dn": (7168, 18432),
}
R1_RANK_LINEARS = {"q_b": (6144, 1536), "o": (7168, 4096), "dense_gu": (9216, 7168), "dense_dn": (7168, 4608)}
"""Those of which one tensor-parallel rank of four has a part; its shared expert is one of the routed ones."""
QWEN3_8B_LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
