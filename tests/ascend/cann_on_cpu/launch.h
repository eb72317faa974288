/* Stands in for what ascendc_library generates: a launch over the CPU's version of Ascend C, in $ASCENDC_ON_CPU, on at most $ASCENDC_CORES. */
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#define ACLRT_LAUNCH_KERNEL(name) [](auto... given) -> uint32_t { return LaunchOnCpu(#name, given...); }

inline void Take(std::vector<void *> &operands, std::vector<uint32_t> &, void *one) { operands.push_back(one); }
inline void Take(std::vector<void *> &, std::vector<uint32_t> &sizes, uint32_t one) { sizes.push_back(one); }

template <typename... Given> uint32_t LaunchOnCpu(const std::string &name, int64_t cores, void *, Given... given)
{
    if (cores > std::stoll(std::getenv("ASCENDC_CORES"))) {
        throw std::runtime_error("more programs than cores: they would wait for ever");
    }
    const std::string path = std::string(std::getenv("ASCENDC_ON_CPU")) + "/launch_" + name + ".so";
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(dlerror());
    }
    std::vector<void *> operands;
    std::vector<uint32_t> sizes;
    (Take(operands, sizes, given), ...);
    reinterpret_cast<void (*)(uint32_t, uint32_t, void **, const uint32_t *)>(dlsym(library, "launch"))(
        static_cast<uint32_t>(cores), 0, operands.data(), sizes.data());
    return 0;
}
