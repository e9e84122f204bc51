// The sets that kernels.cpp chooses from; private to the kernels_*.cpp files.
#pragma once

#include "kernels.hpp"

namespace memckpt {

extern const Kernels kSse42, kAvx2, kAvx512;

// Short heads and tails of the wider paths are left to this one.
std::uint32_t crc_sse42(std::uint32_t state, const void* data, std::size_t n) noexcept;

}  // namespace memckpt
