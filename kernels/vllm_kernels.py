"""vLLM's release kernels compared with ours: its compiled operators, called through torch from the
files of an installed vLLM.

What they compute is not checked here: packed weights are random bits of the right shapes. Of vLLM's
Python only the codes of its number types are imported, so that any environment with the torch that
it was built for will do (vLLM 0.22.1: torch 2.11, CUDA 13).
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from quantkit_kernels.timing import copies_beyond_cache
from torch import Tensor

LIBRARIES = ("_C.abi3.so", "_C_stable_libtorch.abi3.so", "_moe_C.abi3.so")
DEVICE = torch.device("cuda")
GROUP_SIZE = 128  # of int4; FP4 has 16
Call = Callable[[], object]


class VllmKernels:
    """Marlin for int4 with zero points and for NVFP4, of linears and of experts; for int8 CUTLASS
    after quantizing the activations."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the package, such as .../site-packages/vllm."""
        missing = [name for name in (*LIBRARIES, "scalar_type.py") if not (folder / name).exists()]
        if missing:
            raise SystemExit(
                f"--vllm {folder}: no {', '.join(missing)} there; give the folder of an installed "
                "vllm package"
            )
        for name in LIBRARIES:
            torch.ops.load_library(str(folder / name))
        spec = importlib.util.spec_from_file_location("vllm_scalar_type", folder / "scalar_type.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        self._types = {
            "int4": module.scalar_types.uint4.id,
            "fp4": module.scalar_types.float4_e2m1f.id,
        }
        self._workspace = torch.zeros(
            torch.cuda.get_device_properties(DEVICE).multi_processor_count * 4,
            dtype=torch.int32,
            device=DEVICE,
        )

    def linears(self, kind: str, n: int, k: int) -> Callable[[Tensor], list[Call]]:
        """Weights W[n, k] enough to leave the cache between two uses; of x[M, k] it makes one call
        for each."""
        if kind == "int8":
            weights = [_random_bytes(n, k) for _ in range(copies_beyond_cache(n * k, DEVICE))]
            scale = torch.rand(n, 1, device=DEVICE)
            return lambda x: [lambda w=w: self._int8(x, w, scale) for w in weights]  # type: ignore[misc]
        packed = [
            self._packed(kind, (), n, k) for _ in range(copies_beyond_cache(n * k // 2, DEVICE))
        ]
        return lambda x: [lambda p=p: self._marlin(kind, x, p, n) for p in packed]  # type: ignore[misc]

    def experts(
        self, kind: str, count: int, hidden: int, intermediate: int
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """x[T, hidden], topk_ids [T, k] and topk_weights float32 [T, k] to [T, hidden], as vLLM's
        fused_marlin_moe goes about it."""
        gate_up = self._packed(kind, (count,), 2 * intermediate, hidden)
        down = self._packed(kind, (count,), hidden, intermediate)

        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            tokens, top_k = topk_ids.shape
            pairs = tokens * top_k
            block = next((size for size in (8, 16, 32, 48) if pairs / count / size < 0.9), 64)
            room = (
                min(pairs * block, pairs + count * (block - 1))
                if pairs < count
                else pairs + count * (block - 1)
            )
            order, owner, used = (
                torch.empty(size, dtype=torch.int32, device=DEVICE)
                for size in (room, -(-room // block), 1)
            )
            torch.ops._moe_C.moe_align_block_size(topk_ids, count, block, order, owner, used, None)
            places = (self._workspace, order, owner, used, topk_weights, block)
            first, between, second = (
                x.new_empty(pairs, size) for size in (2 * intermediate, intermediate, hidden)
            )
            self._marlin_experts(
                kind, x, first, gate_up, places, top_k, False, (tokens, 2 * intermediate, hidden)
            )
            torch.ops._C.silu_and_mul(between, first)
            self._marlin_experts(
                kind, between, second, down, places, 1, True, (pairs, hidden, intermediate)
            )
            y = torch.empty_like(x)
            torch.ops._moe_C.moe_sum(second.view(tokens, top_k, hidden), y)
            return y

        return run

    def _int8(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        x_codes, x_scale = (
            torch.empty_like(x, dtype=torch.int8),
            torch.empty(x.shape[0], 1, device=DEVICE),
        )
        torch.ops._C.dynamic_scaled_int8_quant(x_codes, x, x_scale, None)
        y = x.new_empty(x.shape[0], codes.shape[0])
        torch.ops._C.cutlass_scaled_mm(y, x_codes, codes.t(), x_scale, scale, None)
        return y

    def _packed(
        self, kind: str, lead: tuple[int, ...], n: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Weights, scales, zero points and global scale in Marlin's layout, of one matrix or of
        `lead` many."""
        words = _random_words(*lead, k // 16, n * 2)
        if kind == "fp4":
            scale = (torch.rand(*lead, k // 16, n, device=DEVICE) * 4 + 0.5).to(torch.float8_e4m3fn)
            return words, scale, None, torch.full(lead or (1,), 1e-3, device=DEVICE)
        scale = (torch.rand(*lead, k // GROUP_SIZE, n, device=DEVICE) * 0.01 + 0.001).bfloat16()
        return words, scale, _random_words(*lead, k // GROUP_SIZE, n // 8), None

    def _marlin(
        self,
        kind: str,
        x: Tensor,
        packed: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        n: int,
    ) -> object:
        words, scale, zeros, global_scale = packed
        weight = (
            words,
            None,
            scale,
            None,
            global_scale,
            zeros,
            None,
            None,
            self._workspace,
            self._types[kind],
        )
        return torch.ops._C.marlin_gemm(
            x, None, *weight, x.shape[0], n, x.shape[1], True, False, True, False
        )

    def _marlin_experts(
        self,
        kind: str,
        x: Tensor,
        y: Tensor,
        packed: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        places: tuple[object, ...],
        top_k: int,
        weigh: bool,
        sizes: tuple[int, int, int],
    ) -> None:
        words, scale, zeros, global_scale = packed
        weight = (words, None, scale, None, global_scale, zeros, None, None)
        tail = (True, False, True, False, -1, -1, -1)
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, y, *weight, *places, top_k, weigh, self._types[kind], *sizes, *tail
        )


def _random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)


def _random_bytes(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
