// Vectors of sixteen numbers, and the few operations on them that the kernels need.
//
// The code uses the compiler's portable vectors, so that one source serves AVX-512, AVX2 and NEON.
// The instructions of AVX-512, AVX2 and NEON are used where available. Tests define TOKENLEAP_PORTABLE to
// test the portable code instead, which has the bits of AVX2 and of NEON.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && !defined(TOKENLEAP_PORTABLE)
#define TOKENLEAP_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(TOKENLEAP_PORTABLE)
#define TOKENLEAP_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(TOKENLEAP_PORTABLE)
#define TOKENLEAP_NEON 1
#include <arm_neon.h>
#endif

namespace tokenleap {

constexpr int LANES = 16;

using bf16 = uint16_t;
using half = uint16_t;
template <class Vector>
inline Vector load(const void* from) {
    if constexpr (std::is_class_v<Vector>) {  // a Pair
        using Half = decltype(Vector::low);
        return {load<Half>(from), load<Half>((const uint8_t*)from + sizeof(Half))};
    } else {
        Vector v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
}

template <class Vector>
inline void store(void* to, Vector v) {
    std::memcpy(to, &v, sizeof v);
}

#if defined(TOKENLEAP_AVX2) || defined(TOKENLEAP_NEON)

constexpr int SUMS = 6;  // vectors of sums that fit into registers, beside their factors

// The result of a comparison. Its size must not depend on a template: GCC 12 would ignore it.
#ifdef TOKENLEAP_AVX2
using Compared = int32_t __attribute__((vector_size(32)));
#else
using Compared = int32_t __attribute__((vector_size(16)));
#endif

// Two vectors: GCC keeps vectors that are larger than a register in memory.
template <class Half>
struct Pair {
    using Number = std::decay_t<decltype(Half{}[0])>;
    static constexpr int MIDDLE = sizeof(Half) / sizeof(Number);
    Half low, high;

    Pair() = default;
    Pair(Half low, Half high) : low(low), high(high) {}
    Pair(Number x) : low(x - Half{}), high(low) {}
    template <class Other>
    explicit Pair(Pair<Other> x) : low((Half)x.low), high((Half)x.high) {}  // the same bits

    Number operator[](int i) const { return i < MIDDLE ? low[i] : high[i - MIDDLE]; }

    friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
    friend Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
    friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
    friend Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
    friend Pair operator&(Pair a, Pair b) { return {a.low & b.low, a.high & b.high}; }
    friend Pair operator|(Pair a, Pair b) { return {a.low | b.low, a.high | b.high}; }
    friend Pair operator<<(Pair a, int bits) { return {a.low << bits, a.high << bits}; }
    friend Pair operator>>(Pair a, int bits) { return {a.low >> bits, a.high >> bits}; }
    friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
    friend auto operator==(Pair a, Pair b) { return pair(a.low == b.low, a.high == b.high); }
    friend auto operator!=(Pair a, Pair b) { return pair(a.low != b.low, a.high != b.high); }
    friend auto operator<(Pair a, Pair b) { return pair(a.low < b.low, a.high < b.high); }
    friend auto operator>(Pair a, Pair b) { return pair(a.low > b.low, a.high > b.high); }
    friend auto operator>=(Pair a, Pair b) { return pair(a.low >= b.low, a.high >= b.high); }

    Pair& operator+=(Pair b) { return *this = *this + b; }
    Pair& operator*=(Pair b) { return *this = *this * b; }
    Pair& operator|=(Pair b) { return *this = *this | b; }

private:
    // The results of comparisons, which have another type of integer on Windows.
    template <class Which>
    static auto pair(Which low, Which high) {
        if constexpr (std::is_class_v<Which>) {
            return Pair<Which>(low, high);
        } else {
            return Pair<Compared>((Compared)low, (Compared)high);
        }
    }
};

template <class Half>
inline void store(void* to, Pair<Half> v) {
    store(to, v.low);
    store((uint8_t*)to + sizeof v.low, v.high);
}

template <class Which, class Vector>
inline Vector select(Which which, Vector a, Vector b) {
    return which ? a : b;
}

template <class Which, class Half>
inline Pair<Half> select(Pair<Which> which, Pair<Half> a, Pair<Half> b) {
    return {select(which.low, a.low, b.low), select(which.high, a.high, b.high)};
}

#endif

#ifdef TOKENLEAP_AVX2

using u16x16 = uint16_t __attribute__((vector_size(32)));
using f32x8 = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using u32x8 = uint32_t __attribute__((vector_size(32)));
using f32x16 = Pair<f32x8>;
using i32x16 = Pair<i32x8>;
using u32x16 = Pair<u32x8>;

// Lanes 0 to 7, and from 8 on.
template <class Eight, class Of>
inline Pair<Eight> eights(Of of) {
    return {(Eight)of(0), (Eight)of(8)};
}

// Undo what instructions that pack two vectors make of their order.
inline __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xd8); }

