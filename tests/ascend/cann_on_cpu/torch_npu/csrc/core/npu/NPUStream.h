/* Stands in for torch_npu's header: a stream that is none, and operators that are registered for the CPU. */
#pragma once
#define PrivateUse1 CPU

namespace c10_npu {
struct NPUStream {
    void *stream(bool) const { return nullptr; }
};
inline NPUStream getCurrentNPUStream() { return {}; }
} // namespace c10_npu
