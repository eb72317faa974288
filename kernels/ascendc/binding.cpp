/*
 * The kernels as operators of torch: torch.ops.quantkit_ascendc.int4_grouped and .fp4_gemv, on tensors of an NPU.
 *
 * NEVER BUILT, NEVER RUN: it needs torch_npu's and CANN's headers, and what ascendc_library generates. Layouts are those of int4_grouped.py and
 * fp4_gemv.py; the sources say what each operand is. cores: the device's, of the cube for int4_grouped and vector cores for fp4_gemv; more would
 * wait for ever at SyncAll. Scratch comes from torch's allocator, on the current stream.
 *
 * torch_npu launches its operators from a second thread, in the order of a queue (TASK_QUEUE_ENABLE), so a kernel goes into that queue: launched at
 * once it would start before the operators that make its operands.
 */
#include <ATen/ATen.h>
#include <torch/library.h>

#include "aclrtlaunch_fp4_gemv.h"
#include "aclrtlaunch_int4_grouped.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace {
at::Tensor scratch(const at::Tensor &like, at::IntArrayRef shape, at::ScalarType dtype) { return at::empty(shape, like.options().dtype(dtype)); }

void check(const at::Tensor &x, const at::Tensor &weight, const at::Tensor &group_list)
{
    TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kBFloat16 && x.is_contiguous(), "x is bfloat16 [R, K], in one piece");
    TORCH_CHECK(weight.is_contiguous() && group_list.is_contiguous(), "operands lie in one piece");
    TORCH_CHECK(group_list.scalar_type() == at::kLong && group_list.size(0) == weight.size(0), "group_list is int64 [E]");
}

/* launch, which holds the tensors, after what torch_npu has queued; its result is the runtime's error. */
template <typename Launch> void queue(const char *name, const Launch &launch)
{
    const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);  // the queue is not drained
    at_npu::native::OpCommand::RunOpApiV2(std::string("quantkit_ascendc_") + name, [launch, stream]() -> int { return launch(stream); });
}

at::Tensor int4_grouped(const at::Tensor &x, const at::Tensor &weight, const at::Tensor &parameters, const at::Tensor &group_list,
                        int64_t cores)
{
    check(x, weight, group_list);
    const int64_t rows = x.size(0), k = x.size(1), n = weight.size(1) * 256;
    TORCH_CHECK(k % 128 == 0 && k <= 8192 && weight.size(2) == k / 128, "K is a multiple of 128 up to 8192, and the weight's");
    TORCH_CHECK(parameters.scalar_type() == at::kHalf && parameters.is_contiguous(), "parameters are float16, in one piece");
    const at::Tensor digits = scratch(x, {rows, 2, k}, at::kChar), factors = scratch(x, {rows, 2, k / 128, 8}, at::kFloat);
    const at::Tensor slots = scratch(x, {cores, 4, 32768}, at::kChar), sums = scratch(x, {cores, 2, 16, 256}, at::kInt);
    at::Tensor y = scratch(x, {rows, n}, at::kBFloat16);
    if (rows > 0) {
        queue("int4_grouped", [=](aclrtStream stream) -> int {
            return ACLRT_LAUNCH_KERNEL(int4_grouped)(
                cores, stream, x.data_ptr(), weight.data_ptr(), parameters.data_ptr(), group_list.data_ptr(), digits.data_ptr(),
                factors.data_ptr(), slots.data_ptr(), sums.data_ptr(), y.data_ptr(), static_cast<uint32_t>(rows),
                static_cast<uint32_t>(weight.size(0)), static_cast<uint32_t>(k), static_cast<uint32_t>(n));
        });
    }
    return y;
}

at::Tensor fp4_gemv(const at::Tensor &x, const at::Tensor &weight, const at::Tensor &scale, const at::Tensor &global_scale,
                    const at::Tensor &group_list, int64_t splits, int64_t cores)
{
    check(x, weight, group_list);
    const int64_t rows = x.size(0), k = x.size(1), n = weight.size(1) * 512, experts = weight.size(0);
    TORCH_CHECK(k % 64 == 0 && weight.size(2) == k / 64, "K is a multiple of 64, and the weight's");
    TORCH_CHECK(splits > 0 && k / 64 % splits == 0, "splits divides K / 64");
    TORCH_CHECK(scale.is_contiguous() && global_scale.is_contiguous() && global_scale.scalar_type() == at::kFloat, "scales lie in one piece");
    const int64_t blocks = rows / 4 + std::min(rows, experts);  // at most: full ones, and a ragged one of every expert with rows
    const at::Tensor partial = scratch(x, {blocks, n / 512, splits, 4, 512}, at::kFloat);
    at::Tensor y = scratch(x, {rows, n}, at::kBFloat16);
    if (rows > 0) {
        queue("fp4_gemv", [=](aclrtStream stream) -> int {
            return ACLRT_LAUNCH_KERNEL(fp4_gemv)(
                cores, stream, x.data_ptr(), weight.data_ptr(), scale.data_ptr(), global_scale.data_ptr(), group_list.data_ptr(),
                partial.data_ptr(), y.data_ptr(), static_cast<uint32_t>(experts), static_cast<uint32_t>(k), static_cast<uint32_t>(n),
                static_cast<uint32_t>(splits));
        });
    }
    return y;
}
} // namespace

TORCH_LIBRARY(quantkit_ascendc, library)
{
    library.def("int4_grouped(Tensor x, Tensor weight, Tensor parameters, Tensor group_list, int cores) -> Tensor");
    library.def("fp4_gemv(Tensor x, Tensor weight, Tensor scale, Tensor global_scale, Tensor group_list, int splits, int cores) -> Tensor");
}

TORCH_LIBRARY_IMPL(quantkit_ascendc, PrivateUse1, library)
{
    library.impl("int4_grouped", int4_grouped);
    library.impl("fp4_gemv", fp4_gemv);
}
