// Calls of this folder's functions one after the other, as they were recorded: by Python each takes some 3 us. On Linux, x86-64 and aarch64 pass
// integers and pointers in the order of a list, eight bytes each where they lie on the stack, and a float in a register of its own. So a function
// finds its arguments at the beginning of a longer list, and does not see the rest.

#include <stdint.h>
#include <string.h>

namespace {

constexpr int kNumbers = 20;
struct Call {
  int64_t function, numbers[kNumbers], fraction;  // the float's bits
};
using N = int64_t;
using Function = void (*)(N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, float);

}  // namespace

extern "C" void qk_repeat(const Call* calls, int count) {
  for (const Call* one = calls; one != calls + count; ++one) {
    const N* n = one->numbers;
    const uint32_t bits = (uint32_t)one->fraction;
    float fraction;
    memcpy(&fraction, &bits, sizeof fraction);
    ((Function)one->function)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19], fraction);
  }
}