inline f32x16 to_float(i32x16 x) {
    return {__builtin_convertvector(x.low, f32x8), __builtin_convertvector(x.high, f32x8)};
}

inline i32x16 to_int(f32x16 x) {
    return {__builtin_convertvector(x.low, i32x8), __builtin_convertvector(x.high, i32x8)};
}

#elif defined(TOKENLEAP_NEON)

using u16x8 = uint16_t __attribute__((vector_size(16)));
using f32x4 = float __attribute__((vector_size(16)));
using i32x4 = int32_t __attribute__((vector_size(16)));
using u32x4 = uint32_t __attribute__((vector_size(16)));
using u16x16 = Pair<u16x8>;
using f32x16 = Pair<Pair<f32x4>>;
using i32x16 = Pair<Pair<i32x4>>;
using u32x16 = Pair<Pair<u32x4>>;

// A function of each four lanes of some vectors.
template <class Four, class Of, class... Vectors>
inline Pair<Pair<Four>> fours(Of of, Vectors... x) {
    return {{(Four)of(x.low.low...), (Four)of(x.low.high...)}, {(Four)of(x.high.low...), (Four)of(x.high.high...)}};
}

// 16-bit numbers of each four lanes, as the function takes them out of 32-bit ones.
template <class Of>
inline u16x16 packed(Of of, u32x16 x) {
    auto both = [&](Pair<u32x4> half) {
        return (u16x8)vcombine_u16(of((uint32x4_t)half.low), of((uint32x4_t)half.high));
    };
    return {both(x.low), both(x.high)};
}

inline f32x16 to_float(i32x16 x) {
    return fours<f32x4>([](i32x4 four) { return vcvtq_f32_s32((int32x4_t)four); }, x);
}

inline i32x16 to_int(f32x16 x) {
    return fours<i32x4>([](f32x4 four) { return vcvtq_s32_f32((float32x4_t)four); }, x);
}

#else

constexpr int SUMS = 24;

using u16x16 = uint16_t __attribute__((vector_size(32)));
using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));

// a where a comparison holds, else b.
template <class Vector>
inline Vector select(i32x16 which, Vector a, Vector b) {
    return which ? a : b;
}

inline f32x16 to_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }

inline i32x16 to_int(f32x16 x) { return __builtin_convertvector(x, i32x16); }

#endif

inline f32x16 splat(float x) { return x - f32x16{}; }
inline i32x16 splat(int32_t x) { return x - i32x16{}; }
inline u32x16 splat(uint32_t x) { return x - u32x16{}; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#ifdef TOKENLEAP_AVX512
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TOKENLEAP_AVX2)
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
#elif defined(TOKENLEAP_NEON)
    auto of = [](f32x4 a, f32x4 b, f32x4 c) { return vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); };
    return fours<f32x4>(of, a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Compilers convert the halves of a vector one by one.
inline u32x16 widen_bits(u16x16 x) {
#ifdef TOKENLEAP_AVX512
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(TOKENLEAP_AVX2)
    __m256i all = (__m256i)x;
    return {(u32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)),
            (u32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1))};
#elif defined(TOKENLEAP_NEON)
    auto both = [](u16x8 eight) {
        return Pair<u32x4>((u32x4)vmovl_u16(vget_low_u16((uint16x8_t)eight)), (u32x4)vmovl_high_u16((uint16x8_t)eight));
    };
    return {both(x.low), both(x.high)};
