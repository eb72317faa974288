/*
 * binding.cpp over torch_npu's own headers, on a CPU: what its library would have of the stream and of the queue is here.
 *
 * The queue runs nothing until it is drained: by `stream()`, by `stream(true)`, and by the operators below when they end. So a kernel that is
 * launched at once runs before what was queued.
 */
#include "../../../kernels/ascendc/binding.cpp"

#include <deque>
#include <functional>
#include <utility>

namespace {
std::deque<std::function<int()>> queued;

void drain()
{
    while (!queued.empty()) {
        const auto first = std::move(queued.front());
        queued.pop_front();
        TORCH_CHECK(first() == 0, "a launch failed");
    }
}

template <auto operation, typename... Given> at::Tensor ended(Given... given)
{
    at::Tensor result = operation(given...);
    drain();
    return result;
}
} // namespace

namespace c10_npu {
NPUStream getCurrentNPUStream(c10::DeviceIndex) { return NPUStream(NPUStream::UNCHECKED, c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU))); }
aclrtStream NPUStream::stream() const { return stream(true); }
aclrtStream NPUStream::stream(const bool need_empty) const
{
    if (need_empty) {
        drain();
    }
    return nullptr;
}
} // namespace c10_npu

void at_npu::native::OpCommand::RunOpApiV2(const std::string &, const PROC_FUNC &run, bool) { queued.push_back(run); }

TORCH_LIBRARY_FRAGMENT(quantkit_ascendc, library)
{
    /* An operator of torch_npu before a kernel: `to` is written when the queue comes to it. */
    library.def("copied_later(Tensor to, Tensor source) -> ()",
                [](const at::Tensor &to, const at::Tensor &source) { queued.push_back([=] { to.copy_(source); return 0; }); });
}

TORCH_LIBRARY_IMPL(quantkit_ascendc, CPU, library)
{
    library.impl("int4_grouped", ended<int4_grouped, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, int64_t>);
    library.impl("fp4_gemv", ended<fp4_gemv, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &,
                                   const at::Tensor &, int64_t, int64_t>);
}
