/* What the tests call: one launch of the kernel of a source, and what its cores counted. */
#pragma once
#include "kernel_operator.h"

/* Where the linker puts kernels in batch mode. */
extern "C" __attribute__((weak, visibility("hidden"))) const char __start_schedmode1[], __stop_schedmode1[];
template <typename Kernel> bool inBatchMode(Kernel *kernel) {
    return (const char *)kernel >= __start_schedmode1 && (const char *)kernel < __stop_schedmode1;
}

#define EXPORT extern "C" __attribute__((used, visibility("default")))

EXPORT uint32_t counts_of(uint32_t index, AscendC::Counts *out) {
    if (index >= AscendC::cores.size()) return 0;
    *out = AscendC::cores[index]->counts;
    return 1 + AscendC::cores[index]->cube;
}