#else
    return __builtin_convertvector(x, u32x16);
#endif
}

inline f32x16 widen(const bf16* from) { return (f32x16)(widen_bits(load<u16x16>(from)) << 16); }

inline f32x16 widen_half(const half* from) {
#ifdef TOKENLEAP_AVX512
    return (f32x16)_mm512_cvtph_ps((__m256i)load<u16x16>(from));
#elif defined(TOKENLEAP_AVX2)
    return eights<f32x8>([&](int i) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))); });
#elif defined(TOKENLEAP_NEON)
    auto both = [&](int i) {
        float16x8_t eight = (float16x8_t)load<u16x8>(from + i);
        return Pair<f32x4>((f32x4)vcvt_f32_f16(vget_low_f16(eight)), (f32x4)vcvt_high_f32_f16(eight));
    };
    return {both(0), both(8)};
#else
    // Read as a float, exponent and mantissa are too small by 2^112, also for subnormal numbers.
    u32x16 bits = widen_bits(load<u16x16>(from));
    f32x16 magnitude = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;
    return (f32x16)((u32x16)magnitude | (bits & 0x8000) << 16);
#endif
}

// To the nearest, ties to even; NaN stays NaN, so that it reaches the logits.
inline u16x16 narrow(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i32x16 is_nan = x != x;
    u32x16 words = select(is_nan, (bits >> 16) | 0x40, rounded);
#ifdef TOKENLEAP_AVX512
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)words);
#elif defined(TOKENLEAP_AVX2)
    return (u16x16)in_order(_mm256_packus_epi32((__m256i)words.low, (__m256i)words.high));
#elif defined(TOKENLEAP_NEON)
    return packed([](uint32x4_t four) { return vmovn_u32(four); }, words);
#else
    return __builtin_convertvector(words, u16x16);
#endif
}

// The same of numbers that are 0 or not subnormal.
inline u16x16 narrow_normal(f32x16 x) {
#if defined(TOKENLEAP_AVX512) && defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    return narrow(x);
#endif
}

// To the nearest integer, ties to even, of numbers below 2^22; others give an arbitrary integer.
inline i32x16 nearest(f32x16 x) { return (i32x16)(x + 12582912.0f) - 0x4b400000; }

