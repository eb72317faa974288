/*
 * As much of Ascend C as kernels/ascendc uses, on a CPU.
 *
 * Written from the public interface's documentation for the tests; not CANN's header and no model of the chip's time. What a program may
 * not count on is made to fail:
 *   data that a copy brings into a queue's buffer is there when DeQue gives it; what leaves one is read when FreeTensor takes it, and in
 *   memory when the core's pipe was waited for (cores.h);
 *   before a copy, and after FreeTensor, a buffer holds NaN; a buffer is used as its state allows (allocated, queued, dequeued, free);
 *   a vector instruction that touches what another wrote, or writes what another read, without PipeBarrier between, ends the program;
 *   so do a step over a buffer's end, a misaligned block, too many buffers or event ids, and an atomic mode that is on when the kernel ends;
 *   so do cores that wait for each other where the task type or the scheduling mode does not let them.
 */
#pragma once
#include "cube.h"
#include "vector.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t *
#define KERNEL_TASK_TYPE_DEFAULT(type) AscendC::setTaskType(type)
/* A kernel's section says its mode: whether its address lies within that of batch mode. */
#define __schedmode__(mode) __attribute__((section("schedmode" #mode)))
#define ASCEND_IS_AIC (AscendC::isCube())
#define ASCEND_IS_AIV (!AscendC::isCube())
