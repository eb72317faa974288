#include "harness.h"

#include "fp4_gemv.cpp"

EXPORT void launch(uint32_t cores, uint32_t yielding, uint8_t **p, const uint32_t *sizes) {
    AscendC::yielding = yielding;
    AscendC::launch(cores, false, inBatchMode(fp4_gemv), [=] { fp4_gemv(p[0], p[1], p[2], p[3], p[4], p[5], p[6], sizes[0], sizes[1], sizes[2], sizes[3]); });
}
