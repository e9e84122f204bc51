// The scalar reference of CRC-32C and the combination of checksums; see crc32c.hpp for contract and references.
// Build: c++ -std=c++17 -O3 -c crc32c.cpp
#include "crc32c.hpp"

#include <cstring>

namespace memckpt::crc32c {
namespace {

using Slices = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Slices make_slices() noexcept {
    Slices t{};
    for (std::uint32_t v = 0; v < 256; ++v) {
        std::uint32_t r = v;
        for (int k = 0; k < 8; ++k) r = times_x(r);
        t[0][v] = r;
    }
    for (std::size_t s = 1; s < 8; ++s)
        for (std::size_t v = 0; v < 256; ++v) t[s][v] = (t[s - 1][v] >> 8) ^ t[0][t[s - 1][v] & 0xff];
    return t;
}

constexpr Slices kSlices = make_slices();

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = times_x(b);
    }
    return product;
}

// x^(8 * 2^k): what 2^k zero bytes do to the register.
constexpr std::array<std::uint32_t, 64> make_powers() noexcept {
    std::array<std::uint32_t, 64> p{};
    p[0] = power_of_x(8);
    for (std::size_t k = 1; k < 64; ++k) p[k] = multiply(p[k - 1], p[k - 1]);
    return p;
}

constexpr std::array<std::uint32_t, 64> kPowers = make_powers();

}  // namespace

std::uint32_t update_scalar(std::uint32_t state, const void* data, std::size_t n) noexcept {
    const auto* p = static_cast<const unsigned char*>(data);
    while (n >= 8) {
        std::uint64_t word;
        std::memcpy(&word, p, 8);  // little endian, like every CPU this is built for
        word ^= state;
        state = kSlices[7][word & 0xff] ^ kSlices[6][word >> 8 & 0xff] ^ kSlices[5][word >> 16 & 0xff] ^
                kSlices[4][word >> 24 & 0xff] ^ kSlices[3][word >> 32 & 0xff] ^ kSlices[2][word >> 40 & 0xff] ^
                kSlices[1][word >> 48 & 0xff] ^ kSlices[0][word >> 56];
        p += 8;
        n -= 8;
    }
    while (n-- > 0) state = (state >> 8) ^ kSlices[0][(state ^ *p++) & 0xff];
    return state;
}

std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) noexcept {
    std::uint32_t shift = 0x80000000u;  // x^0
    for (std::size_t k = 0; second_nbytes != 0; ++k, second_nbytes >>= 1)
        if (second_nbytes & 1u) shift = multiply(kPowers[k], shift);
    return multiply(shift, first) ^ second;
}

}  // namespace memckpt::crc32c
