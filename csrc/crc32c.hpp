// CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected 0x82F63B78, initial value and final xor 0xFFFFFFFF), as in iSCSI.
//
// Contract: `update_*` work on the raw register (before the final xor), so that a checksum runs on through any number of
// pieces; `finish(update(start(seed), ...))` is the usual CRC, and `seed` the usual CRC of what came before.
// `combine(a, b, n)` is the CRC of A||B from those of A and B, where B has n bytes.
//
// References: RFC 3720 appendix B.4 (golden values); V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009 (the folding constants); M. Adler, crc32c.c (three interleaved streams).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace memckpt::crc32c {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;

constexpr std::uint32_t start(std::uint32_t seed) noexcept { return ~seed; }
constexpr std::uint32_t finish(std::uint32_t state) noexcept { return ~state; }

// The reference: eight bytes at a time through tables, on any CPU.
std::uint32_t update_scalar(std::uint32_t state, const void* data, std::size_t n) noexcept;

std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) noexcept;

// One step of the register by a zero bit: multiplies by x in the reflected field.
constexpr std::uint32_t times_x(std::uint32_t r) noexcept { return (r >> 1) ^ ((r & 1u) ? kPolynomial : 0u); }

// x^n mod P, reflected (bit 31 is x^0).
constexpr std::uint32_t power_of_x(unsigned n) noexcept {
    std::uint32_t r = 0x80000000u;
    for (unsigned i = 0; i < n; ++i) r = times_x(r);
    return r;
}

// Constant for folding by carry-less multiplication: reflected x^n mod P, shifted by one since a product of two reflected
// polynomials comes out one bit short.
constexpr std::uint64_t fold_constant(unsigned n) noexcept { return static_cast<std::uint64_t>(power_of_x(n)) << 1; }

// Tables that advance a register by a fixed number of zero bytes: four lookups instead of a polynomial product.
using ZeroTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ZeroTable zero_table(unsigned nbytes) noexcept {
    std::array<std::uint32_t, 32> bit{};  // the image of each single bit
    std::uint32_t r = power_of_x(8u * nbytes);
    for (int i = 31; i >= 0; --i) {
        bit[static_cast<unsigned>(i)] = r;
        r = times_x(r);
    }
    ZeroTable t{};
    for (unsigned b = 0; b < 4; ++b)
        for (unsigned v = 0; v < 256; ++v) {
            std::uint32_t x = 0;
            for (unsigned k = 0; k < 8; ++k)
                if (v >> k & 1u) x ^= bit[8 * b + k];
            t[b][v] = x;
        }
    return t;
}

inline std::uint32_t advance(const ZeroTable& t, std::uint32_t r) noexcept {
    return t[0][r & 0xff] ^ t[1][r >> 8 & 0xff] ^ t[2][r >> 16 & 0xff] ^ t[3][r >> 24];
}

}  // namespace memckpt::crc32c
