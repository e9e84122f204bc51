// The inner loops: checksum, copy, and both in one pass, one set for each kind of CPU.
//
// Contract of every function: any alignment, any size including 0, source and target do not overlap, nothing is read or
// written outside [source, source + n) and [target, target + n). Copies may use non-temporal stores: whoever publishes the
// copied bytes calls `store_fence()` first. CRC registers are raw, see crc32c.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace memckpt {

struct Kernels {
    const char* name;
    std::uint32_t (*crc)(std::uint32_t state, const void* data, std::size_t n) noexcept;
    std::uint32_t (*copy_crc)(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept;
    void (*copy)(void* target, const void* source, std::size_t n) noexcept;
};

// Orders non-temporal stores before everything that follows.
void store_fence() noexcept;

// The set in use: the best this CPU has, unless MEMCKPT_CPU or `select` named another. Throws std::invalid_argument when
// MEMCKPT_CPU names an unknown set, or one this CPU cannot run.
const Kernels& kernels();
const Kernels& best_kernels();  // whatever was named
void select_kernels(const std::string& name);

// Names of the sets that this CPU can run, worst first; and single features with their presence.
std::vector<std::string> runnable_kernels();
std::vector<std::pair<std::string, bool>> cpu_features();

}  // namespace memckpt
