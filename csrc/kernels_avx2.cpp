// AVX2 with VPCLMULQDQ (Zen 3, Alder Lake): the checksum by folding 256 bytes at a time, non-temporal 32-byte stores.
//
// Sixteen 16-byte lanes (eight registers) hold a remainder congruent to all that was read; each step multiplies every lane
// by x^2048 mod P and adds the next 256 bytes. In the reflected form the low half of a lane has the higher powers, so its
// constant is x^(2048+32) and the other half's x^(2048-32). See crc32c.hpp for the references.
// Build: c++ -std=c++17 -O3 -c kernels_avx2.cpp. Reference: crc32c::update_scalar.
#include <immintrin.h>

#include "crc32c.hpp"
#include "kernels_steps.hpp"

#define TARGET __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))

namespace memckpt {
namespace {

constexpr std::size_t kStep = 256;
constexpr std::size_t kAhead = 1024;  // prefetch distance: the hardware stops at each page

template <unsigned kBits>
TARGET inline __m256i constants() noexcept {
    constexpr auto low = static_cast<long long>(crc32c::fold_constant(kBits + 32));
    constexpr auto high = static_cast<long long>(crc32c::fold_constant(kBits - 32));
    return _mm256_setr_epi64x(low, high, low, high);
}

TARGET inline __m256i fold(__m256i x, __m256i k) noexcept {
    return _mm256_xor_si256(_mm256_clmulepi64_epi128(x, k, 0x00), _mm256_clmulepi64_epi128(x, k, 0x11));
}

TARGET inline __m256i load(const unsigned char* p) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

TARGET inline std::uint32_t reduce(__m256i (&x)[8]) noexcept {
    const __m256i k256 = constants<256>();
    __m256i sum = x[0];
    for (int i = 1; i < 8; ++i) sum = _mm256_xor_si256(fold(sum, k256), x[i]);
    const __m128i k128 = _mm256_castsi256_si128(constants<128>());
    const __m128i low = _mm256_castsi256_si128(sum);
    const __m128i lane = _mm_xor_si128(_mm256_extracti128_si256(sum, 1),
                                       _mm_xor_si128(_mm_clmulepi64_si128(low, k128, 0x00), _mm_clmulepi64_si128(low, k128, 0x11)));
    // The last lane is a message of 16 bytes with the same remainder.
    const auto first = static_cast<std::uint64_t>(_mm_cvtsi128_si64(lane));
    const auto second = static_cast<std::uint64_t>(_mm_extract_epi64(lane, 1));
    return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
}

// Whole steps of `s`; with kCopy also into `d`, which is aligned to 32.
template <bool kCopy, bool kCrc>
TARGET std::uint32_t steps(std::uint32_t state, unsigned char* d, const unsigned char* s, std::size_t n) noexcept {
    const __m256i k = constants<2048>();
    __m256i x[8];
    for (std::size_t i = 0; i < 8; ++i) {
        const __m256i y = load(s + 32 * i);
        if (kCopy) _mm256_stream_si256(reinterpret_cast<__m256i*>(d + 32 * i), y);
        x[i] = y;
    }
    if (kCrc) x[0] = _mm256_xor_si256(x[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(state))));
    for (std::size_t at = kStep; at < n; at += kStep) {
        for (std::size_t i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(s + at + kAhead + 64 * i), _MM_HINT_T0);
        for (std::size_t i = 0; i < 8; ++i) {
            const __m256i y = load(s + at + 32 * i);
            if (kCopy) _mm256_stream_si256(reinterpret_cast<__m256i*>(d + at + 32 * i), y);
            if (kCrc) x[i] = _mm256_xor_si256(fold(x[i], k), y);
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

const Kernels kAvx2{"avx2", crc_by_steps<steps<false, true>, kStep>, copy<true>, copy_only};

}  // namespace memckpt
