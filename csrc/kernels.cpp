// The scalar set, and the choice between all sets at run time; see kernels.hpp for the contract.
// Build: c++ -std=c++17 -O3 -c kernels.cpp   (no -march anywhere: each function names the features it needs)
#include "kernels.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "crc32c.hpp"
#include "kernel_sets.hpp"

namespace memckpt {
namespace {

std::uint32_t copy_crc_scalar(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept {
    constexpr std::size_t kTile = 4096;
    auto* d = static_cast<char*>(target);
    const auto* s = static_cast<const char*>(source);
    while (n > 0) {
        const std::size_t part = std::min(n, kTile);
        std::memcpy(d, s, part);
        state = crc32c::update_scalar(state, s, part);
        d += part;
        s += part;
        n -= part;
    }
    return state;
}

void copy_scalar(void* target, const void* source, std::size_t n) noexcept {
    if (n > 0) std::memcpy(target, source, n);
}

constexpr Kernels kScalar{"scalar", crc32c::update_scalar, copy_crc_scalar, copy_scalar};

struct Candidate {
    const Kernels* set;
    bool runnable;
};

std::vector<Candidate> candidates() {
    const bool sse42 = __builtin_cpu_supports("sse4.2") != 0;
    const bool fold = sse42 && __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
    const bool avx2 = fold && __builtin_cpu_supports("avx2") != 0;
    const bool avx512 = fold && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
                        __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0;
    return {{&kScalar, true}, {&kSse42, sse42}, {&kAvx2, avx2}, {&kAvx512, avx512}};
}

const Kernels* find(const std::string& name) {
    for (const auto& [set, runnable] : candidates())
        if (name == set->name) {
            if (!runnable) throw std::invalid_argument("CPU path " + name + ": this CPU lacks what it needs");
            return set;
        }
    throw std::invalid_argument("no such CPU path: " + name + " (scalar, sse42, avx2, avx512)");
}

const Kernels* initial() {
    const char* forced = std::getenv("MEMCKPT_CPU");
    return forced != nullptr && *forced != '\0' ? find(forced) : &best_kernels();
}

std::atomic<const Kernels*> g_selected{nullptr};

}  // namespace

void store_fence() noexcept { _mm_sfence(); }

const Kernels& best_kernels() {
    const Kernels* set = nullptr;
    for (const auto& candidate : candidates())
        if (candidate.runnable) set = candidate.set;
    return *set;
}

const Kernels& kernels() {
    const Kernels* set = g_selected.load(std::memory_order_acquire);
    if (set == nullptr) g_selected.store(set = initial(), std::memory_order_release);
    return *set;
}

void select_kernels(const std::string& name) { g_selected.store(find(name), std::memory_order_release); }

std::vector<std::string> runnable_kernels() {
    std::vector<std::string> names;
    for (const auto& [set, runnable] : candidates())
        if (runnable) names.emplace_back(set->name);
    return names;
}

std::vector<std::pair<std::string, bool>> cpu_features() {
    return {{"sse4.2", __builtin_cpu_supports("sse4.2") != 0},       {"pclmul", __builtin_cpu_supports("pclmul") != 0},
            {"avx2", __builtin_cpu_supports("avx2") != 0},           {"vpclmulqdq", __builtin_cpu_supports("vpclmulqdq") != 0},
            {"avx512f", __builtin_cpu_supports("avx512f") != 0},     {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
            {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},   {"avx512dq", __builtin_cpu_supports("avx512dq") != 0}};
}

}  // namespace memckpt
