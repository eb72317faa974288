/* What main.asc of CANN's CPU mode calls, over host memory, and its launch. */
#pragma once
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define aclrtStream void *
#define ACL_MEM_MALLOC_HUGE_FIRST 0
#define ACL_MEMCPY_HOST_TO_DEVICE 1
#define ACL_MEMCPY_DEVICE_TO_HOST 2
inline void aclInit(const char *) {}
inline void aclrtSetDevice(int) {}
inline void aclrtCreateStream(aclrtStream *) {}
inline void aclrtSynchronizeStream(aclrtStream) {}
inline void aclrtMalloc(void **at, size_t size, int) { *at = aligned_alloc(64, (size + 63) / 64 * 64); }
inline void aclrtMemcpy(void *to, size_t, const void *from, size_t size, int) { memcpy(to, from, size); }

#ifdef KERNEL_fp4_gemv
#define MIXED false
#else
#define MIXED true
#endif
#define LAUNCH(kernel, cores, stream, ...) AscendC::launch(cores, MIXED, inBatchMode(kernel), [=] { kernel(__VA_ARGS__); })
