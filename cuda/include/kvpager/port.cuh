// The only place where the GPU build and the CPU build of the tests differ.
//
// Scope: thread and warp primitives that plain C++ cannot say: dynamic shared memory, cp.async, ldmatrix,
// mma.sync, 8-bit floats. Under the emulator (KV_EMULATOR) the same names come from tests/emulator/.
// No standard headers: the run-time compiler has none.
#pragma once

#ifdef KV_EMULATOR
#define KV_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulator::dynamic_shared())
#define KV_GRID_CONSTANT
#define KV_ASSERT(condition) \
  ((condition) ? (void)0 : emulator::fail("%s:%d: %s", __FILE__, __LINE__, #condition))
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define KV_DYNAMIC_SHARED(type, name)                            \
  extern __shared__ __align__(16) unsigned char kv_shared_raw[]; \
  type* name = reinterpret_cast<type*>(kv_shared_raw)
#define KV_GRID_CONSTANT __grid_constant__
#ifdef KV_DEBUG
#define KV_ASSERT(condition) ((condition) ? (void)0 : __trap())
#else
#define KV_ASSERT(condition) ((void)0)
#endif
#endif

namespace kvpager {

// 8-bit storage types. They are bytes with a name; the conversions below are the only arithmetic.
struct e4m3 {
  unsigned char bits;
};
struct e5m2 {
  unsigned char bits;
};

#ifdef KV_EMULATOR
__device__ __forceinline__ float minus_infinity() { return -__builtin_inff(); }
__device__ __forceinline__ float fast_exp2(float x) { return emulator::exp2_value(x); }
__device__ __forceinline__ float fast_log2(float x) { return emulator::log2_value(x); }
__device__ __forceinline__ float2 unpack(e4m3, unsigned short pair) {
  return {emulator::decode_fp8<4>(pair & 0xff), emulator::decode_fp8<4>(pair >> 8)};
}
__device__ __forceinline__ float2 unpack(e5m2, unsigned short pair) {
  return {emulator::decode_fp8<5>(pair & 0xff), emulator::decode_fp8<5>(pair >> 8)};
}
__device__ __forceinline__ e4m3 to_e4m3(float x) { return {emulator::encode_fp8<4>(x)}; }
__device__ __forceinline__ e5m2 to_e5m2(float x) { return {emulator::encode_fp8<5>(x)}; }
// Starts a 16-byte copy from global to shared memory; it has landed after the wait that covers its group.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  emulator::copy_async(shared, global, 16);
}
__device__ __forceinline__ void copy_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  emulator::copy_async_wait(kPending);
}
#define KV_LDMATRIX(registers, row) emulator::ldmatrix<false>(registers, row, __LINE__)
#define KV_LDMATRIX_TRANSPOSED(registers, row) emulator::ldmatrix<true>(registers, row, __LINE__)
#define KV_MMA(type, d, a, b0, b1) emulator::mma_m16n8k16<type>(d, a, b0, b1, __LINE__)
#else
__device__ __forceinline__ float minus_infinity() { return -__int_as_float(0x7f800000); }
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_log2(float x) { return __log2f(x); }
__device__ __forceinline__ float2 unpack_halves(unsigned bits) {
  __half2 halves;
  memcpy(&halves, &bits, 4);
  return __half22float2(halves);
}
__device__ __forceinline__ float2 unpack(e4m3, unsigned short pair) {
#if __CUDA_ARCH__ >= 890
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
#else
  // The same exponent and mantissa bits in fp16 mean 2^-8 of the value; code 0x7f is not a number.
  const unsigned bytes = (pair & 0x00ffu) | ((pair & 0xff00u) << 8);
  const float2 small = unpack_halves(((bytes & 0x00800080u) << 8) | ((bytes & 0x007f007fu) << 7));
  const float nan = __int_as_float(0x7fffffff);
  return {(bytes & 0x7fu) == 0x7fu ? nan : small.x * 256.f,
          (bytes & 0x7f0000u) == 0x7f0000u ? nan : small.y * 256.f};
#endif
}
// The upper byte of an fp16 value is its e5m2 code.
__device__ __forceinline__ float2 unpack(e5m2, unsigned short pair) {
  return unpack_halves(((pair & 0x00ffu) << 8) | ((pair & 0xff00u) << 16));
}
__device__ __forceinline__ e4m3 to_e4m3(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}
__device__ __forceinline__ e5m2 to_e5m2(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
}
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// d += a * b, a: 16x16 row-major, b: 16x8 column-major, fp32 accumulators.
template <class T>
struct Mma;
template <>
struct Mma<__half> {
  static __device__ __forceinline__ void run(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <>
struct Mma<__nv_bfloat16> {
  static __device__ __forceinline__ void run(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
#define KV_LDMATRIX(registers, row) ldmatrix_x4(registers, row)
#define KV_LDMATRIX_TRANSPOSED(registers, row) ldmatrix_x4_transposed(registers, row)
#define KV_MMA(type, d, a, b0, b1) Mma<type>::run(d, a, b0, b1)
#endif

}  // namespace kvpager
