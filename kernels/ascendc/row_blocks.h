/* Rows sorted by expert, in blocks of at most `maxRows` of one expert; every block has `parts` items, which are dealt to cores in turn. */
#pragma once
#include "kernel_operator.h"

struct RowBlocks {
    AscendC::GlobalTensor<int64_t> ends;  // of each expert's rows
    uint32_t experts, maxRows, parts;
    uint32_t stride;  // cores
    uint64_t item;    // this core's next
    uint32_t expert, firstRow, rows, part, block;

    __aicore__ inline void Begin(GM_ADDR groupList, uint32_t numExperts, uint32_t rowsOfBlock, uint32_t itemsOfBlock, uint32_t core,
                                 uint32_t cores)
    {
        ends.SetGlobalBuffer((__gm__ int64_t *)groupList);
        experts = numExperts;
        maxRows = rowsOfBlock;
        parts = itemsOfBlock;
        stride = cores;
        item = core;
        expert = 0;
        block = 0;
        start = 0;
        end = experts > 0 ? static_cast<uint32_t>(ends.GetValue(0)) : 0;
    }

    /* Whether this core has another item; the fields identify it. */
    __aicore__ inline bool Next()
    {
        const uint32_t wanted = static_cast<uint32_t>(item / parts);
        while (true) {
            const uint32_t blocks = (end - start + maxRows - 1) / maxRows;
            if (wanted < block + blocks) {
                firstRow = start + (wanted - block) * maxRows;
                rows = end - firstRow < maxRows ? end - firstRow : maxRows;
                part = static_cast<uint32_t>(item % parts);
                number = wanted;
                item += stride;
                return true;
            }
            block += blocks;
            start = end;
            expert++;
            if (expert >= experts) {
                return false;
            }
            end = static_cast<uint32_t>(ends.GetValue(expert));
        }
    }

    uint32_t number;  // of the block, over all experts

private:
    uint32_t start, end;
};
