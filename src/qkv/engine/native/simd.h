// Sixteen lanes, whatever the machine: the operations that the kernels are written in.
//
//   F   16 float32       B   64 bytes: 16 rows of 4 weights, row r in bytes 4r .. 4r+3       I   16 int32
//
// A translation unit defines QKV_ISA (a namespace) and is compiled with that instruction set's flags. Every function here
// rounds as written: `fma` is one rounding everywhere, and the compiler may not contract the others (-ffp-contract=off),
// so that a sum does not depend on the kernel in which it stands.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace QKV_ISA {

INLINE int32_t word(const int8_t* p) { int32_t x; std::memcpy(&x, p, 4); return x; }

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };

INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
INLINE F set(float x) { return {_mm512_set1_ps(x)}; }
INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F real(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE F half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE F brain(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
// a where `flag` is 0 or more, else b.
INLINE F choose(F flag, F a, F b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(flag.v, _mm512_setzero_ps(), _CMP_GE_OQ), b.v, a.v)};
}
INLINE F nearest(F a) { return {_mm512_roundscale_ps(a.v, 8)}; }
INLINE F power2(F n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))}; }
INLINE I whole(F a) { return {_mm512_cvtps_epi32(a.v)}; }
INLINE void narrow(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
INLINE __m256 upper(__m512 a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)); }
INLINE float total4(__m128 a) {
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE float total(F a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper(a.v));
  return total4(_mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
}
INLINE float most(F a) { return _mm512_reduce_max_ps(a.v); }
INLINE int32_t total(I a) { return _mm512_reduce_add_epi32(a.v); }
INLINE B bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE B low(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
INLINE B high(B a) { return low({_mm512_srli_epi16(a.v, 4)}); }
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// Sums of products of 4 bits and 8 bits over a group of 32.
struct Sum4 {
  __m512i v;
  INLINE Sum4 zero() { return {_mm512_setzero_si512()}; }
  inline __attribute__((always_inline)) void take(B w, int32_t x) { v = _mm512_dpbusd_epi32(v, w.v, _mm512_set1_epi32(x)); }
  inline __attribute__((always_inline)) I total() const { return {v}; }
};
// Of 8 bits and 8 bits: the instruction wants one side unsigned, so weights are taken as w + 128, and 128 times the sum
// of the activations is taken off.
struct Sum8 {
  __m512i v;
  INLINE Sum8 zero(int32_t x_sum) { return {_mm512_set1_epi32(-128 * x_sum)}; }
  inline __attribute__((always_inline)) void take(B w, int32_t x) {
    v = _mm512_dpbusd_epi32(v, _mm512_xor_si512(w.v, _mm512_set1_epi8(-128)), _mm512_set1_epi32(x));
  }
  inline __attribute__((always_inline)) I total() const { return {v}; }
};
constexpr int TILE = 8, TILE_FLOAT = 12;  // tokens at once, of 32 registers

#elif defined(__AVX2__)

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };

INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F real(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE F half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F abs(F x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
INLINE __m256 choose(__m256 flag, __m256 a, __m256 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(flag, _mm256_setzero_ps(), _CMP_GE_OQ));
}
// x where `flag` is 0 or more, else y.
INLINE F choose(F flag, F x, F y) { return {choose(flag.a, x.a, y.a), choose(flag.b, x.b, y.b)}; }
INLINE F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F power2(F n) { return {power2(n.a), power2(n.b)}; }
INLINE I whole(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE void narrow(int8_t* p, I x) {
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
INLINE float total4(__m128 a) {
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE float total(F x) {
  __m256 b = _mm256_add_ps(x.a, x.b);
  return total4(_mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
}
INLINE float most(F x) {
  float v[8], m;
  _mm256_storeu_ps(v, _mm256_max_ps(x.a, x.b));
  m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
}
INLINE int32_t total(I x) {
  __m256i b = _mm256_add_epi32(x.a, x.b);
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
INLINE __m256 brain8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F brain(const uint16_t* p) { return {brain8(p), brain8(p + 8)}; }
INLINE B bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
INLINE B low(B x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
INLINE B high(B x) { return low({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// 16-bit sums: 8 times two products of at most 15 * 128 fit.
struct Sum4 {
  __m256i a, b;
  INLINE Sum4 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  inline __attribute__((always_inline)) void take(B w, int32_t x) {
    __m256i y = _mm256_set1_epi32(x);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, y));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, y));
  }
  inline __attribute__((always_inline)) I total() const {
    __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)};
  }
};
// |x| * (w with the sign of x): two products fit 16 bits, since neither side holds -128.
struct Sum8 {
  __m256i a, b;
  INLINE Sum8 zero(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  inline __attribute__((always_inline)) void take(B w, int32_t x) {
    __m256i y = _mm256_set1_epi32(x), size = _mm256_abs_epi8(y), one = _mm256_set1_epi16(1);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(w.a, y)), one));
    b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(w.b, y)), one));
  }
  inline __attribute__((always_inline)) I total() const { return {a, b}; }
};
constexpr int TILE = 3, TILE_FLOAT = 6;

