// Copy and checksum loops with run-time dispatch; see kernels.hpp for the contract, crc32c.hpp for references.
// Build: c++ -std=c++17 -O3 -c kernels.cpp   (no -march: each function names the features it needs)
#include "kernels.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "crc32c.hpp"

namespace memckpt {
namespace {

constexpr std::size_t kTile = 4096;

std::uint32_t copy_crc_scalar(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept {
    auto* d = static_cast<char*>(target);
    const auto* s = static_cast<const char*>(source);
    while (n > 0) {
        const std::size_t part = std::min(n, kTile);
        std::memcpy(d, s, part);
        state = crc32c::update_scalar(state, d, part);
        d += part;
        s += part;
        n -= part;
    }
    return state;
}

void copy_plain(void* target, const void* source, std::size_t n) noexcept {
    if (n > 0) std::memcpy(target, source, n);
}

constexpr Kernels kScalar{"scalar", crc32c::update_scalar, copy_crc_scalar, copy_plain};

std::atomic<const Kernels*> g_selected{nullptr};

}  // namespace

void store_fence() noexcept { _mm_sfence(); }

const Kernels& kernels() { return kScalar; }
void select_kernels(const std::string& name) {
    if (name != "scalar") throw std::invalid_argument("no such CPU path here: " + name);
}
std::vector<std::string> runnable_kernels() { return {"scalar"}; }
std::vector<std::pair<std::string, bool>> cpu_features() { return {}; }

}  // namespace memckpt
