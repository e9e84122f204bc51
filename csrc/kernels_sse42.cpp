// SSE4.2: the CPU's own CRC-32C instruction on three interleaved streams, copies with 16-byte non-temporal stores.
//
// The instruction takes three cycles but one can start in each, so a block is cut into three streams and their registers
// are joined by tables (M. Adler, crc32c.c). A copy goes in tiles that stay in the first-level cache between checksum
// and store.
// Build: c++ -std=c++17 -O3 -c kernels_sse42.cpp. Reference: crc32c::update_scalar.
#include <immintrin.h>

#include <cstring>

#include "crc32c.hpp"
#include "kernels_steps.hpp"

#define TARGET __attribute__((target("sse4.2")))

namespace memckpt {
namespace {

constexpr std::size_t kLong = 1360, kShort = 168;                // checksum only
constexpr std::size_t kStream = 1344, kTile = 3 * kStream;       // with a copy: whole cache lines, about a page
constexpr std::size_t kAhead = 4096;                             // prefetch distance
constexpr auto kStreamZeros = crc32c::zero_table(kStream);
constexpr auto kTileZeros = crc32c::zero_table(kTile);
constexpr auto kLongZeros = crc32c::zero_table(kLong);
constexpr auto kShortZeros = crc32c::zero_table(kShort);

inline std::uint64_t load8(const unsigned char* p) noexcept {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    return word;
}

template <std::size_t kBlock>
TARGET inline std::uint32_t three_ways(std::uint32_t state, const unsigned char* p, const crc32c::ZeroTable& zeros) noexcept {
    std::uint64_t a = state, b = 0, c = 0;
    for (std::size_t i = 0; i < kBlock; i += 8) {
        a = _mm_crc32_u64(a, load8(p + i));
        b = _mm_crc32_u64(b, load8(p + kBlock + i));
        c = _mm_crc32_u64(c, load8(p + 2 * kBlock + i));
    }
    const std::uint32_t ab = crc32c::advance(zeros, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    return crc32c::advance(zeros, ab) ^ static_cast<std::uint32_t>(c);
}

// One tile of three streams into `d`, which is aligned to 64. Stores go in order, three lines behind three lines of checksum,
// so that both overlap; stores to three places at once were slower. The registers of a tile start at zero and are joined to
// `state` afterwards, so that the next tile need not wait for this one.
template <bool kCrc>
TARGET inline std::uint32_t copy_tile(std::uint32_t state, unsigned char* d, const unsigned char* s) noexcept {
    std::uint64_t a = 0, b = 0, c = 0;
    for (std::size_t i = 0; i < kStream; i += 64) {
        for (std::size_t k = 0; k < 192; k += 64)
            _mm_prefetch(reinterpret_cast<const char*>(s + kAhead + 3 * i + k), _MM_HINT_T0);
        for (std::size_t k = 0; kCrc && k < 64; k += 8) {
            a = _mm_crc32_u64(a, load8(s + i + k));
            b = _mm_crc32_u64(b, load8(s + kStream + i + k));
            c = _mm_crc32_u64(c, load8(s + 2 * kStream + i + k));
        }
        for (std::size_t k = 0; k < 192; k += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(d + 3 * i + k),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 3 * i + k)));
    }
    if (!kCrc) return 0;
    const std::uint32_t ab = crc32c::advance(kStreamZeros, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    return crc32c::advance(kStreamZeros, ab) ^ static_cast<std::uint32_t>(c) ^ crc32c::advance(kTileZeros, state);
}

template <bool kCrc>
TARGET std::uint32_t tiles(std::uint32_t state, unsigned char* d, const unsigned char* s, std::size_t n) noexcept {
    for (std::size_t at = 0; at < n; at += kTile) state = copy_tile<kCrc>(state, d + at, s + at);
    return state;
}

template <bool kCrc>
std::uint32_t copy(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept {
    return copy_by_steps<kCrc, tiles<kCrc>, kTile>(state, target, source, n);
}

void copy_only(void* target, const void* source, std::size_t n) noexcept { copy<false>(0, target, source, n); }

}  // namespace

TARGET std::uint32_t crc_sse42(std::uint32_t state, const void* data, std::size_t n) noexcept {
    const auto* p = static_cast<const unsigned char*>(data);
    for (; n >= 3 * kLong; p += 3 * kLong, n -= 3 * kLong) state = three_ways<kLong>(state, p, kLongZeros);
    for (; n >= 3 * kShort; p += 3 * kShort, n -= 3 * kShort) state = three_ways<kShort>(state, p, kShortZeros);
    for (; n >= 8; p += 8, n -= 8) state = static_cast<std::uint32_t>(_mm_crc32_u64(state, load8(p)));
    for (; n > 0; ++p, --n) state = _mm_crc32_u8(state, *p);
    return state;
}

const Kernels kSse42{"sse42", crc_sse42, copy<true>, copy_only};

}  // namespace memckpt