#else  // any compiler

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };

#define EACH for (int i = 0; i < 16; i++)
INLINE F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
INLINE void store(float* p, F a) { std::memcpy(p, a.v, 64); }
INLINE F set(float x) { F r; EACH r.v[i] = x; return r; }
INLINE F add(F a, F b) { EACH a.v[i] += b.v[i]; return a; }
INLINE F mul(F a, F b) { EACH a.v[i] *= b.v[i]; return a; }
INLINE F max(F a, F b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F fma(F a, F b, F c) { EACH c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return c; }
INLINE F real(I a) { F r; EACH r.v[i] = (float)a.v[i]; return r; }
INLINE F sub(F a, F b) { EACH a.v[i] -= b.v[i]; return a; }
INLINE F div(F a, F b) { EACH a.v[i] /= b.v[i]; return a; }
INLINE F min(F a, F b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F abs(F a) { EACH a.v[i] = std::fabs(a.v[i]); return a; }
INLINE F choose(F flag, F a, F b) { EACH a.v[i] = flag.v[i] >= 0 ? a.v[i] : b.v[i]; return a; }
INLINE F nearest(F a) { EACH a.v[i] = std::nearbyint(a.v[i]); return a; }
INLINE F power2(F a) { EACH a.v[i] = std::ldexp(1.0f, (int)a.v[i]); return a; }
INLINE I whole(F a) { I r; EACH r.v[i] = (int32_t)std::nearbyint(a.v[i]); return r; }
INLINE void narrow(int8_t* p, I a) { EACH p[i] = (int8_t)a.v[i]; }
INLINE float total(F a) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
  return a.v[0];
}
INLINE float most(F a) { float m = a.v[0]; EACH m = a.v[i] > m ? a.v[i] : m; return m; }
INLINE int32_t total(I a) { int32_t s = 0; EACH s += a.v[i]; return s; }
INLINE float half1(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp((float)fraction, -24);
  bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  float r; std::memcpy(&r, &bits, 4); return r;
}
INLINE F half(const uint16_t* p) { F r; EACH r.v[i] = half1(p[i]); return r; }
INLINE F brain(const uint16_t* p) { F r; EACH { uint32_t u = (uint32_t)p[i] << 16; std::memcpy(&r.v[i], &u, 4); } return r; }
INLINE B bytes(const uint8_t* p) { B r; std::memcpy(r.v, p, 64); return r; }
INLINE B low(B a) { for (auto& x : a.v) x &= 15; return a; }
INLINE B high(B a) { for (auto& x : a.v) x >>= 4; return a; }
INLINE void prefetch(const void*) {}

struct Sum4 {
  int32_t v[16];
  INLINE Sum4 zero() { return {}; }
  void take(const B& w, int32_t x) {
    int8_t y[4]; std::memcpy(y, &x, 4);
    EACH for (int j = 0; j < 4; j++) v[i] += w.v[4 * i + j] * y[j];
  }
  I total() const { I r; std::memcpy(r.v, v, 64); return r; }
};
struct Sum8 {
  int32_t v[16];
  INLINE Sum8 zero(int32_t) { return {}; }
  void take(const B& w, int32_t x) {
    int8_t y[4]; std::memcpy(y, &x, 4);
    EACH for (int j = 0; j < 4; j++) v[i] += (int8_t)w.v[4 * i + j] * y[j];
  }
  I total() const { I r; std::memcpy(r.v, v, 64); return r; }
};
constexpr int TILE = 2, TILE_FLOAT = 2;
#undef EACH

#endif

INLINE F zero() { return set(0.0f); }

// e^x with an error of a few units in the last place; below -87 it is about 1e-38.
INLINE F exp(F x) {
  x = max(min(x, set(88.0f)), set(-87.0f));
  F n = nearest(mul(x, set(1.44269504f)));
  F r = fma(n, set(-0.693359375f), x);  // ln 2 in two parts
  r = fma(n, set(2.12194440e-4f), r);
  F p = set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, set(c));
  p = fma(p, mul(r, r), add(r, set(1.0f)));
  return mul(p, power2(n));
}

}  // namespace QKV_ISA