inline void store_bytes(int8_t* to, i32x16 x) {
#ifdef TOKENLEAP_AVX512
    store(to, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(TOKENLEAP_AVX2)
    i32x16 bytes = x & 0xff;
    __m256i words = in_order(_mm256_packus_epi32((__m256i)bytes.low, (__m256i)bytes.high));
    store(to, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#elif defined(TOKENLEAP_NEON)
    u16x16 words = packed([](uint32x4_t four) { return vmovn_u32(four); }, (u32x16)x);
    store(to, vcombine_u8(vmovn_u16((uint16x8_t)words.low), vmovn_u16((uint16x8_t)words.high)));
#else
    using i8x16 = int8_t __attribute__((vector_size(16)));
    store(to, __builtin_convertvector(x, i8x16));
#endif
}

// acc + a.lo * b.lo + a.hi * b.hi in every lane, for pairs of bfloat16.
inline f32x16 dot2(f32x16 acc, u32x16 a, uint32_t b) {
#if defined(TOKENLEAP_AVX512) && defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#else
#ifdef TOKENLEAP_AVX2
    __m256i all = _mm256_set1_epi32((int)b);
    asm("" : "+x"(all));  // GCC would shift before it makes copies, which takes twice as long
    u32x16 both = {(u32x8)all, (u32x8)all};
#else
    u32x16 both = splat(b);
#endif
    acc = fma((f32x16)(a << 16), (f32x16)(both << 16), acc);
    return fma((f32x16)(a & 0xffff0000u), (f32x16)(both & 0xffff0000u), acc);
#endif
}

#ifdef TOKENLEAP_AVX2
// The sum of two products in every lane, of 16-bit numbers.
inline i32x16 madd(i32x16 a, __m256i b) {
    return {(i32x8)_mm256_madd_epi16((__m256i)a.low, b), (i32x8)_mm256_madd_epi16((__m256i)a.high, b)};
}

// Sums of two products of bytes, in 16 bits; bytes of `a` are below 128.
inline i32x16 maddubs(u32x16 a, __m256i b) {
    return {(i32x8)_mm256_maddubs_epi16((__m256i)a.low, b), (i32x8)_mm256_maddubs_epi16((__m256i)a.high, b)};
}
#endif

// acc + the sum of four products in every lane: unsigned bytes of a, below 2^BITS, and signed bytes of b. At the end, take
// the `total`.
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 a, uint32_t b) {
#if defined(TOKENLEAP_AVX512) && defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32((int)b));
#elif defined(TOKENLEAP_AVX2)
    __m256i all = _mm256_set1_epi32((int)b);
    if constexpr (BITS == 4) {  // halves of a lane are sums of their own: eight times two products fit into 16 bits
        i32x16 more = maddubs(a, all);
        return {(i32x8)_mm256_add_epi16((__m256i)acc.low, (__m256i)more.low),
                (i32x8)_mm256_add_epi16((__m256i)acc.high, (__m256i)more.high)};
    }
    if constexpr (BITS < 8) return acc + madd(maddubs(a, all), _mm256_set1_epi16(1));
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
    i32x16 high = {(i32x8)_mm256_srli_epi16((__m256i)a.low, 8), (i32x8)_mm256_srli_epi16((__m256i)a.high, 8)};
    return acc + (madd((i32x16)(a & 0x00ff00ffu), even) + madd(high, odd));
#elif defined(TOKENLEAP_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
    int8x16_t all = vreinterpretq_s8_u32(vdupq_n_u32(b));
    auto of = [=](i32x4 acc, u32x4 a) { return vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, all); };
    return fours<i32x4>(of, acc, a);
#elif defined(TOKENLEAP_NEON) && defined(__ARM_FEATURE_DOTPROD)
    int8x16_t all = vreinterpretq_s8_u32(vdupq_n_u32(b));
    auto of = [=](i32x4 acc, u32x4 a) {
        if constexpr (BITS < 8) return vdotq_s32((int32x4_t)acc, (int8x16_t)a, all);
        // a = (a & 127) + 2 * (64 if bit 7 is set)
        uint8x16_t high = vshrq_n_u8(vandq_u8((uint8x16_t)a, vdupq_n_u8(128)), 1);
        int32x4_t more = vdotq_s32((int32x4_t)acc, (int8x16_t)vandq_u8((uint8x16_t)a, vdupq_n_u8(127)), all);
        return vdotq_s32(vdotq_s32(more, (int8x16_t)high, all), (int8x16_t)high, all);
    };
    return fours<i32x4>(of, acc, a);
#else
    for (int i = 0; i < 4; i++) {
        i32x16 bytes = (i32x16)((a >> (8 * i)) & 0xff);
        acc += bytes * (int32_t)(int8_t)(b >> (8 * i));
    }
    return acc;
#endif
}

// Of sums from 0 on of at most eight times four products.
template <int BITS>
inline i32x16 total(i32x16 acc) {
#ifdef TOKENLEAP_AVX2
    if constexpr (BITS == 4) return madd(acc, _mm256_set1_epi16(1));
#endif
    return acc;
}

