// What the kernels of all widths have around their steps; private to the kernels_*.cpp files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernel_sets.hpp"

namespace memckpt {

// Whole steps of the source `s`, summed and (for a copy) stored into `d`, which is aligned to 64.
using Steps = std::uint32_t (*)(std::uint32_t state, unsigned char* d, const unsigned char* s, std::size_t n) noexcept;

// The checksum of anything: whole steps, and what is left over.
template <Steps kSteps, std::size_t kStep>
std::uint32_t crc_by_steps(std::uint32_t state, const void* data, std::size_t n) noexcept {
    const auto* s = static_cast<const unsigned char*>(data);
    if (const std::size_t whole = n / kStep * kStep; whole != 0) {
        state = kSteps(state, nullptr, s, whole);
        s += whole;
        n -= whole;
    }
    return crc_sse42(state, s, n);
}

// A copy of anything: a plain head up to the target's alignment, whole steps, a plain tail.
template <bool kCrc, Steps kSteps, std::size_t kStep>
std::uint32_t copy_by_steps(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept {
    auto* d = static_cast<unsigned char*>(target);
    const auto* s = static_cast<const unsigned char*>(source);
    const auto plain = [&](std::size_t part) {
        if (part == 0) return;
        if (kCrc) state = crc_sse42(state, s, part);
        std::memcpy(d, s, part);
        d += part;
        s += part;
        n -= part;
    };
    plain(std::min(n, -reinterpret_cast<std::uintptr_t>(d) & 63));
    if (const std::size_t whole = n / kStep * kStep; whole != 0) {
        state = kSteps(state, d, s, whole);
        d += whole;
        s += whole;
        n -= whole;
    }
    plain(n);
    return state;
}

}  // namespace memckpt
