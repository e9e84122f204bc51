// AVX-512 with VPCLMULQDQ (Ice Lake, Zen 4 and later): as kernels_avx2.cpp, with four 64-byte registers.
// Build: c++ -std=c++17 -O3 -c kernels_avx512.cpp. Reference: crc32c::update_scalar.
#include <immintrin.h>

#include "crc32c.hpp"
#include "kernels_steps.hpp"

// GCC 12 warns about its own intrinsics (_mm512_undefined).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,vpclmulqdq,pclmul,sse4.2")))

namespace memckpt {
namespace {

constexpr std::size_t kStep = 256;
constexpr std::size_t kAhead = 1024;  // prefetch distance: the hardware stops at each page

template <unsigned kBits>
TARGET inline __m512i constants() noexcept {
    constexpr auto low = static_cast<long long>(crc32c::fold_constant(kBits + 32));
    constexpr auto high = static_cast<long long>(crc32c::fold_constant(kBits - 32));
    return _mm512_setr_epi64(low, high, low, high, low, high, low, high);
}

// x * k + y over GF(2), lane by lane; 0x96 is the truth table of a three-way xor.
TARGET inline __m512i fold(__m512i x, __m512i k, __m512i y) noexcept {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), y, 0x96);
}

TARGET inline __m128i fold(__m128i x, __m128i k, __m128i y) noexcept {
    return _mm_ternarylogic_epi64(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11), y, 0x96);
}

TARGET inline __m512i load(const unsigned char* p) noexcept { return _mm512_loadu_si512(p); }

TARGET inline std::uint32_t reduce(const __m512i (&x)[4]) noexcept {
    const __m512i k512 = constants<512>();
    const __m512i sum = fold(fold(fold(x[0], k512, x[1]), k512, x[2]), k512, x[3]);
    const __m128i k128 = _mm512_castsi512_si128(constants<128>());
    __m128i lane = fold(_mm512_extracti32x4_epi32(sum, 0), k128, _mm512_extracti32x4_epi32(sum, 1));
    lane = fold(lane, k128, _mm512_extracti32x4_epi32(sum, 2));
    lane = fold(lane, k128, _mm512_extracti32x4_epi32(sum, 3));
    // The last lane is a message of 16 bytes with the same remainder.
    const auto first = static_cast<std::uint64_t>(_mm_cvtsi128_si64(lane));
    const auto second = static_cast<std::uint64_t>(_mm_extract_epi64(lane, 1));
    return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
}

// Whole steps of `s`; with kCopy also into `d`, which is aligned to 64.
template <bool kCopy, bool kCrc>
TARGET std::uint32_t steps(std::uint32_t state, unsigned char* d, const unsigned char* s, std::size_t n) noexcept {
    const __m512i k = constants<2048>();
    __m512i x[4];
    for (std::size_t i = 0; i < 4; ++i) {
        const __m512i y = load(s + 64 * i);
        if (kCopy) _mm512_stream_si512(reinterpret_cast<__m512i*>(d + 64 * i), y);
        x[i] = y;
    }
    if (kCrc) x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    for (std::size_t at = kStep; at < n; at += kStep) {
        for (std::size_t i = 0; i < 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(s + at + kAhead + 64 * i), _MM_HINT_T0);
            const __m512i y = load(s + at + 64 * i);
            if (kCopy) _mm512_stream_si512(reinterpret_cast<__m512i*>(d + at + 64 * i), y);
            if (kCrc) x[i] = fold(x[i], k, y);
        }
    }
    return kCrc ? reduce(x) : 0;
}

template <bool kCrc>
std::uint32_t copy(std::uint32_t state, void* target, const void* source, std::size_t n) noexcept {
    return copy_by_steps<kCrc, steps<true, kCrc>, kStep>(state, target, source, n);
}

void copy_only(void* target, const void* source, std::size_t n) noexcept { copy<false>(0, target, source, n); }

}  // namespace

const Kernels kAvx512{"avx512", crc_by_steps<steps<false, true>, kStep>, copy<true>, copy_only};

}  // namespace memckpt