// Adds in the same order with every compiler.
inline float sum(f32x16 x) {
#ifdef TOKENLEAP_AVX512
    return _mm512_reduce_add_ps((__m512)x);  // in the order of the loops below
#elif defined(TOKENLEAP_AVX2)
    __m256 eight = x.low + x.high;
    __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
#elif defined(TOKENLEAP_NEON)
    Pair<f32x4> eight = x.low + x.high;
    f32x4 four = eight.low + eight.high;
    return (four[0] + four[2]) + (four[1] + four[3]);
#else
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

inline int32_t sum(i32x16 x) {
#ifdef TOKENLEAP_AVX512
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(TOKENLEAP_NEON)
    Pair<i32x4> eight = x.low + x.high;
    return vaddvq_s32((int32x4_t)(eight.low + eight.high));
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

inline f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }

inline float max(f32x16 x) {
#ifdef TOKENLEAP_AVX512
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(TOKENLEAP_AVX2)
    __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
#elif defined(TOKENLEAP_NEON)
    Pair<f32x4> eight = select(x.low > x.high, x.low, x.high);
    return vmaxnmvq_f32((float32x4_t)select(eight.low > eight.high, eight.low, eight.high));
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// Whether a comparison holds in any lane.
inline bool any(i32x16 x) {
#ifdef TOKENLEAP_AVX512
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(TOKENLEAP_AVX2)
    __m256i either = (__m256i)(x.low | x.high);
    return !_mm256_testz_si256(either, either);
#elif defined(TOKENLEAP_NEON)
    Pair<i32x4> eight = x.low | x.high;
    return vmaxvq_u32((uint32x4_t)(eight.low | eight.high)) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= x[i];
    return found;
#endif
}

// e^x to about two units in the last place (Cephes' polynomial), of numbers up to 0; 0 below -87.
inline f32x16 exp_of_negative(f32x16 x) {
    i32x16 vanishes = x < -87.0f;
    x = select(vanishes, splat(-87.0f), x);
    f32x16 turns = x * 1.44269504f;
    u32x16 half = ((u32x16)turns & 0x80000000u) | (u32x16)splat(0.5f);  // 0.5 with the sign of turns
    i32x16 whole = to_int(turns + (f32x16)half);
    f32x16 n = to_float(whole);
    f32x16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y * r, r, r + 1.0f);
    y = (f32x16)((i32x16)y + (whole << 23));
    return select(vanishes, splat(0.0f), y);
}

// The same of any number; that of 88 beyond 88.
inline f32x16 exp(f32x16 x) { return exp_of_negative(select(x > 88.0f, splat(88.0f), x)); }

// The error function, to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline f32x16 erf(f32x16 x) {
    f32x16 size = max(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
    f32x16 y = fma(t, splat(1.061405429f), splat(-1.453152027f));
    y = fma(y, t, splat(1.421413741f));
    y = fma(y, t, splat(-0.284496736f));
    y = fma(y, t, splat(0.254829592f));
    f32x16 found = 1.0f - y * t * exp_of_negative(-x * x);
    return select(x < 0.0f, -found, found);
}

// cap tanh(x / cap)
inline f32x16 capped(f32x16 x, float cap) { return cap - 2.0f * cap / (1.0f + exp(x * (2.0f / cap))); }

// log(2^exponent * (1 + fraction)) for a fraction between -0.3 and 0.42 (Cephes' polynomial).
inline f32x16 log_of(f32x16 exponent, f32x16 fraction) {
    f32x16 square = fraction * fraction;
    f32x16 y = splat(7.0376836292e-2f);
    y = fma(y, fraction, splat(-1.1514610310e-1f));
    y = fma(y, fraction, splat(1.1676998740e-1f));
    y = fma(y, fraction, splat(-1.2420140846e-1f));
    y = fma(y, fraction, splat(1.4249322787e-1f));
    y = fma(y, fraction, splat(-1.6668057665e-1f));
    y = fma(y, fraction, splat(2.0000714765e-1f));
    y = fma(y, fraction, splat(-2.4999993993e-1f));
    y = fma(y, fraction, splat(3.3333331174e-1f));
    y = fma(y * fraction, square, exponent * -2.12194440e-4f);
    y = fma(square, splat(-0.5f), y);
    return fma(exponent, splat(0.693359375f), fraction + y);
}

// x = 2^exponent * (1 + fraction), for normal numbers above 0, as `log_of` wants it.
inline void split(f32x16 x, f32x16& exponent, f32x16& fraction) {
    i32x16 bits = (i32x16)x;
    fraction = (f32x16)((bits & 0x7fffff) | 0x3f000000);
    i32x16 low = fraction < 0.70710678f;
    exponent = to_float((bits >> 23) - 126 + low);
    fraction = select(low, fraction + fraction, fraction) - 1.0f;
}

// Natural logarithm of normal numbers above 0, to about two units in the last place.
inline f32x16 log(f32x16 x) {
    f32x16 exponent, fraction;
    split(x, exponent, fraction);
    return log_of(exponent, fraction);
}

}  // namespace tokenleap
